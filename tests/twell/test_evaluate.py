"""Evaluation from the command line: what is written where, and lm-eval's tasks on local files, without a network."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from data import DataError
from data.loader import validation_batches
from data.prepared import open_prepared
from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer
from tests.twell.exchange import byte_set, save_run
from tests.twell.small import build, ffn_config, model_config
from twell import checkpoint, tracking
from twell.config import ConfigError
from twell.evaluate import EvaluateConfig, compute_densely, evaluate, main
from twell.generate import load_run
from twell.model import Transformer


def test_losses_are_those_of_the_model_and_land_in_the_runs_folder(tmp_path, capsys):
    run, data = tmp_path / "run", byte_set(tmp_path)
    model, _ = save_run(run)
    main([f"run={run}", f"data={data}", "tokens=200", "batch=3"])
    results = json.loads((run / "eval/step-00000007.json").read_text())
    values = results["validation"][data.name]
    batches = validation_batches(open_prepared(data), tokens=200, seq_len=17, micro=1)
    nats = sum(model(batch.tokens, batch.targets).loss_sum.item() for batch in batches)
    assert values["tokens"] == 200
    assert values["val/loss"] == pytest.approx(nats / 200, rel=1e-5)
    assert values["val/perplexity"] == pytest.approx(math.exp(nats / 200), rel=1e-5)
    n_bytes = sum(((batch.targets >= 0) & (batch.targets < 256)).sum().item() for batch in batches)
    assert values["val/bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-5)
    assert capsys.readouterr().out.startswith(f"{data.name}: val/loss {values['val/loss']:.4f}")


def test_later_evaluations_add_to_the_file(tmp_path):
    save_run(tmp_path / "run")
    path = tmp_path / "run/eval/step-00000007.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"validation": {"other": {"val/loss": 1.0}}, "tasks": {"t": {"acc": 0.5}}}))
    data = byte_set(tmp_path)
    now = evaluate(EvaluateConfig(run=str(tmp_path / "run"), data=str(data), tokens=50))
    results = json.loads(path.read_text())
    assert set(now["validation"]) == {data.name} and now["tasks"] == {}
    assert results["validation"] == now["validation"] | {"other": {"val/loss": 1.0}}
    assert results["tasks"] == {"t": {"acc": 0.5}}


def test_a_run_without_data_needs_some(tmp_path):
    save_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"nothing to do: give data=FOLDER, which this run lacks, or tasks=\[...\]"):
        evaluate(EvaluateConfig(run=str(tmp_path / "run")))


def test_data_of_another_tokenizer_is_refused(tmp_path):
    data = byte_set(tmp_path)
    reversed_bytes = BPETokenizer("reversed", ".", {bytes([i]): 255 - i for i in range(256)}, {END_OF_TEXT: 256})
    save_run(tmp_path / "run", tokenizer=reversed_bytes)
    with pytest.raises(ConfigError, match=r"made with the tokenizer bytes, not with the run's \(reversed\)"):
        evaluate(EvaluateConfig(run=str(tmp_path / "run"), data=str(data)))
    with pytest.raises(DataError, match="not a prepared data set"):
        evaluate(EvaluateConfig(run=str(tmp_path / "run"), data=str(tmp_path)))


def test_numbers_go_into_the_summary_of_the_runs_wandb_entry(tmp_path, monkeypatch):
    run, data = tmp_path / "run", byte_set(tmp_path)
    model, _ = save_run(run)
    checkpoint.save(run, 7, checkpoint.model_tensors(model), checkpoint.read_meta(run, 7) | {"wandb_id": "abc"})
    started = []

    class Entry:
        summary: dict = {}

        def finish(self):
            started.append("finished")

    def start(cfg, run, wandb_id, log):
        started.append((cfg.model.name, run.name, wandb_id))
        return Entry()

    monkeypatch.setattr(tracking, "start_wandb", start)
    values = evaluate(EvaluateConfig(run=str(run), data=str(data), tokens=50))["validation"][data.name]
    assert started == [("small", "run", "abc"), "finished"]
    assert Entry.summary == {f"eval/{data.name}/{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("argument", "message"),
    [("batch=0", "^batch=0: "), ("tokens=-1", "^tokens=-1: "), ("limit=0", "^limit=0: "), ("run=", "^run=: name")],
)
def test_a_wrong_argument_is_named(argument: str, message: str):
    with pytest.raises(ConfigError, match=message):
        main(["run=x", argument])


def test_evaluation_does_not_need_the_sparse_kernels():
    model = build("sparse")
    model.compute_dtype = torch.bfloat16
    for block in model.blocks:
        block.ffn.impl = "triton"
    compute_densely(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.rope.dtype == torch.float32 and {block.ffn.impl for block in model.blocks} == {"torch"}
    assert model(torch.tensor([[1, 2, 3]])).logits.dtype == torch.bfloat16


# ---- lm-eval


@dataclass
class Request:
    args: tuple


@pytest.fixture
def tasks():
    """The module, or a visible skip."""
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    from twell import evaluate_tasks

    return evaluate_tasks


def byte_model() -> Transformer:
    """257 ids, 17 tokens of context."""
    model = Transformer(model_config(), ffn_config("sparse"), 384, 257)
    model.init_weights(1)
    return model


@torch.no_grad()
def log_likelihood(model: Transformer, ids: list[int], n: int) -> float:
    """Of the last n of `ids`."""
    log_probs = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    return log_probs[-n:].gather(1, torch.tensor(ids[-n:])[:, None]).sum().item()


def test_log_likelihoods_are_those_of_single_sequences(tasks):
    model = byte_model()
    lm = tasks.TwellLM(model, ByteTokenizer(), batch=2)
    pairs = [("ab", "cdef"), ("a longer one", "x"), ("", "hello"), ("a context that is cut on its left", " end")]
    got = lm.loglikelihood([Request(pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(pairs, got):
        ids = (list(context.encode()) or [256]) + list(continuation.encode())
        assert value == pytest.approx(log_likelihood(model, ids[-18:], len(continuation)), rel=1e-4)
        assert not greedy
    best = model(torch.tensor([[97, 98]])).logits[0, -1].argmax().item()
    assert lm._score([([97, 98], [best])])[0][1]


def test_rolling_log_likelihoods_count_every_token_once(tasks):
    model = byte_model()
    lm = tasks.TwellLM(model, ByteTokenizer(), batch=2)
    texts = ["short", "seventeen letters", "a text that needs three windows, as it is long"]
    got = lm.loglikelihood_rolling([Request((text,)) for text in texts])
    for text, value in zip(texts, got):
        ids, expected = [256, *text.encode()], 0.0
        for start in range(0, len(ids) - 1, 17):
            window = ids[start : start + 18]
            if len(window) < 18 and start:  # the last window looks back as far as it can
                expected += log_likelihood(model, ids[-18:], len(window) - 1)
            else:
                expected += log_likelihood(model, window, len(window) - 1)
        assert value == pytest.approx(expected, rel=1e-4)


def test_generation_ends_at_a_stop_string(tasks):
    model = byte_model()
    lm = tasks.TwellLM(model, ByteTokenizer(), batch=2)
    free = {"until": [], "max_gen_toks": 12}
    whole = lm.generate_until([Request(("ab", free)), Request(("xyz", free)), Request(("", free))])
    assert len(set(whole)) == 3 and all(len(text) > 3 for text in whole)
    stop = whole[0][3:5]
    cut = lm.generate_until([Request(("ab", {"until": [stop, "\\0\\0"], "max_gen_toks": 12}))])
    assert cut == [whole[0][: whole[0].index(stop)]]
    sampled = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}
    assert lm.generate_until([Request(("ab", sampled))]) == lm.generate_until([Request(("ab", sampled))])


TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
{rest}
"""


