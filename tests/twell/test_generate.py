"""Texts from a model: pieces, batches, and the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer
from tests.twell.small import ffn_config, model_config
from twell import checkpoint
from twell.config import Config, ConfigError
from twell.errors import UserError
from twell.generate import TextModel, load, load_run, main, parse, sample_text
from twell.model import Transformer
from twell.sampling import GREEDY, Sampling


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


def test_texts_of_a_batch_are_those_of_single_runs():
    prompts = ["naïve ", "", "a longer prompt than fits", "x"]
    text = TextModel(byte_model(), ByteTokenizer(), rows=3)
    together = text.complete(prompts, 20, sampling=Sampling(2.0, None, None), seed=5)
    for i, prompt in enumerate(prompts):
        assert together[i].startswith(prompt)
        assert text.complete([prompt], 20, sampling=Sampling(2.0, None, None), seed=5 + i) == [together[i]]


class Script:
    """An engine that says what it is told: ids by request, interleaved."""

    def __init__(self, *answers: list[int]):
        self.answers = answers

    def stream(self, prompts, max_new_tokens, sampling, seeds, stop):
        assert stop == {256, 10}
        for step in range(max_new_tokens):
            for i, answer in enumerate(self.answers):
                if step <= len(answer):
                    yield i, answer[step] if step < len(answer) else None


def test_pieces_are_whole_characters_as_soon_as_they_are_complete():
    text = TextModel(byte_model(), ByteTokenizer(), rows=2)
    text.engine = Script(list("aé€".encode()), list(b"b\xe2\x82"))  # the second stops in the middle of one
    pieces = list(text.stream(["p", ""], 9, stop=[10]))
    assert [piece for i, piece in pieces if i == 0] == ["p", "a", "é", "€", None]
    assert [piece for i, piece in pieces if i == 1] == ["", "b", "\ufffd", None]


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
    assert first.count(prompt) == 2 and "step 7" in err
    assert "23 tokens: the first new token follows from the last 17 of all, each later one from the last 8 to 17" in err
    main([f"run={run}", f"prompt={prompt}", "n=2", "max_new_tokens=5", "seed=3", "top_k=null", "device=cpu"])
    assert capfd.readouterr().out == first
    expected = sample_text(byte_model(), ByteTokenizer(), "x", 9, seed=4)
    main([f"run={run}", "prompt=x", "max_new_tokens=9", "seed=4", "device=cpu", "checkpoint=7"])
    assert capfd.readouterr().out == expected + "\n"


def test_python_api(run: Path):
    text = load(run, rows=2, device="cpu")
    completions = text.complete(["x", "def "], max_new_tokens=9, sampling=GREEDY)
    pieces = [piece for _, piece in text.stream(["def "], max_new_tokens=9, sampling=GREEDY)]
    assert completions[1] == "".join(piece for piece in pieces if piece)
    assert [{ffn.impl for ffn in load(run, impl=impl).engine.decoder.ffns} for impl in ("triton", "torch")] == [
        {"triton"},
        {"torch"},
    ]


def test_python_api_names_what_is_wrong(run: Path):
    with pytest.raises(ValueError, match=r"^impl='foo': must be one of auto, triton, torch"):
        load(run, impl="foo")
    text = load(run)
    with pytest.raises(ValueError, match=r"^prompts='abc': must be a list of texts"):
        text.complete("abc")
    with pytest.raises(ValueError, match=r"^stop=.*: must hold ids of tokens"):
        text.complete(["abc"], stop=["\n"])


def test_command_reads_prompts_from_a_file_and_writes_texts_in_order(run: Path, tmp_path: Path, capfd):
    file = tmp_path / "prompts ${x}.txt"
    file.write_text("def f\nnaïve\n")
    arguments = [f"run={run}", f"prompts={file}", "max_new_tokens=6", "temperature=0", "n=2", "rows=3", "device=cpu"]
    main(arguments)
    texts = capfd.readouterr().out.removesuffix("\n").split(f"\n{'-' * 80}\n")
    assert texts == [
        t for p in ("def f", "naïve") for t in load(run, device="cpu").complete([p], 6, sampling=GREEDY) * 2
    ]
    for content, message in ((None, r"cannot be read \("), ("", "is empty; one prompt a line")):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(ConfigError, match=r"^prompts=.*\.txt: " + message):
            main(arguments)


def test_command_hands_on_the_implementation(run: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    made = TextModel.__init__
    monkeypatch.setattr(
        TextModel, "__init__", lambda *args, **options: asked.append(options["impl"]) or made(*args, **options)
    )
    for impl in ("torch", "triton"):
        main([f"run={run}", "prompt=x", "max_new_tokens=1", "device=cpu", f"impl={impl}"])
    assert asked == ["torch", "triton"]


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
        ("run=x prompt=a prompts=b", "prompt=a: and prompts=b: give one of the two"),
        ("run=x n=0", "n=0: must be from 1 to 100000"),
        ("run=x n=100000000000", "n=100000000000: must be from 1 to 100000"),
        ("run=x temperature=-1", "temperature=-1.0: must be from 0"),
        ("run=x temperature=inf", "temperature=inf: must be from 0"),
        ("run=x temperature=nan", "temperature=nan: must be from 0"),
        ("run=x seed=99999999999999999999", "seed=99999999999999999999: must be a number of 64 bits"),
        ("run=x top_k=0", "top_k=0: must be a whole number from 1"),
        ("run=x top_p=1.5", "top_p=1.5: must be in"),
        ("run=x max_new_tokens=0", "max_new_tokens=0: must be at least 1"),
        ("run=x checkpoint=newest", "checkpoint=newest: latest, best or a step"),
        ("run=x checkpoint=²", "checkpoint=²: latest, best or a step"),
        ("run=x rows=0", "rows=0: must be at least 1"),
        ("run=x impl=dense", "impl=dense: must be auto, triton or torch"),
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
