"""The names and shapes of a Hugging Face checkpoint, and the way from them to ours and back.

Ours keeps the down projection [d_ff, d_model] and the three attention biases as one vector; everything else differs in
its name only. Both pair rotary dimension i with i + head_dim / 2, so no head is permuted.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from twell.errors import first_few
from twell.hf.config import InterchangeError, Layout

IGNORED = ("rotary_emb.inv_freq",)  # saved by old versions; it follows from the config


def expected_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Hugging Face checkpoint of `layout` holds."""
    d, h = layout.d_model, layout.d_ff
    shapes = {"model.embed_tokens.weight": (layout.n_vocab, d), "model.norm.weight": (d,)}
    if not layout.tied:
        shapes["lm_head.weight"] = (layout.n_vocab, d)
    widths = {"q": d, "k": layout.kv_width, "v": layout.kv_width}
    for i in range(layout.n_layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}input_layernorm.weight": (d,), f"{at}post_attention_layernorm.weight": (d,)}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (width, d) for part, width in widths.items()}
        shapes[f"{at}self_attn.o_proj.weight"] = (d, d)
        if layout.qkv_bias:
            shapes |= {f"{at}self_attn.{part}_proj.bias": (width,) for part, width in widths.items()}
        if layout.o_bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (d,)
        if layout.qk_norm:
            shapes |= {f"{at}self_attn.{part}_norm.weight": (layout.head_dim,) for part in "qk"}
        if layout.gated:
            shapes[f"{at}mlp.gate_proj.weight"] = (h, d)
        shapes[f"{at}mlp.up_proj.weight"] = (h, d)
        shapes[f"{at}mlp.down_proj.weight"] = (h, d) if layout.transposed_down else (d, h)
    return shapes


def to_hf(ours: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Hugging Face's tensors of our model, without the rows that pad the vocabulary."""
    theirs = {
        "model.embed_tokens.weight": ours["embed.weight"][: layout.n_vocab],
        "model.norm.weight": ours["norm.weight"],
    }
    if not layout.tied:
        theirs["lm_head.weight"] = ours["head.weight"][: layout.n_vocab]
    for i in range(layout.n_layers):
        at, block = f"model.layers.{i}.", f"blocks.{i}."
        theirs |= {their: ours[block + our] for their, our in _same(layout, at).items()}
        theirs[f"{at}mlp.down_proj.weight"] = ours[f"{block}ffn.w_down"].T
        if layout.qkv_bias:
            parts = ours[f"{block}attn.qkv_bias"].split([layout.d_model, layout.kv_width, layout.kv_width])
            theirs |= {f"{at}self_attn.{part}_proj.bias": bias for part, bias in zip("qkv", parts)}
        if layout.o_bias:
            theirs[f"{at}self_attn.o_proj.bias"] = torch.zeros_like(ours[f"{block}attn_norm.weight"])
    return {name: _whole(tensor) for name, tensor in theirs.items()}


def from_hf(read: Callable[[str], Tensor], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor) for every parameter of ours; `read` loads a tensor of theirs by name.

    The vocabulary has the rows it has there. Raises InterchangeError for an output bias that is not zero.
    """
    yield "embed.weight", read("model.embed_tokens.weight")
    yield "norm.weight", read("model.norm.weight")
    if not layout.tied:
        yield "head.weight", read("lm_head.weight")
    for i in range(layout.n_layers):
        at, block = f"model.layers.{i}.", f"blocks.{i}."
        for their, our in _same(layout, at).items():
            yield block + our, read(their)
        down = read(f"{at}mlp.down_proj.weight")
        yield f"{block}ffn.w_down", down if layout.transposed_down else down.T
        if layout.qkv_bias:
            yield f"{block}attn.qkv_bias", torch.cat([read(f"{at}self_attn.{part}_proj.bias") for part in "qkv"])
        if layout.o_bias and read(f"{at}self_attn.o_proj.bias").any():
            raise InterchangeError(
                f"{at}self_attn.o_proj.bias: not zero, and there is no bias on the output projection here"
            )


def check_names(shapes: dict[str, tuple[int, ...]], layout: Layout) -> Layout:
    """The layout that the checkpoint really has: `layout`, with transposed_down as the shapes show it.

    shapes: of the tensors that are there. Raises InterchangeError that names missing, unknown or misshapen ones.
    """
    if layout.sparse and layout.d_ff != layout.d_model:
        down = shapes.get("model.layers.0.mlp.down_proj.weight")
        layout = dataclasses.replace(layout, transposed_down=down == (layout.d_ff, layout.d_model))
    expected = expected_shapes(layout)
    missing = [name for name in expected if name not in shapes]
    extra = [name for name in shapes if name not in expected and not name.endswith(IGNORED)]
    if layout.tied and "lm_head.weight" in extra:  # compared with the embedding when it is loaded
        extra.remove("lm_head.weight")
    wrong = [f"{n} is {list(shapes[n])}, not {list(s)}" for n, s in expected.items() if n in shapes and shapes[n] != s]
    for problem, names in (("missing tensors", missing), ("unknown tensors", extra), ("wrong shapes", wrong)):
        if names:
            raise InterchangeError(f"{problem} for what config.json describes: {first_few(names)}")
    return layout


def _whole(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if it is a part of a larger one: safetensors would store all of that."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _same(layout: Layout, at: str) -> dict[str, str]:
    """Their name -> ours, of what a layer holds in the same form."""
    names = {
        f"{at}input_layernorm.weight": "attn_norm.weight",
        f"{at}post_attention_layernorm.weight": "ffn_norm.weight",
        f"{at}mlp.up_proj.weight": "ffn.w_up",
    }
    names |= {f"{at}self_attn.{part}_proj.weight": f"attn.{part}.weight" for part in "qkvo"}
    if layout.qk_norm:
        names |= {f"{at}self_attn.{part}_norm.weight": f"attn.{part}_norm.weight" for part in "qk"}
    if layout.gated:
        names[f"{at}mlp.gate_proj.weight"] = "ffn.w_gate"
    return names