def write_task(folder: Path, name: str, kind: str, documents: list[dict], rest: str) -> str:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    path = folder / f"{name}.yaml"
    path.write_text(TASK.format(name=name, data=data, kind=kind, rest=rest))
    return str(path)


def test_local_tasks_run_offline(tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    save_run(run)
    model, tokenizer, _ = load_run(run, "latest", torch.device("cpu"))
    questions = [{"q": f"what {i}", "choices": ["yes", "no", "perhaps"], "gold": i % 3} for i in range(6)]
    files = [
        write_task(
            tmp_path, "local_choice", "multiple_choice", questions,
            'doc_to_text: "{{q}}:"\ndoc_to_choice: choices\ndoc_to_target: gold\ntarget_delimiter: " "\n'
            "metric_list:\n  - metric: acc",
        ),
        write_task(
            tmp_path, "local_text", "loglikelihood_rolling", [{"text": "some words that are scored"}],
            'doc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n  - metric: bits_per_byte',
        ),
        write_task(
            tmp_path, "local_answer", "generate_until", [{"q": "ab", "a": "nothing"}],
            'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
            'generation_kwargs:\n  until: ["x"]\n  max_gen_toks: 5\nmetric_list:\n  - metric: exact_match',
        ),
    ]  # fmt: skip
    results = evaluate(EvaluateConfig(run=str(run), tasks=files, tokens=0))
    lm = tasks.TwellLM(model, tokenizer, 1)
    right = 0
    for question in questions:
        scores = lm.loglikelihood([Request((question["q"] + ":", f" {c}")) for c in question["choices"]], True)
        right += max(range(3), key=lambda i: scores[i][0]) == question["gold"]
    assert results["tasks"]["local_choice"]["acc"] == pytest.approx(right / 6)
    text = "some words that are scored"
    bits = -lm.loglikelihood_rolling([Request((text,))])[0] / math.log(2) / len(text)
    assert results["tasks"]["local_text"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert results["tasks"]["local_answer"]["exact_match"] == 0.0
    assert json.loads((run / "eval/step-00000007.json").read_text()) == results


def test_a_missing_task_is_named(tasks, tmp_path):
    with pytest.raises(ConfigError, match=r"tasks: no file .*mine\.yaml"):
        tasks.run_tasks(build(), ByteTokenizer(), [str(tmp_path / "mine.yaml")], None, None, 1)
    (tmp_path / "other.yaml").write_text("output_type: generate_until\n")
    with pytest.raises(ConfigError, match="has no line `task: NAME`"):
        tasks.run_tasks(build(), ByteTokenizer(), [str(tmp_path / "other.yaml")], None, None, 1)
