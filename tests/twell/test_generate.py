"""Sampling: what may be drawn, how a sample ends, and the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer
from tests.twell.small import N_VOCAB, build, ffn_config, model_config
from twell import checkpoint
from twell.config import Config, ConfigError
from twell.errors import UserError
from twell.generate import generate, load_run, main, next_token, parse, sample_text
from twell.model import Transformer

EOT = 58


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def greedy(model: Transformer, ids: list[int], max_new_tokens: int, eot: int = -1) -> list[int]:
    settings = {"n": 1, "temperature": 0.0, "top_k": None, "top_p": None, "eot": eot, "generator": rng()}
    return generate(model, ids, max_new_tokens, **settings)[0]


def drawn(logits: Tensor, **changes) -> set[int]:
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, "generator": rng(), **changes}
    return set(next_token(logits.expand(2000, -1), **settings).tolist())


LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3, 0.0]]).log()


def test_next_token_draws_only_what_is_allowed():
    assert drawn(LOGITS) == {0, 1, 2, 3}  # -inf is never drawn
    assert drawn(LOGITS, temperature=0) == {1}
    assert drawn(LOGITS, top_k=2) == {1, 3}
    assert drawn(LOGITS, top_k=99) == {0, 1, 2, 3}
    assert drawn(LOGITS, top_p=0.65) == {1, 3}
    assert drawn(LOGITS, top_p=0.75) == {1, 3, 2}
    assert drawn(LOGITS, top_p=1e-6) == {1}
    assert drawn(LOGITS, top_k=3, top_p=0.5) == {1, 3}  # of 0.9 in all, 0.4 is less than half


def test_next_token_follows_the_probabilities():
    ids = next_token(LOGITS.expand(20000, -1), 1.0, None, None, rng())
    assert (ids == 1).float().mean().item() == pytest.approx(0.4, abs=0.02)
    cold = next_token(LOGITS.expand(20000, -1), 0.5, None, None, rng())
    assert (cold == 1).float().mean().item() == pytest.approx(0.16 / 0.30, abs=0.02)


@pytest.mark.parametrize("temperature", [1e-6, 1e-42, 1e-300])
def test_hardly_any_temperature_is_greedy(temperature: float):
    assert drawn(LOGITS, temperature=temperature) == {1}
    assert drawn(LOGITS - 1000, temperature=temperature, top_k=3, top_p=0.9) == {1}
    assert drawn(torch.tensor([[2.0, 5.0, 5.0]]), temperature=temperature) == {1, 2}


def test_the_highest_temperature_draws_every_token_alike():
    assert drawn(LOGITS, temperature=1e6) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_logits_of_a_diverged_model_are_refused(bad: list[float], temperature: float):
    with pytest.raises(UserError, match=r"^the model's logits are not finite: its training has diverged"):
        next_token(torch.tensor([[0.0, 1.0], bad]), temperature, None, None, rng())


def test_greedy_sampling_equals_full_forward_passes():
    model = build()
    ids = [3, 1, 4]
    expected = list(ids)
    for _ in range(12):
        expected.append(model(torch.tensor([expected])).logits[0, -1].argmax().item())
    assert greedy(model, ids, 12) == expected[3:]


def test_a_long_prompt_keeps_its_end():
    model = build()
    ids = torch.randint(N_VOCAB, (40,), generator=rng()).tolist()
    assert greedy(model, ids, 1) == greedy(model, ids[-17:], 1)
    assert greedy(model, ids, 1) == [model(torch.tensor([ids[-17:]])).logits[0, -1].argmax().item()]


def test_a_sample_may_be_longer_than_the_context():
    """A full cache (17 tokens) starts again from the last half of the context."""
    model, fed = build(), []
    model.register_forward_pre_hook(lambda model, args: fed.append(args[0][0].tolist()))
    sample = greedy(model, [5], 30)
    text = [5, *sample]
    assert len(sample) == 30
    assert [len(ids) for ids in fed] == [1] * 17 + [8] + [1] * 9 + [8] + [1] * 2
    assert fed[17] == text[10:18] and fed[27] == text[20:28]


def test_padded_ids_are_never_sampled():
    model = build()
    with torch.no_grad():
        model.embed.weight[N_VOCAB:] *= 1000
    settings = {"temperature": 5.0, "top_k": None, "top_p": None, "eot": -1, "generator": rng()}
    samples = generate(model, [1], 100, n=8, **settings)
    assert len(samples) == 8 and all(0 <= i < N_VOCAB for sample in samples for i in sample)
    assert len({tuple(sample) for sample in samples}) == 8


def test_a_sample_stops_at_end_of_text():
    model = build()
    settings = {"temperature": 3.0, "top_k": None, "top_p": None, "eot": EOT, "generator": rng()}
    samples = generate(model, [1], 60, n=6, **settings)
    lengths = [len(sample) for sample in samples]
    assert min(lengths) < 60 and all(EOT not in sample for sample in samples)
    first = greedy(model, [1], 3)[2]
    assert greedy(model, [1], 60, eot=first) == greedy(model, [1], 60)[: greedy(model, [1], 60).index(first)]


def byte_model() -> Transformer:
    model = Transformer(model_config(), ffn_config("sparse"), vocab_size=384, n_vocab=257)
    model.init_weights(3)
    return model


def test_text_is_reproducible_and_leaves_global_random_state_alone():
    model, before = byte_model(), torch.get_rng_state()
    text = sample_text(model, ByteTokenizer(), "naïve ", 30, seed=1)
    assert text.startswith("naïve ") and text == sample_text(model, ByteTokenizer(), "naïve ", 30, seed=1)
    assert text != sample_text(model, ByteTokenizer(), "naïve ", 30, seed=2)
    assert len(sample_text(model, ByteTokenizer(), "", 30, seed=1)) > 0
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint of an untrained model."""
    folder = tmp_path / "my run"
    cfg = OmegaConf.structured(Config(model=model_config(), ffn=ffn_config("sparse")))
    folder.mkdir()
    OmegaConf.save(cfg, folder / "config.yaml")
    ByteTokenizer().save(folder / "tokenizer")
    meta = {"config": OmegaConf.to_container(cfg), "tokenizer": ByteTokenizer.identity}
    checkpoint.save(folder, 7, checkpoint.model_tensors(byte_model()), meta)
    return folder


