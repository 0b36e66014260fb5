"""Evaluation from the command line: what is written where, and lm-eval's tasks on local files, without a network."""

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import wandb

from data import DataError
from data.loader import validation_batches
from data.prepared import open_prepared
from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer
from tests.twell.exchange import byte_set, save_run
from tests.twell.small import build, ffn_config, model_config
from twell import checkpoint
from twell.config import ConfigError
from twell.errors import UserError
from twell.evaluate import EvaluateConfig, compute_densely, evaluate, main
from twell.generate import load_run
from twell.model import Transformer


def test_losses_are_those_of_the_model_and_land_in_the_runs_folder(tmp_path, capsys):
    run, data = tmp_path / "run", byte_set(tmp_path)
    model, _ = save_run(run)
    main([f"run={run}", f"data={data}", "tokens=200", "batch=3"])
    results = json.loads((run / "eval/step-00000007.json").read_text())
    values = results["validation"][f"{data.name}:tokens=200"]
    batches = validation_batches(open_prepared(data), tokens=200, seq_len=17, micro=1)
    nats = sum(model(batch.tokens, batch.targets).loss_sum.item() for batch in batches)
    assert values["tokens"] == 200
    assert values["val/loss"] == pytest.approx(nats / 200, rel=1e-5)
    assert values["val/perplexity"] == pytest.approx(math.exp(nats / 200), rel=1e-5)
    n_bytes = sum(((batch.targets >= 0) & (batch.targets < 256)).sum().item() for batch in batches)
    assert values["val/bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-5)
    assert capsys.readouterr().out.startswith(f"{data.name}:tokens=200: val/loss {values['val/loss']:.4f}")


def test_later_evaluations_add_to_the_file(tmp_path):
    save_run(tmp_path / "run")
    path = tmp_path / "run/eval/step-00000007.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"validation": {"other": {"val/loss": 1.0}}, "tasks": {"t": {"acc": 0.5}}}))
    data = byte_set(tmp_path)
    now = evaluate(EvaluateConfig(run=str(tmp_path / "run"), data=str(data), tokens=50))
    results = json.loads(path.read_text())
    assert set(now["validation"]) == {f"{data.name}:tokens=50"} and now["tasks"] == {}
    assert results["validation"] == now["validation"] | {"other": {"val/loss": 1.0}}
    assert results["tasks"] == {"t": {"acc": 0.5}}
    smaller = evaluate(EvaluateConfig(run=str(tmp_path / "run"), data=str(data), tokens=20))
    both = now["validation"] | smaller["validation"] | {"other": {"val/loss": 1.0}}
    assert json.loads(path.read_text())["validation"] == both and len(both) == 3


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


def test_a_folder_that_holds_no_data_is_not_to_be_deleted(tmp_path):
    save_run(tmp_path / "run")
    for folder in (tmp_path / "nope", tmp_path):
        with pytest.raises(ConfigError, match=r"^data=.*: no prepared data set there \(meta\.json is missing\)"):
            evaluate(EvaluateConfig(run=str(tmp_path / "run"), data=str(folder)))
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(DataError, match="not a prepared data set, or damaged"):
        evaluate(EvaluateConfig(run=str(tmp_path / "run"), data=str(tmp_path)))


def test_numbers_go_into_the_summary_of_the_runs_wandb_entry(tmp_path, monkeypatch):
    run, data = tmp_path / "run", byte_set(tmp_path)
    model, _ = save_run(run)
    checkpoint.save(run, 7, checkpoint.model_tensors(model), checkpoint.read_meta(run, 7) | {"wandb_id": "abc"})
    started = []

    class Entry:
        summary: dict = {}
        dir = str(tmp_path)

        def define_metric(self, *args, **options):
            pass

        def finish(self):
            started.append("finished")

    def init(**options):
        started.append(tuple(options[key] for key in ("id", "resume", "name", "tags")))
        return Entry()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_MODE", "offline")
    ((name, values),) = evaluate(EvaluateConfig(run=str(run), data=str(data), tokens=50))["validation"].items()
    assert started == [("abc", "allow", "run", None), "finished"]  # no tags: it keeps its own
    assert Entry.summary == {f"eval/{name}/{key}": value for key, value in values.items()}


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


def test_half_of_the_window_stays_for_the_prompt(tasks, caplog, monkeypatch):
    """Of 17 tokens: a long context keeps 9 and its answer has 8, a short one has all that it asks for."""
    lm, seen = tasks.TwellLM(byte_model(), ByteTokenizer(), batch=2), []
    stream = lm._engine.stream
    monkeypatch.setattr(lm._engine, "stream", lambda *args: seen.append(args[:2]) or stream(*args))
    long, short = "a context that is cut on its left", "ab"
    with caplog.at_level(logging.WARNING, "twell"):
        together = lm.generate_until([Request((text, {"max_gen_toks": 15})) for text in (long, short)])
        alone = [lm.generate_until([Request((text, {"max_gen_toks": 15}))])[0] for text in (long, short)]
        lm.generate_until([Request((long, {}))])
    assert [[len(prompt) for prompt in prompts] for prompts, _ in seen] == [[9, 2], [9], [2], [9]]
    assert [n_new for _, n_new in seen] == [15, 8, 15, 8]
    assert together == alone
    assert [record.getMessage() for record in caplog.records] == [
        "tasks: max_gen_toks=15: long contexts leave less of seq_len=17 for the answer, down to 8 tokens"
    ]


def test_sampling_among_0_tokens_is_sampling_among_all(tasks):
    lm = tasks.TwellLM(byte_model(), ByteTokenizer(), batch=2)
    options = {"do_sample": True, "max_gen_toks": 5}
    assert lm.generate_until([Request(("ab", options | {"top_k": 0}))]) == lm.generate_until([Request(("ab", options))])


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


def test_fewer_questions_and_more_examples(tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    save_run(tmp_path / "run")
    file = write_task(
        tmp_path, "local_choice", "multiple_choice", [{"q": f"what {i}", "gold": i % 2} for i in range(6)],
        'doc_to_text: "{{q}}:"\ndoc_to_choice: ["yes", "no"]\ndoc_to_target: gold\nfewshot_split: test\n'
        "metric_list:\n  - metric: acc",
    )  # fmt: skip
    contexts = []
    score = tasks.TwellLM.loglikelihood
    monkeypatch.setattr(
        tasks.TwellLM,
        "loglikelihood",
        lambda lm, requests, **options: (
            contexts.append([request.args[0] for request in requests]) or score(lm, requests, **options)
        ),
    )
    cfg = EvaluateConfig(run=str(tmp_path / "run"), tasks=[file], tokens=0)
    names = list(evaluate(cfg)["tasks"])
    cfg.limit, cfg.n_fewshot = 2, 1
    names += evaluate(cfg)["tasks"]
    everything, some = contexts
    assert len(everything) == 6 * 2 and {context.count("what") for context in everything} == {1}
    assert len(some) == 2 * 2 and {context.count("what") for context in some} == {2}
    assert names == ["local_choice", "local_choice:n_fewshot=1:limit=2"]
    assert list(json.loads((tmp_path / "run/eval/step-00000007.json").read_text())["tasks"]) == names


def test_a_missing_task_is_named_before_anything_else(tasks, tmp_path):
    (tmp_path / "other.yaml").write_text("output_type: generate_until\n")
    for task, message in (
        (str(tmp_path / "mine.yaml"), r"tasks: no file .*mine\.yaml"),
        (str(tmp_path / "other.yaml"), "has no line `task: NAME`"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(EvaluateConfig(run="no/such/run", tasks=[task]))


@pytest.mark.slow
def test_an_unknown_task_is_named_before_anything_else(tasks):
    with pytest.raises(ConfigError, match="tasks: lm-eval has no hella_swag"):
        evaluate(EvaluateConfig(run="no/such/run", tasks=["hella_swag"]))


def test_a_task_that_fails_is_named_and_costs_no_other_result(tasks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    save_run(tmp_path / "run")
    data = byte_set(tmp_path)
    documents, rest = [{"text": "some words"}], 'doc_to_text: ""\ndoc_to_target: "{{text}}"'
    good = write_task(tmp_path, "good", "loglikelihood_rolling", documents, rest)
    bad = write_task(tmp_path, "bad", "loglikelihood_rolling", documents, rest)
    (tmp_path / "bad.jsonl").unlink()
    with pytest.raises(UserError, match=r"^tasks: bad failed \(FileNotFoundError: ") as caught:
        main([f"run={tmp_path}/run", f"data={data}", "tokens=50", f"tasks=[{good},{bad}]"])
    assert "\n" not in str(caught.value)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{data.name}:tokens=50: val/loss") and "\ngood: " in printed
    results = json.loads((tmp_path / "run/eval/step-00000007.json").read_text())
    assert list(results["validation"]) == [f"{data.name}:tokens=50"] and list(results["tasks"]) == ["good"]
