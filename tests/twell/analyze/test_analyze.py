import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from tests.training import tiny_text, train_tiny
from twell.analyze import __main__ as analyze
from twell.analyze.models import load_hf, load_ours
from twell.analyze.stats import MEASURED, LayerStats, has_exact_zeros, predicted_gain, verdict
from twell.config import ConfigError
from twell.errors import UserError
from twell.generate import load_run
from twell.model import IGNORE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file of a few hundred bytes, with a letter of two bytes."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("über alles: " + (tiny_text(path.parent) / "000.txt").read_text() * 3)
    return path


def hf_folder(folder: Path, config) -> Path:
    """A Hugging Face folder with random weights and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def llama(folder: Path, act: str) -> Path:
    from transformers import LlamaConfig

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf_folder(folder, LlamaConfig(vocab_size=256, max_position_embeddings=40, hidden_act=act, **shape))


def gpt2(folder: Path, act: str) -> Path:
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=256, n_positions=40, n_embd=16, n_layer=2, n_head=2, activation_function=act)
    return hf_folder(folder, config)


@pytest.mark.parametrize("chunks", [(7,), (3, 3, 1)])
def test_statistics_equal_brute_force(chunks):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(7, 33, generator=generator) * (torch.rand(7, 33, generator=generator) < 0.3)
    a[:, 5], a[4] = 0, 0
    a[0, 0] = 0.05
    stats = LayerStats(33, eps=0.1)
    for chunk in a.split(chunks):
        stats.update(chunk[None])
    found, a = stats.summary(), a.numpy()
    for name, active in (("active", a != 0), ("above_eps", np.abs(a) >= np.float32(0.1))):
        numbers = active.sum(1)
        law = found[name]
        assert law["mean"] == pytest.approx(numbers.mean()) and law["max"] == numbers.max()
        assert law["density"] == pytest.approx(active.mean())
        for q in (50, 99):
            assert law[f"p{q}"] == np.quantile(numbers, q / 100, method="inverted_cdf")
        assert law["never"] == (~active.any(0)).sum() >= 1
        ranked = np.sort(active.sum(0))[::-1]
        for share, n in ((1, 1), (5, 2), (10, 3)):
            assert law[f"hottest_{share}pct"] == pytest.approx(ranked[:n].sum() / ranked.sum())
    assert found["zeros"] == pytest.approx((a == 0).mean())
    assert (
        found["below_eps"] == pytest.approx((np.abs(a) < np.float32(0.1)).mean())
        and found["zeros"] < found["below_eps"]
    )
    assert found["rms"] == pytest.approx(np.sqrt((a.astype(np.float64) ** 2).mean()))


def test_a_layer_that_never_fires():
    stats = LayerStats(4, eps=0.1)
    stats.update(torch.zeros(3, 4))
    found = stats.summary()
    assert found["zeros"] == 1 and found["active"]["max"] == 0 and found["active"]["never"] == 4
    assert found["active"]["hottest_10pct"] == 0


@pytest.mark.parametrize("kind", ["sparse", "sparse_nongated", "dense_relu", "dense_silu"])
def test_a_run_of_ours(kind, text, tmp_path):
    train_tiny(tmp_path, "name=run", f"ffn={kind}", "steps=1")
    run = tmp_path / "runs" / "run"
    out = tmp_path / "out.json"
    analyze.main([f"run={run}", f"text={text}", f"out={out}", "tokens=80", "batch=2", "device=cpu", "eps=0.001"])
    result = json.loads(out.read_text())
    assert result["model"] == f"{run}, step 1" and result["tokens"] == 80 and result["window"] == 32
    layers = result["layers"]
    assert [layer["d_ff"] for layer in layers] == 2 * [96 if kind == "sparse_nongated" else 64]
    if kind == "dense_silu":
        assert not has_exact_zeros(layers) and result["verdict"].startswith(
            "Not as it is: no activation is exactly zero"
        )
        return
    model, tokenizer, _ = load_run(run, "latest", CPU)
    ids = torch.tensor(tokenizer.encode(text.read_text())[:80])
    rows = torch.nn.functional.pad(ids, (0, 16)).view(3, 32)
    counted = torch.where(torch.arange(96) < 80, 0, IGNORE).view(3, 32)  # any target does
    with torch.no_grad():
        results = []
        for block in model.blocks:
            block.ffn.register_forward_hook(lambda ffn, inputs, result: results.append(result))
        model(rows, counted)
    expected = [result.nnz.flatten()[:80].double().mean().item() for result in results]
    assert [layer["active"]["mean"] for layer in layers] == pytest.approx(expected)
    assert has_exact_zeros(layers) and [layer["active"]["never"] for layer in layers] == [
        int((result.fired == 0).sum()) for result in results
    ]


@pytest.mark.parametrize(("make", "act"), [(llama, "relu"), (llama, "silu"), (gpt2, "relu"), (gpt2, "gelu_new")])
def test_a_hugging_face_folder(make, act, text, tmp_path, capsys):
    folder = make(tmp_path, act)
    out = tmp_path / "out.json"
    capsys.readouterr()
    analyze.main([f"hf={folder}", f"text={text}", f"out={out}", "device=cpu"])
    result = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert result["verdict"] in printed and result["tokens"] == len(text.read_bytes()) and result["window"] == 40
    width = 24 if make is llama else 64
    assert [layer["d_ff"] for layer in result["layers"]] == [width, width]
    zeros = [layer["zeros"] for layer in result["layers"]]
    if act == "relu":
        assert all(0.3 < share < 0.7 for share in zeros) and "Not known" in printed
    else:
        assert zeros == [0, 0] and "active = |a| >= 0.01" in printed


def test_hooks_see_what_the_last_product_reads(tmp_path):
    subject = load_hf(llama(tmp_path, "silu"), CPU)
    seen = {}
    subject.watch(lambda layer, a: seen.__setitem__(layer, a))
    inputs, mlp = [], subject.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    with torch.no_grad():
        subject.model(torch.arange(10)[None])
        expected = torch.nn.functional.silu(mlp.gate_proj(inputs[0])) * mlp.up_proj(inputs[0])
    assert seen.keys() == {0, 1}
    torch.testing.assert_close(seen[1], expected)


def layers_of(*densities: float) -> list[dict]:
    return [{"zeros": 1 - d, "below_eps": 1 - d / 2, "active": {"density": d}} for d in densities]


def test_the_verdict():
    worth = verdict(layers_of(0.01, 0.02), 2048, 0.01)
    assert worth.startswith("Worth it: 1.50% of the neurons") and "A prediction for an H200" in worth
    assert "is 1.74x as fast" in worth and "densely" not in worth  # 2 / (1 / 1.93 + 1 / 1.58)
    part = verdict(layers_of(0.01, 0.04, 0.3), 2048, 0.01)
    assert part.startswith("Worth it") and "1 of 3 layers are better computed densely" in part
    assert verdict(layers_of(0.04, 0.3, 0.3), 2048, 0.01).startswith("Hardly worth it")
    assert verdict(layers_of(0.3, 0.06), 4096, 0.01).startswith("Not as it is: 18.00%")
    assert verdict(layers_of(0.01), 512, 0.01).startswith("Not known: 1.00% of the neurons")
    assert "50.0% are below 0.25" in verdict(layers_of(1.0, 1.0), 4096, 0.25)


@pytest.mark.parametrize(
    ("d_model", "density", "gain"),
    [
        (768, 0.0097, 1.62), (768, 0.0099, 1.0), (1023, 0.005, 1.62), (1024, 0.005, 2.07), (1024, 0.01, 1.74),
        (1024, 0.018, 1.15), (1024, 0.02, 1.0), (2048, 0.0, 3.04), (2048, 0.0213, 1.58), (2048, 0.0444, 1.0),
        (2048, 0.0443, 1.28), (4096, 0.002, 3.81), (4096, 0.0084, 1.93), (8192, 0.0042, 2.42), (767, 0.001, 1.0),
    ],
)  # fmt: skip
def test_gains_are_those_of_the_next_denser_layer_measured(d_model, density, gain):
    assert predicted_gain(d_model, density) == pytest.approx(gain)


def test_gains_are_those_that_the_kernels_page_shows():
    page = (Path(train.__file__).parent / "kernels" / "README.md").read_text()
    shape, rows = "", set()
    for line in page.splitlines():
        cells = [cell.strip(" *x") for cell in line.split("|")[1:-1]]
        if len(cells) == 8 and re.fullmatch(r"\d+, \d+( non-gated)?|", cells[0]) and re.match(r"\d+ / ", cells[1]):
            shape = cells[0] or shape
            if "non-gated" not in shape:
                d_model, h = map(int, shape.split(", "))
                rows.add((d_model, int(cells[1].split(" / ")[0]), h, float(cells[4])))
    assert rows and rows == set(MEASURED[:-1])
    assert re.search(rf"\| {MEASURED[-1][1]} / [\d /]+\| {MEASURED[-1][3]}x", page)


def test_mistakes_are_told(text, tmp_path, monkeypatch):
    train_tiny(tmp_path, "name=run", "steps=1")
    run = f"run={tmp_path}/runs/run"
    for arguments, message in (
        ([f"text={text}"], "run=None: name either"),
        ([run, "hf=x", f"text={text}"], "name either"),
        ([run], "text=: name a text file"),
        ([run, f"text={text}", "tokens=0"], "tokens=0"),
        ([run, f"text={text}", "eps=0"], r"eps=0\.0"),
        ([run, f"text={text}", "eps=inf"], "eps=inf"),
        ([run, f"text={text}", "eps=nan"], "eps=nan"),
        (["hf=", f"text={text}"], "name either"),
        ([run, f"text={text}", "width=0"], "expected KEY=VALUE"),
        ([f"run={tmp_path}/none", f"text={text}"], "no run there"),
        ([f"hf={tmp_path}", f"text={text}"], "config.json is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            analyze.main([*arguments, "device=cpu"])
    (tmp_path / "empty.txt").touch()
    (tmp_path / "config.json").write_text("{}")
    for arguments, message in (
        ([run, f"text={tmp_path}/empty.txt"], "the text has no tokens"),
        ([run, f"text={tmp_path}/none.txt"], "cannot be read"),
        ([run, f"text={text}", f"out={tmp_path}/none/x.json"], "cannot be written"),
        ([f"hf={tmp_path}", f"text={text}"], "transformers cannot load it"),
    ):
        with pytest.raises(UserError, match=message):
            analyze.main([*arguments, "device=cpu"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[export\]'"):
        analyze.main([f"hf={tmp_path}", f"text={text}", "device=cpu"])


def test_out_is_checked_before_the_work(tmp_path, monkeypatch, text):
    monkeypatch.setattr(analyze, "load_ours", lambda *_: pytest.fail("too late"))
    for out in ("", tmp_path, tmp_path / "none" / "x.json", text / "x.json"):
        with pytest.raises(UserError, match=f"out={out}: cannot be written"):
            analyze.main([f"run={tmp_path}", f"text={text}", f"out={out}", "device=cpu"])


@pytest.mark.parametrize("make", [llama, gpt2])
def test_weights_that_are_not_the_models_are_named(make, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = make(tmp_path, "relu") / "model.safetensors"
    whole = safetensors.load_file(path)
    key = next(key for key in whole if key.endswith(("1.mlp.down_proj.weight", "1.mlp.c_proj.weight")))
    for change, message in (
        ({key: None}, rf"missing: \S*{key.split('.', 1)[1]}$"),
        ({key: whole[key][:3].clone()}, rf"of another shape: \S*{key.split('.', 1)[1]}$"),
        ({f"{key}_scale": torch.ones(1), "z": torch.ones(1)}, rf"unknown: {key}_scale and 1 more$"),
    ):
        weights = {name: value for name, value in (whole | change).items() if value is not None}
        safetensors.save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            load_hf(tmp_path, CPU)


def test_a_tokenizer_that_is_not_the_models(tmp_path, text):
    from transformers import LlamaConfig

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = hf_folder(tmp_path, LlamaConfig(vocab_size=50, max_position_embeddings=40, **shape))
    with pytest.raises(UserError, match=r"the tokenizer makes id \d+, but the model has 50: not its own"):
        analyze.main([f"hf={folder}", f"text={text}", "device=cpu"])


@pytest.mark.parametrize(("make", "message"), [(llama, "cannot load it"), (gpt2, "has no tokenizer")])
def test_a_folder_without_a_tokenizer(make, message, tmp_path):
    for path in make(tmp_path, "relu").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match=message):
        load_hf(tmp_path, CPU)


def test_the_kernels_are_left_out(tmp_path):
    train_tiny(tmp_path, "name=run", "steps=1", "ffn=sparse")
    subject = load_ours(tmp_path / "runs" / "run", "latest", CPU)
    assert {block.ffn.impl for block in subject.model.blocks} == {"torch"}


@pytest.mark.slow
def test_the_command_from_the_root(text, tmp_path):
    """There, transformers meets a package called `kernels` that is not the one it knows."""
    command = [sys.executable, "-m", "twell.analyze", f"hf={llama(tmp_path, 'relu')}", f"text={text}", "device=cpu"]
    done = subprocess.run(command, cwd=Path(train.__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0 and "Not known" in done.stdout, done.stderr
