"""A run as a Hugging Face folder: stock transformers gives our logits, and importing it our weights, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from data.loader import validation_batches
from data.prepared import open_prepared
from data.tokenizer import END_OF_TEXT, BPETokenizer
from tests.twell.exchange import byte_set, save_run, some_ids
from twell import checkpoint
from twell.config import CONFIG_DIR, ConfigError, FFNConfig, ModelConfig
from twell.export import ExportConfig, _one_by_one, export, main
from twell.generate import load_run
from twell.hf.config import InterchangeError, layout_of, to_hf_config
from twell.hf.prune import neurons_to_keep
from twell.hf.weights import expected_shapes
from twell.import_hf import ImportConfig, import_hf

transformers = pytest.importorskip("transformers", reason="needs the extra `export`")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs the extra `export`")
ROOT = Path(__file__).parents[2]

SHAPES = [
    ("sparse", {}, "LlamaForCausalLM"),
    ("dense_relu", {"n_kv_heads": 6}, "LlamaForCausalLM"),
    ("dense_silu", {"tied": False, "rope_theta": 500000.0}, "LlamaForCausalLM"),
    ("dense_silu", {"qkv_bias": True}, "Qwen2ForCausalLM"),
    ("sparse", {"qk_norm": True, "tied": False}, "Qwen3ForCausalLM"),
    ("sparse", {"qk_norm": True, "qkv_bias": True}, "Qwen3ForCausalLM"),
    ("sparse_nongated", {"norm_eps": 1e-6}, "ArceeForCausalLM"),
    ("sparse_nongated", {"qkv_bias": True, "tied": False}, "ArceeForCausalLM"),
]


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32):
    """Stock transformers, told nothing but the folder; every tensor must have been there."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize(("kind", "changes", "architecture"), SHAPES)
@torch.no_grad()
def test_stock_transformers_gives_our_logits_and_importing_our_weights(tmp_path, kind, changes, architecture):
    model, tokenizer = save_run(tmp_path / "runs/small", kind, **changes)
    export(ExportConfig(run=str(tmp_path / "runs/small"), out=str(tmp_path / "hf")))
    theirs = load_theirs(tmp_path / "hf")
    assert type(theirs).__name__ == architecture
    ids = some_ids(tokenizer.n_vocab)
    ours = model(ids).logits
    assert ours.shape[-1] == 384 and theirs.config.vocab_size == tokenizer.n_vocab == 257
    torch.testing.assert_close(theirs(ids).logits, ours[..., :257], rtol=1e-4, atol=1e-5)

    import_hf(ImportConfig(path=str(tmp_path / "hf"), name="back", out=str(tmp_path / "runs")), log=lambda text: None)
    back, back_tokenizer, meta = load_run(tmp_path / "runs/back", "latest", torch.device("cpu"))
    assert back_tokenizer.identity == tokenizer.identity and meta["step"] == 0
    for name, tensor in model.state_dict().items():
        rows = 257 if name in ("embed.weight", "head.weight") else len(tensor)
        assert torch.equal(back.state_dict()[name][:rows], tensor[:rows]), name
    assert torch.equal(back(ids).logits, ours)


@torch.no_grad()
def test_bf16_agrees_to_rounding(tmp_path):
    model, tokenizer = save_run(tmp_path / "run")
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf"), dtype="bf16"))
    assert load_theirs(tmp_path / "hf", "auto").dtype == torch.bfloat16
    ids = some_ids(tokenizer.n_vocab)
    exact = model(ids).logits[..., :257]
    model.compute_dtype = torch.bfloat16
    ours = model.to(torch.bfloat16)(ids).logits[..., :257].float()
    theirs = load_theirs(tmp_path / "hf", torch.bfloat16)(ids).logits.float()
    rounding = (ours - exact).norm()
    assert rounding > 0 and (theirs - exact).norm() < 2 * rounding


def test_weights_are_split_into_shards(tmp_path):
    model, _ = save_run(tmp_path / "run")
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf"), max_shard_gb=2e-5))
    assert len(list((tmp_path / "hf").glob("model-0*-of-0*.safetensors"))) > 2
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    load_theirs(tmp_path / "hf")
    run = import_hf(ImportConfig(path=str(tmp_path / "hf"), name="back", out=str(tmp_path)), log=lambda text: None)
    back = load_run(run, "latest", torch.device("cpu"))[0]
    assert torch.equal(back.blocks[2].ffn.w_down, model.blocks[2].ffn.w_down)


