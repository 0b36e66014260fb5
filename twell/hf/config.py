"""What a Hugging Face config.json says about a model of ours, and the other way round.

    gated, SiLU or ReLU     llama; with q/k/v biases qwen2; with QK norm qwen3; with both qwen3 and attention_bias
    ReLU without a gate     arcee; with q/k/v biases arcee and attention_bias; with QK norm there is none
    SparseLM, as published  llama_sparse_relu, qwen2_sparse_relu: read only; ReLU whatever hidden_act says

A type whose attention_bias also gives the output projection a bias gets one of zeros, which changes nothing.
Both spellings of transformers 4 and 5 are read, and both are written, so that either version loads what we export.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twell.config import FFNConfig, ModelConfig
from twell.errors import UserError

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "arcee": "ArceeForCausalLM",
}
SPARSE_SUFFIX = "_sparse_relu"
READABLE = (*CLASSES, "llama_sparse_relu", "qwen2_sparse_relu")
# Keys that must be absent or have one of these values: with any other the model is not the one that we would build.
FIXED = {
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
EXPECTED = {
    int: "a whole number from 1 to {high:,}",
    float: "a number above 0, up to {high:g}",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
REQUIRED = "missing"  # no value of a size
LARGEST = {"num_hidden_layers": 10_000, "max_position_embeddings": 1 << 24}  # what would be built, or not fit anywhere


class InterchangeError(UserError):
    """A model that cannot be exported or imported; the message says what is in the way."""


@dataclass(frozen=True)
class Layout:
    """What decides the names and shapes of a Hugging Face checkpoint.

    n_vocab: rows of the embedding there; qkv_bias, o_bias: biases of the attention; sparse: the published SparseLM
    layout, whose files do not always say how the down projection lies; transposed_down: [d_ff, d_model], as ours.
    """

    n_layers: int
    d_model: int
    d_ff: int
    kv_width: int
    head_dim: int
    n_vocab: int
    gated: bool
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    sparse: bool = False
    transposed_down: bool = False


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a Hugging Face folder; InterchangeError says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InterchangeError(f"{path}: no such file; path=DIR names a Hugging Face folder") from error
    except (OSError, ValueError) as error:
        raise InterchangeError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise InterchangeError(f"{path}: must hold an object, but holds {content!r:.40}")
    return content


def model_type(model: ModelConfig, gated: bool) -> str:
    """The stock architecture that computes exactly what `model` does; InterchangeError if there is none."""
    if not gated:
        if model.qk_norm:
            raise InterchangeError(
                "model.qk_norm=true with ffn.kind=sparse_nongated: transformers has no architecture with QK norm and "
                "an MLP without a gate; of the two, one alone can be exported"
            )
        return "arcee"
    if model.qk_norm:
        return "qwen3"
    return "qwen2" if model.qkv_bias else "llama"


def layout_of(model: ModelConfig, ffn: FFNConfig, d_ff: int, n_vocab: int) -> Layout:
    """The layout that `model` is exported in; `d_ff` is its width, smaller than ffn.d_ff if it was pruned."""
    gated = ffn.kind != "sparse_nongated"
    head_dim = model.d_model // model.n_heads
    return Layout(
        n_layers=model.n_layers,
        d_model=model.d_model,
        d_ff=d_ff,
        kv_width=model.n_kv_heads * head_dim,
        head_dim=head_dim,
        n_vocab=n_vocab,
        gated=gated,
        tied=model.tied,
        qk_norm=model.qk_norm,
        qkv_bias=model.qkv_bias,
        o_bias=model.qkv_bias and model_type(model, gated) != "qwen2",
    )


def to_hf_config(model: ModelConfig, ffn: FFNConfig, layout: Layout, *, dtype: str, eot: int) -> dict[str, Any]:
    """config.json of an exported model. dtype: as torch names it ("float32"); eot: the end-of-text id."""
    kind = model_type(model, layout.gated)
    config = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": layout.n_vocab,
        "hidden_size": model.d_model,
        "intermediate_size": layout.d_ff,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": layout.head_dim,
        "hidden_act": "silu" if ffn.kind == "dense_silu" else "relu",
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # transformers 5
        "tie_word_embeddings": model.tied,
        "attention_bias": layout.o_bias,
        "attention_dropout": 0.0,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,  # transformers 4
        "dtype": dtype,  # transformers 5
    }
    if kind in ("llama", "arcee"):
        config["mlp_bias"] = False
    if kind in ("qwen2", "qwen3"):
        config["use_sliding_window"] = False
    return config


def from_hf_config(config: dict[str, Any], name: str) -> tuple[ModelConfig, str, Layout]:
    """Our model, its kind of FFN (dense_silu, sparse or sparse_nongated) and the layout of its checkpoint.

    name: what the model shall be called. Raises InterchangeError for everything that we do not have.
    """
    kind = config.get("model_type")
    if kind not in READABLE:
        named = ", ".join(map(str, _value(config, "architectures", list) or ["no architectures"]))
        raise InterchangeError(f"config.json: model_type={kind} ({named}): only {', '.join(READABLE)} can be imported")
    for key, allowed in FIXED.items():
        if key in config and config[key] not in allowed:
            raise InterchangeError(f"config.json: {key}={config[key]}: not supported, must be {allowed[0]}")
    if any(layer != "full_attention" for layer in _value(config, "layer_types", list) or []):
        raise InterchangeError(f"config.json: layer_types={config['layer_types']}: only full_attention is supported")
    is_sparse, base = kind.endswith(SPARSE_SUFFIX), kind.removesuffix(SPARSE_SUFFIX)
    gated = _value(config, "sparsity_gated_mlp", bool, True) if is_sparse else base != "arcee"
    d_ff = _size(config, "sparsity_new_intermediate_size", None) if is_sparse else None
    d_ff = d_ff or _size(config, "intermediate_size")
    attention_bias = _value(config, "attention_bias", bool, False)
    n_heads = _size(config, "num_attention_heads")
    model = ModelConfig(
        name=name,
        n_layers=_size(config, "num_hidden_layers"),
        d_model=_size(config, "hidden_size"),
        n_heads=n_heads,
        n_kv_heads=_size(config, "num_key_value_heads", None) or n_heads,
        # The other kind of FFN gets about as many parameters.
        d_ff=d_ff if gated else max(1, 2 * d_ff // 3),
        d_ff_nongated=3 * d_ff // 2 if gated else d_ff,
        seq_len=_size(config, "max_position_embeddings"),
        tied=_value(config, "tie_word_embeddings", bool, False),
        qk_norm=base == "qwen3",
        qkv_bias=base == "qwen2" or attention_bias,
        rope_theta=_rope_theta(config),
        norm_eps=float(_value(config, "rms_norm_eps", float, 1e-6, high=1.0)),
    )
    _check_heads(config, model)
    ffn_kind = _ffn_kind(config, is_sparse, gated)
    layout = replace(
        layout_of(model, FFNConfig(kind=ffn_kind), d_ff, _size(config, "vocab_size")),
        o_bias=attention_bias and base != "qwen2",
        sparse=is_sparse,
        transposed_down=is_sparse and gated and _value(config, "sparsity_use_hybrid_kernel", bool, False),
    )
    return model, ffn_kind, layout


def _ffn_kind(config: dict[str, Any], is_sparse: bool, gated: bool) -> str:
    act = "relu" if is_sparse else config.get("hidden_act", "silu")
    if act in ("silu", "swish") and gated:
        return "dense_silu"
    if act != "relu":
        allowed = "silu or relu" if gated else "relu, for an MLP without a gate"
        raise InterchangeError(f"config.json: hidden_act={act}: must be {allowed}")
    return "sparse" if gated else "sparse_nongated"


def _rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotary angles, wherever the file has it; InterchangeError if they are scaled."""
    theta = outside = _value(config, "rope_theta", float, 10000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = _value(config, key, dict) or {}
        kind, share = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor", 1)
        differs_by_layer = any(isinstance(value, dict) for value in rope.values())
        if kind != "default" or share != 1 or differs_by_layer:
            raise InterchangeError(
                f"config.json: {key}={rope}: only rope_type=default, alike in all layers, is supported"
            )
        if key == "rope_parameters":
            theta = _value(rope, "rope_theta", float, outside)
    if "rope_theta" in config and theta != outside:
        raise InterchangeError(
            f"config.json: rope_theta={outside}, but rope_parameters has {theta}: which one is meant?"
        )
    return float(theta)


def _check_heads(config: dict[str, Any], model: ModelConfig) -> None:
    derived = model.d_model // model.n_heads
    # Qwen3's class has a head_dim of its own if the file has none.
    stated = _size(config, "head_dim", None) or (128 if config["model_type"] == "qwen3" else derived)
    if stated != derived or model.d_model % model.n_heads or derived % 2:
        raise InterchangeError(
            f"config.json: head_dim={stated} with hidden_size={model.d_model} and num_attention_heads={model.n_heads}: "
            "only an even head_dim of hidden_size / num_attention_heads is supported"
        )
    if model.n_heads % model.n_kv_heads:
        raise InterchangeError(
            f"config.json: num_key_value_heads={model.n_kv_heads} does not divide num_attention_heads={model.n_heads}"
        )


def _size(config: dict[str, Any], key: str, otherwise: Any = REQUIRED) -> int:
    return _value(config, key, int, otherwise, high=LARGEST.get(key, 1 << 31))


def _value(config: dict[str, Any], key: str, kind: type, otherwise: Any = None, high: float = 1e30) -> Any:
    """config[key], or `otherwise` where there is none; null is read like that only if `otherwise` is None.

    kind: int (from 1 to `high`), float (above 0, up to `high`; whole numbers too), bool, list or dict. Raises
    InterchangeError for anything else.
    """
    value = config.get(key, otherwise)
    if value is None and otherwise is None:
        return None
    is_bool = isinstance(value, bool)
    if kind in (int, float):
        fits = isinstance(value, (int, kind)) and not is_bool and 0 < value <= high
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise InterchangeError(f"config.json: {key}={value}: must be {EXPECTED[kind].format(high=high)}")
    return value