def test_command_samples_from_a_run(run: Path, capfd: pytest.CaptureFixture[str]):
    prompt = "def f(x: int = 1): ${y}"
    main([f"run={run}", f"prompt={prompt}", "n=2", "max_new_tokens=5", "seed=3", "top_k=null", "device=cpu"])
    first, err = capfd.readouterr()
    assert first.count(prompt) == 2 and "step 7" in err and "23 tokens, of which the model sees the last 17" in err
    main([f"run={run}", f"prompt={prompt}", "n=2", "max_new_tokens=5", "seed=3", "top_k=null", "device=cpu"])
    assert capfd.readouterr().out == first
    expected = sample_text(byte_model(), ByteTokenizer(), "x", 9, seed=4)
    main([f"run={run}", "prompt=x", "max_new_tokens=9", "seed=4", "device=cpu", "checkpoint=7"])
    assert capfd.readouterr().out == expected + "\n"


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_every_seed_that_is_accepted_works(run: Path, seed: int, capfd: pytest.CaptureFixture[str]):
    main([f"run={run}", "max_new_tokens=1", f"seed={seed}", "device=cpu"])
    assert "step 7" in capfd.readouterr().err


def test_another_tokenizer_than_the_checkpoints_is_refused(run: Path):
    ranks = {bytes([i]): 255 - i for i in range(256)}  # as many ids as there were, in another order
    BPETokenizer("reversed", ".", ranks, {END_OF_TEXT: 256}).save(run / "tokenizer")
    with pytest.raises(UserError, match="is not the tokenizer that its checkpoints were trained with") as caught:
        load_run(run, "latest", torch.device("cpu"))
    assert "\n" not in str(caught.value) and str(run / "tokenizer") in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "run=: name the run's folder"),
        ("run=x topk=3", "topk=3: expected KEY=VALUE with KEY one of run, prompt"),
        ("run=x fast", "fast: expected KEY=VALUE"),
        ("run=x n=0", "n=0: must be at least 1"),
        ("run=x temperature=-1", "temperature=-1.0: must be from 0"),
        ("run=x temperature=inf", "temperature=inf: must be from 0"),
        ("run=x temperature=nan", "temperature=nan: must be from 0"),
        ("run=x seed=99999999999999999999", "seed=99999999999999999999: must be a number of 64 bits"),
        ("run=x top_k=0", "top_k=0: must be at least 1"),
        ("run=x top_p=1.5", "top_p=1.5: must be in"),
        ("run=x max_new_tokens=0", "max_new_tokens=0: must be at least 1"),
        ("run=x checkpoint=newest", "checkpoint=newest: latest, best or a step"),
        ("run=x checkpoint=²", "checkpoint=²: latest, best or a step"),
        ("run=x device=tpu", "device=tpu: must be auto, cpu or cuda"),
    ],
)
def test_wrong_arguments_are_named(arguments: str, message: str):
    with pytest.raises(ConfigError, match="^" + message.replace("(", r"\(")):
        parse(arguments.split())


@pytest.mark.parametrize(
    ("argument", "message"), [("run=no/such", "run=no/such: no run there"), ("n=two", "n: Value 'two'")]
)
def test_mistakes_are_one_line_with_exit_code_2(argument: str, message: str):
    done = subprocess.run([sys.executable, "-m", "twell.generate", argument], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_help_shows_every_key_and_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and "temperature=0.8" in printed and "python -m twell.generate" in printed