@pytest.mark.parametrize("preset", sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml")))
@pytest.mark.parametrize("kind", ["dense_silu", "sparse", "sparse_nongated"])
def test_every_preset_is_what_the_stock_architecture_holds(preset: str, kind: str):
    """At full size, without memory: the tensors that transformers would make have the names and shapes we write."""
    model = OmegaConf.load(CONFIG_DIR / "model" / f"{preset}.yaml").model
    model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), model))
    ffn = FFNConfig(kind=kind, d_ff=model.d_ff_nongated if kind == "sparse_nongated" else model.d_ff)
    layout = layout_of(model, ffn, ffn.d_ff, 50257)
    config = to_hf_config(model, ffn, layout, dtype="float32", eot=50256)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    if model.tied:
        del shapes["lm_head.weight"]
    assert shapes == expected_shapes(layout)


def test_what_no_stock_architecture_has_is_refused(tmp_path):
    save_run(tmp_path / "run", "sparse_nongated", qk_norm=True)
    with pytest.raises(
        InterchangeError, match=r"qk_norm=true with ffn\.kind=sparse_nongated: transformers has no arch"
    ):
        export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf")))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_tokenizer_that_cannot_be_expressed_is_refused_unless_skipped(tmp_path):
    ranks = {bytes([i]): i for i in range(256)}
    # A possessive repetition that does not end its alternative: the library would let it give something back.
    possessive = BPETokenizer("odd", r"a{1,6}+a|[\s\S]", ranks | {b"aa": 256}, {END_OF_TEXT: 257})
    save_run(tmp_path / "run", tokenizer=possessive)
    cfg = ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf"))
    with pytest.raises(InterchangeError, match="tokenizer=skip exports without one"):
        export(cfg)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    cfg.tokenizer = "skip"
    export(cfg)
    assert not (tmp_path / "hf/tokenizer.json").exists()
    load_theirs(tmp_path / "hf")


