"""Models of Hugging Face as runs: stock transformers writes the folders, and our logits must be its logits."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer
from tests.training import train_tiny
from tests.twell.exchange import some_ids
from twell import checkpoint
from twell.config import CONFIG_DIR, ConfigError, register
from twell.errors import UserError
from twell.export import ExportConfig, export
from twell.generate import load_run
from twell.hf.config import InterchangeError
from twell.hf.tokenizer import save_hf_tokenizer
from twell.import_hf import ImportConfig, import_hf, main

transformers = pytest.importorskip("transformers", reason="needs the extra `export`")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs the extra `export`")

SIZES = {
    "vocab_size": 260,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 17,
}


def make_theirs(folder: Path, kind: str = "llama", max_shard_size: str = "5GB", **config):
    """A random model of stock transformers and a byte tokenizer, saved in `folder`."""
    cfg = transformers.AutoConfig.for_model(kind, **SIZES | config)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(cfg)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not (name.endswith("o_proj.bias")):
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_hf_tokenizer(ByteTokenizer(), folder, 17)
    return model.eval()


def imported(folder: Path, **options) -> Path:
    """Import `folder`/hf as run `folder`/runs/small, silently."""
    cfg = ImportConfig(path=str(folder / "hf"), name="small", out=str(folder / "runs"), **options)
    return import_hf(cfg, log=lambda text: None)


def edit_config(folder: Path, **changes) -> None:
    """Change config.json; None removes a key."""
    path = folder / "hf/config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


MODELS = [
    ("llama", {}, "dense_silu"),
    ("llama", {"hidden_act": "relu", "num_key_value_heads": 6, "tie_word_embeddings": True}, "sparse"),
    ("llama", {"rope_theta": 1234.5, "rms_norm_eps": 1e-3}, "dense_silu"),
    ("llama", {"attention_bias": True}, "dense_silu"),
    ("qwen2", {"tie_word_embeddings": True}, "dense_silu"),
    ("qwen3", {"head_dim": 4}, "dense_silu"),
    ("qwen3", {"head_dim": 4, "attention_bias": True, "hidden_act": "relu"}, "sparse"),
    ("arcee", {"hidden_act": "relu"}, "sparse_nongated"),
]


@pytest.mark.parametrize(("kind", "config", "ffn"), MODELS)
@torch.no_grad()
def test_our_logits_are_theirs(kind: str, config: dict, ffn: str, tmp_path):
    theirs = make_theirs(tmp_path / "hf", kind, **config)
    model, tokenizer, meta = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    assert meta["config"]["ffn"]["kind"] == ffn and meta["step"] == 0
    assert tokenizer.identity == ByteTokenizer.identity
    ids = some_ids(257)
    torch.testing.assert_close(model(ids).logits[..., :257], theirs(ids).logits[..., :257], rtol=1e-4, atol=1e-5)
    assert model.embed.weight.shape == (384, 24)  # padded for speed; the padding is never predicted
    assert model(ids).logits[..., 257:].isneginf().all() and not model.embed.weight[260:].any()


@torch.no_grad()
def test_shards_and_the_spelling_of_transformers_4(tmp_path):
    theirs = make_theirs(tmp_path / "hf", max_shard_size="20KB", rope_theta=777.0)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    edit_config(tmp_path, rope_parameters=None, rope_theta=777.0, rope_scaling=None, head_dim=None, dtype=None)
    model, _, _ = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    assert model.rope_theta == 777.0
    ids = some_ids(257)
    torch.testing.assert_close(model(ids).logits[..., :257], theirs(ids).logits[..., :257], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.no_grad()
def test_the_published_sparse_layout(kind: str, transposed: bool, tmp_path):
    """ReLU although hidden_act says silu; the width under another key; the down projection either way round."""
    theirs = make_theirs(tmp_path / "hf", kind, hidden_act="relu", tie_word_embeddings=True)
    edit_config(
        tmp_path, model_type=f"{kind}_sparse_relu", hidden_act="silu", sparsity_new_intermediate_size=40,
        intermediate_size=99, sparsity_gated_mlp=True, sparsity_use_hybrid_kernel=True,
    )  # fmt: skip
    if transposed:
        path = tmp_path / "hf/model.safetensors"
        tensors = safetensors_torch.load_file(path)
        turned = {name: t.T.contiguous() if "down_proj" in name else t for name, t in tensors.items()}
        safetensors_torch.save_file(turned, path)
    model, _, meta = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    assert meta["config"]["ffn"]["kind"] == "sparse"
    ids = some_ids(257)
    torch.testing.assert_close(model(ids).logits[..., :257], theirs(ids).logits[..., :257], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_published_sparse_layout_without_a_gate(tmp_path):
    theirs = make_theirs(tmp_path / "hf", "arcee", hidden_act="relu")
    edit_config(tmp_path, model_type="llama_sparse_relu", hidden_act="silu", sparsity_gated_mlp=False)
    model, _, _ = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    ids = some_ids(257)
    torch.testing.assert_close(model(ids).logits[..., :257], theirs(ids).logits[..., :257], rtol=1e-4, atol=1e-5)


def test_a_square_down_projection_lies_as_the_config_says(tmp_path):
    make_theirs(tmp_path / "hf", hidden_act="relu", intermediate_size=24)
    stored = safetensors_torch.load_file(tmp_path / "hf/model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    for name, hybrid in (("turned", True), ("plain", False)):
        edit_config(tmp_path, model_type="llama_sparse_relu", sparsity_use_hybrid_kernel=hybrid)
        run = import_hf(ImportConfig(str(tmp_path / "hf"), name, str(tmp_path)), log=lambda text: None)
        model, _, _ = load_run(run, "latest", torch.device("cpu"))
        assert torch.equal(model.blocks[0].ffn.w_down, stored if hybrid else stored.T)


def test_bf16_weights_become_fp32_masters(tmp_path):
    theirs = make_theirs(tmp_path / "hf")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    model, _, _ = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    assert model.blocks[1].attn.o.weight.dtype == torch.float32
    assert torch.equal(model.blocks[1].attn.o.weight, theirs.model.layers[1].self_attn.o_proj.weight.float())


def test_an_imported_model_is_exported_as_it_came(tmp_path):
    make_theirs(tmp_path / "hf", "qwen2", vocab_size=257)
    export(ExportConfig(run=str(imported(tmp_path)), out=str(tmp_path / "again")))
    first, second = (safetensors_torch.load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert "training tokens" not in (tmp_path / "again/README.md").read_text()


def test_a_tied_head_may_be_stored_twice(tmp_path):
    make_theirs(tmp_path / "hf", tie_word_embeddings=True)
    path = tmp_path / "hf/model.safetensors"
    tensors = safetensors_torch.load_file(path)
    safetensors_torch.save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert load_run(imported(tmp_path), "latest", torch.device("cpu"))[0].head is None


def test_options(tmp_path):
    make_theirs(tmp_path / "hf", hidden_act="relu")
    run = imported(tmp_path, seq_len=9, ffn="dense_relu", tokenizer="bytes")
    model, _, meta = load_run(run, "latest", torch.device("cpu"))
    assert model.seq_len == 9 and meta["config"]["ffn"]["kind"] == "dense_relu"
    with pytest.raises(InterchangeError, match="is there already; choose another name"):
        imported(tmp_path)
    with pytest.raises(ConfigError, match=r"^ffn=dense_silu: this model's FFN is sparse or dense_relu"):
        import_hf(ImportConfig(str(tmp_path / "hf"), "other", str(tmp_path), ffn="dense_silu"))


def test_a_folder_may_hold_the_tokenizer(tmp_path):
    make_theirs(tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").unlink()
    with pytest.raises(InterchangeError, match=r"tokenizer\.json: is missing .*tokenizer=NAME or FOLDER"):
        imported(tmp_path)
    ByteTokenizer().save(tmp_path / "mine")
    imported(tmp_path, tokenizer=str(tmp_path / "mine"))


def test_the_preset_fits_the_checkpoint(tmp_path):
    """`train.py --config-dir RUN/configs model=NAME` builds the imported model."""
    make_theirs(tmp_path / "hf", "qwen3", head_dim=4)
    run = imported(tmp_path)
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        search = f"hydra.searchpath=[file://{run}/configs]"
        cfg = compose("config", [search, "model=small", "ffn=dense_silu"])
    assert cfg.model.qk_norm and cfg.ffn.d_ff == 40 and cfg.batch.tokens == 16 * 17
    assert cfg.model == checkpoint.read_meta(run, 0)["config"]["model"]


REFUSALS = [
    ({"model_type": "mamba"}, r"model_type=mamba \(LlamaForCausalLM\): only llama, qwen2, .* can be imported"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu: must be silu or relu"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters=.*yarn.*: only rope_type=default"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*linear.*: only rope_type=default"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "alike in all layers"),
    ({"rope_parameters": None, "rope_theta": "big"}, "rope_theta=big: must be a number"),
    (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
        r"rope_theta=10000\.0, but rope_parameters has 500000",
    ),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5: not supported"),
    ({"mlp_bias": True}, "mlp_bias=True: not supported"),
    ({"use_sliding_window": True}, "use_sliding_window=True: not supported"),
    ({"layer_types": ["sliding_attention"]}, "only full_attention"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.*: not supported"),
    ({"head_dim": 8}, "head_dim=8 with hidden_size=24 and num_attention_heads=6"),
    ({"num_key_value_heads": 4}, "num_key_value_heads=4 does not divide num_attention_heads=6"),
    ({"hidden_size": None}, "hidden_size=missing: must be a whole number from 1 to 2,147,483,648"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be a whole number from 1 to 10,000"),
    (
        {"max_position_embeddings": 10**11},
        "max_position_embeddings=100000000000: must be a whole number from 1 to 16,777",
    ),
    ({"rope_scaling": "linear"}, "rope_scaling=linear: must be an object"),
    ({"rope_parameters": [1]}, r"rope_parameters=\[1\]: must be an object"),
    ({"rope_parameters": {"rope_theta": True}}, "rope_theta=True: must be a number above 0"),
    ({"rope_theta": True}, "rope_theta=True: must be a number above 0"),
    ({"rms_norm_eps": "abc"}, "rms_norm_eps=abc: must be a number above 0, up to 1"),
    ({"rms_norm_eps": -1}, "rms_norm_eps=-1: must be a number above 0"),
    ({"layer_types": 5}, "layer_types=5: must be a list"),
    ({"layer_types": [[1]]}, "only full_attention"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings=false: must be true or false"),
    ({"attention_bias": 1}, "attention_bias=1: must be true or false"),
    ({"head_dim": "four"}, "head_dim=four: must be a whole number"),
    ({"model_type": "mamba", "architectures": "MambaForCausalLM"}, "architectures=MambaForCausalLM: must be a list"),
    ({"model_type": "qwen3", "head_dim": None}, "head_dim=128 with hidden_size=24"),
    ({"num_hidden_layers": 3}, r"missing tensors .*: model\.layers\.2\.input_layernorm\.weight, .* and 4 more"),
    ({"num_hidden_layers": 1}, r"unknown tensors .*: model\.layers\.1\..* and 4 more"),
    ({"intermediate_size": 41}, r"wrong shapes .*mlp\.gate_proj\.weight is \[40, 24\], not \[41, 24\]"),
    ({"model_type": "qwen2"}, r"missing tensors .*q_proj\.bias"),
    ({"vocab_size": 250}, r"wrong shapes .*embed_tokens\.weight is \[260, 24\]"),
    ({"tie_word_embeddings": True}, "lm_head.weight: config.json says tie_word_embeddings, but it is not"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_what_we_do_not_have_is_named(changes: dict, message: str, tmp_path):
    make_theirs(tmp_path / "hf")
    edit_config(tmp_path, **changes)
    with pytest.raises(InterchangeError, match=message) as caught:
        imported(tmp_path)
    assert "\n" not in str(caught.value) and not (tmp_path / "runs/small").exists()


@pytest.mark.parametrize("content", ["[]", "null", '{"rms_norm_eps": null}', '{"rms_norm_eps": NaN}'])
def test_a_damaged_config_is_named(content: str, tmp_path):
    make_theirs(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    changed = json.loads(content)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed) if changed else content)
    message = r"config\.json: must hold an object, but holds" if not changed else "rms_norm_eps=.*: must be a number"
    with pytest.raises(InterchangeError, match=message):
        imported(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(content: str, tmp_path):
    make_theirs(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors.index.json").write_text(content)
    with pytest.raises(InterchangeError, match=r"index\.json: has no weight_map that names a file for every tensor"):
        imported(tmp_path)


def stored(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = folder / "hf/model.safetensors"
    return path, safetensors_torch.load_file(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda t: t.fill_(torch.nan), r"^model\.layers\.1\.mlp\.up_proj\.weight: has values that are not finite"),
        (lambda t: t.double() * 1e300, r"^model\.layers\.1\.mlp\.up_proj\.weight: has values that are not finite"),
        (lambda t: t.int(), r"^model\.layers\.1\.mlp\.up_proj\.weight: is torch\.int32; weights must be of a floating"),
    ],
)
def test_what_cannot_be_weights_is_refused(value, message: str, tmp_path):
    make_theirs(tmp_path / "hf")
    path, tensors = stored(tmp_path)
    tensors["model.layers.1.mlp.up_proj.weight"] = value(tensors["model.layers.1.mlp.up_proj.weight"])
    safetensors_torch.save_file(tensors, path)
    with pytest.raises(InterchangeError, match=message):
        imported(tmp_path)
    assert not (tmp_path / "runs/small").exists()


def test_only_the_models_own_files_are_read(tmp_path):
    """Other weights beside them: a copy in another format, and an adapter."""
    make_theirs(tmp_path / "hf")
    path, tensors = stored(tmp_path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name in ("adapter_model", "consolidated"):
        safetensors_torch.save_file(zeros, path.with_name(f"{name}.safetensors"))
    model, _, _ = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])


def test_files_without_an_index_must_not_overlap(tmp_path):
    make_theirs(tmp_path / "hf")
    path, tensors = stored(tmp_path)
    path.unlink()
    names = list(tensors)
    half = len(names) // 2
    for i, part in enumerate((names[:half], names[half:])):
        safetensors_torch.save_file({name: tensors[name] for name in part}, path.with_name(f"part-{i}.safetensors"))
    safetensors_torch.save_file({"lora": torch.zeros(1)}, path.with_name("adapter_model.safetensors"))
    model, _, _ = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    assert torch.equal(model.norm.weight, tensors["model.norm.weight"])
    safetensors_torch.save_file({names[0]: tensors[names[0]]}, path.with_name("part-2.safetensors"))
    with pytest.raises(InterchangeError, match=rf"part-2\.safetensors: {names[0]} is in another file, too"):
        import_hf(ImportConfig(str(tmp_path / "hf"), "other", str(tmp_path)), log=lambda text: None)


def test_runs_cannot_lie_in_a_file(tmp_path):
    make_theirs(tmp_path / "hf")
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(InterchangeError, match=r"^out=.*runs: .*runs/small cannot be made \("):
        imported(tmp_path)
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_bias_on_the_output_projection_is_refused(tmp_path):
    theirs = make_theirs(tmp_path / "hf", attention_bias=True)
    with torch.no_grad():
        theirs.model.layers[1].self_attn.o_proj.bias[3] = 1.0
    theirs.save_pretrained(tmp_path / "hf")
    with pytest.raises(InterchangeError, match=r"layers\.1\.self_attn\.o_proj\.bias: not zero"):
        imported(tmp_path)


def test_more_ids_than_rows_are_refused(tmp_path):
    make_theirs(tmp_path / "hf", vocab_size=250)
    with pytest.raises(InterchangeError, match="tokenizer bytes has 257 ids, but the embedding has 250 rows"):
        imported(tmp_path)


@torch.no_grad()
def test_a_vocabulary_padded_further_than_ours_keeps_its_rows(tmp_path):
    theirs = make_theirs(tmp_path / "hf", vocab_size=500)
    model, _, meta = load_run(imported(tmp_path), "latest", torch.device("cpu"))
    assert meta["config"]["model"]["vocab_size"] == 500
    assert torch.equal(model.embed.weight, theirs.model.embed_tokens.weight)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(InterchangeError, match=r"hf/config\.json: no such file"):
        imported(tmp_path)
    make_theirs(tmp_path / "hf")
    weights = tmp_path / "hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InterchangeError, match=r"model\.safetensors: cannot be read"):
        imported(tmp_path)
    weights.unlink()
    with pytest.raises(InterchangeError, match=r"no \*\.safetensors there"):
        imported(tmp_path)
    (tmp_path / "hf/config.json").write_text("{")
    with pytest.raises(InterchangeError, match=r"config\.json: cannot be read"):
        imported(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["path=x"],
        ["name=x"],
        ["path=x", "name=a/b"],
        ["path=x", "name=y", "seq_len=0"],
        ["path=x", "name=y", "seq_len=100000000000"],
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str]):
    with pytest.raises(UserError, match=r"^(path=|seq_len=0: must be|seq_len=100000000000: must be)"):
        main(arguments)


def test_a_new_run_starts_from_the_imported_weights(tmp_path):
    """With a SiLU model, as a sparse one: the gate, up and down projections are the same tensors."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_theirs(
        tmp_path / "hf",
        tie_word_embeddings=True,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        vocab_size=257,
        **sizes,
    )
    source = imported(tmp_path)
    started = [f"init={source}", f"data.tokenizer={source}/tokenizer", "ffn=sparse", "data.name=words"]
    train_tiny(tmp_path, "name=tuned", *started, "steps=1", "optim.lr=0", "data.workers=1")
    before, _, _ = load_run(source, "latest", torch.device("cpu"))
    after, _, meta = load_run(tmp_path / "runs/tuned", "latest", torch.device("cpu"))
    assert meta["step"] == 1 and meta["config"]["ffn"]["kind"] == "sparse"
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name
    with pytest.raises(UserError, match=r"has another tokenizer than the data; use data\.tokenizer=.*/small/tokenizer"):
        reordered = BPETokenizer("reversed", ".", {bytes([i]): 255 - i for i in range(256)}, {END_OF_TEXT: 256})
        reordered.save(tmp_path / "reversed")
        train_tiny(tmp_path, "name=other", f"init={source}", f"data.tokenizer={tmp_path}/reversed", "steps=1")
    with pytest.raises(UserError, match=r"small holds an imported model; train on from it with init=.*small"):
        train_tiny(tmp_path, "name=small", "steps=1", "data.workers=1")
    with pytest.raises(UserError, match=r"model\.blocks\.0\..* is \[.*\] there and \[.*\] in this model"):
        train_tiny(tmp_path, "name=third", f"init={source}", "model.d_ff=48", "steps=1", "data.workers=1")