def test_the_card_has_the_numbers_of_the_run(tmp_path):
    save_run(tmp_path / "run")
    records = [
        {"step": 5, "sparsity/l0_mean": 3.21, "sparsity/density": 0.0803},
        {"step": 7, "val/loss": 1.2345, "val/perplexity": 3.4367, "val/bits_per_byte": 1.781},
        {"step": 9, "val/loss": 9.9},  # after the checkpoint
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf")))
    card = (tmp_path / "hf/README.md").read_text()
    for row in ("| validation loss, nats per token | 1.2345 |", "| share of neurons that are active | 8.03% |"):
        assert row in card
    assert "9.9" not in card and "step 7" in card and card.startswith("---\nlibrary_name: transformers\n")


def test_an_existing_folder_is_never_touched(tmp_path):
    save_run(tmp_path / "run")
    (tmp_path / "hf").mkdir()
    with pytest.raises(InterchangeError, match=r"^out=.*hf: is there already"):
        export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf")))


def test_folders_beside_the_exported_one_are_left_alone(tmp_path):
    save_run(tmp_path / "run")
    mine = tmp_path / "hf.partial/mine.txt"
    mine.parent.mkdir()
    mine.write_text("dear to me")
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf")))
    assert mine.read_text() == "dear to me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "hf.partial", "run"]
    assert {(tmp_path / name).stat().st_mode for name in ("hf", "hf.partial")} == {mine.parent.stat().st_mode}


def test_the_checkpoint_asked_for_is_exported(tmp_path):
    run = tmp_path / "run"
    model, _ = save_run(run)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    meta = checkpoint.read_meta(run, 7)
    meta["progress"]["step"] = meta["step"] = 9
    checkpoint.save(run, 9, checkpoint.model_tensors(model), meta)
    for which, factor in (("7", 0.5), ("latest", 1.0)):
        export(ExportConfig(run=str(run), out=str(tmp_path / which), checkpoint=which))
        embedding = safetensors_torch.load_file(tmp_path / which / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(embedding, factor * model.embed.weight[:257])


def test_end_of_text_ends_and_pads_what_transformers_generates(tmp_path):
    _, tokenizer = save_run(tmp_path / "run")
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf")))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((tmp_path / "hf" / name).read_text())
        assert [config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [tokenizer.eot] * 3


@pytest.mark.parametrize("tokens", [1, 100, 102, 103, 10**11])
def test_calibration_text_is_read_batch_by_batch(tmp_path, tokens: int, monkeypatch):
    text = open_prepared(byte_set(tmp_path))
    shape = {"seq_len": 17, "micro": 3, "mask_documents": True}
    expected = validation_batches(text, tokens=tokens, **shape)
    made = []
    monkeypatch.setattr("twell.export.validation_batches", lambda *args, **options: [made.append(1)] and (
        validation_batches(*args, **options)
    ))  # fmt: skip
    got = []
    for batch in _one_by_one(text, tokens, **shape):
        got.append(batch)
        assert len(made) == len(got)
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.targets, other.targets)
        assert torch.equal(one.doc_ids, other.doc_ids)


def test_neurons_to_keep_fills_up_to_one_width():
    fired = torch.zeros(2, 200, dtype=torch.int64)
    fired[0, 150:160] = 5  # ten alive
    fired[1, torch.arange(0, 200, 2)] = 1  # a hundred
    keep = neurons_to_keep(fired)
    assert keep.shape == (2, 128)
    assert set(range(150, 160)) <= set(keep[0].tolist()) and set(range(0, 200, 2)) <= set(keep[1].tolist())
    assert (keep.diff(dim=1) > 0).all()
    assert neurons_to_keep(torch.ones(1, 40)).tolist() == [list(range(40))]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sparse", "sparse_nongated"])
def test_pruning_is_lossless_on_the_calibration_text(tmp_path, kind):
    run = tmp_path / "run"
    model, _ = save_run(run, kind, d_ff=160, d_ff_nongated=160)
    for block in model.blocks:
        gate = block.ffn.w_up if kind == "sparse_nongated" else block.ffn.w_gate
        gate[::2] = 0.0  # never above 0
    checkpoint.save(run, 7, checkpoint.model_tensors(model), checkpoint.read_meta(run, 7))
    report = export(ExportConfig(run=str(run), out=str(tmp_path / "hf"), prune=200, data=str(byte_set(tmp_path))))
    assert report["pruned"].startswith("FFN width 160 -> 128; silent on 200 tokens, by layer: ")
    theirs = load_theirs(tmp_path / "hf")
    assert theirs.config.intermediate_size == 128
    ids = some_ids(257)
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits[..., :257], rtol=1e-4, atol=1e-5)


def test_pruning_needs_text_and_relu(tmp_path):
    save_run(tmp_path / "sparse")
    save_run(tmp_path / "silu", "dense_silu")
    for run, message in (("sparse", "has no data of its own; give data=FOLDER"), ("silu", "ffn.kind=dense_silu")):
        with pytest.raises(InterchangeError, match=message):
            export(ExportConfig(run=str(tmp_path / run), out=str(tmp_path / "hf"), prune=100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=x"], "^out=: name the folder"),
        (["out=x"], "^run=: name the run's folder"),
        (["run=x", "out=y", "dtype=fp16"], "^dtype=fp16: must be fp32 or bf16"),
        (["run=x", "out=y", "tokenizer=no"], "^tokenizer=no: must be convert or skip"),
        (["run=x", "out=y", "max_shard_gb=inf"], r"^max_shard_gb=inf: must be above 0, and 1e6 at most"),
        (["run=x", "out=y", "max_shard_gb=nan"], r"^max_shard_gb=nan: must be above 0"),
        (["run=x", "out=y", "format=gguf"], "^format=gguf: expected KEY=VALUE with KEY one of run, out"),
        (["run=x", "out=y"], "^run=x: no run there"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        main(arguments)


def test_the_command_runs_from_the_root(tmp_path):
    save_run(tmp_path / "run")
    arguments = [f"run={tmp_path}/run", f"out={tmp_path}/hf"]
    done = subprocess.run([sys.executable, "-m", "twell.export", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "architecture: LlamaForCausalLM" in done.stdout and (tmp_path / "hf/config.json").exists()


LOAD = """
import sys, kernels, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(kernels.__file__, type(model).__name__, tuple(model(torch.tensor([[1, 2]])).logits.shape))
"""


@pytest.mark.slow
def test_transformers_runs_from_the_root(tmp_path):
    """A folder called `kernels` is there, and transformers looks for a package of this name."""
    save_run(tmp_path / "run")
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf")))
    done = subprocess.run([sys.executable, "-c", LOAD, f"{tmp_path}/hf"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ROOT / 'kernels/__init__.py'} LlamaForCausalLM (1, 2, 257)\n"
