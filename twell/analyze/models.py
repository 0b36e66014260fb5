"""The models that can be analysed: a run of ours, and a Hugging Face folder. Both show their hidden activations.

`a` is what the FFN's last product reads: act(x Wg^T) * (x Wu^T) of a gated layer, act(x Wu^T) of one without a gate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.config import ConfigError
from twell.errors import UserError, first_few, first_line
from twell.ffn import FFN, SparseFFN
from twell.generate import load_run

HEADS = ("lm_head.", "score.")  # what the names of weights outside of the layers start with


@dataclass
class Subject:
    """A model to look at."""

    name: str
    model: nn.Module  # called with tokens [b, t]; what it returns is of no interest
    modules: list[nn.Module]  # one in each layer
    hidden: Callable[[nn.Module, Tensor], Tensor]  # of such a module and its input: a [b, t, h]
    widths: list[int]  # d_ff of each layer
    d_model: int
    seq_len: int  # the longest context
    encode: Callable[[str], Sequence[int]]

    def watch(self, observe: Callable[[int, Tensor], None]) -> None:
        """From now on, each forward pass calls `observe(layer, a)` for every layer."""
        for layer, module in enumerate(self.modules):
            module.register_forward_pre_hook(
                lambda module, inputs, layer=layer: observe(layer, self.hidden(module, inputs[0]))
            )


def load_ours(folder: Path, checkpoint: str, device: torch.device) -> Subject:
    """A run of train.py; see `twell.generate.load_run` for `checkpoint`."""
    model, tokenizer, meta = load_run(folder, checkpoint, device)
    ffns = [block.ffn for block in model.blocks]
    for ffn in ffns:
        if isinstance(ffn, SparseFFN):
            ffn.impl = "torch"  # the kernels never hold all of `a`

    return Subject(
        name=f"{folder}, step {meta['step']}",
        model=model,
        modules=ffns,
        hidden=_hidden,
        widths=[len(ffn.w_up) for ffn in ffns],
        d_model=ffns[0].w_up.shape[1],
        seq_len=model.seq_len,
        encode=tokenizer.encode,
    )


def _hidden(ffn: FFN, x: Tensor) -> Tensor:
    """The hidden activations a [b, t, h] of one of our layers for its input x [b, t, d]."""
    w_gate, w_up, _ = ffn.weights(x.dtype)
    act = F.silu if getattr(ffn, "activation", "relu") == "silu" else F.relu
    up = F.linear(x, w_up)
    return act(up) if w_gate is None else act(F.linear(x, w_gate)) * up


def load_hf(folder: Path, device: torch.device) -> Subject:
    """A folder that transformers can load, of Llama's or GPT-2's family; needs the extra `export`."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise UserError("hf=... needs transformers: pip install -e '.[export]'") from error
    if not (folder / "config.json").exists():
        raise ConfigError(f"hf={folder}: no Hugging Face model there (config.json is missing)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model, found = AutoModel.from_pretrained(  # without the head
            folder, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # transformers raises many kinds for damaged or unknown folders
        raise UserError(f"hf={folder}: transformers cannot load it ({first_line(error)})") from error
    _check_weights(folder, found)
    if not tokenizer("a b c", add_special_tokens=False)["input_ids"]:  # what transformers makes up where none is
        raise UserError(f"hf={folder}: has no tokenizer; save the model's own there")
    model.eval()
    model.config.use_cache = False
    model.to(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    lasts = [_last_product(folder, layer) for layer in getattr(model, "layers", getattr(model, "h", ()))]
    if not lasts:
        raise UserError(f"hf={folder}: {type(model).__name__} has no layers of Llama's or GPT-2's kind")

    n_ids = model.get_input_embeddings().num_embeddings

    def encode(text: str) -> Sequence[int]:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if max(ids, default=0) >= n_ids:
            raise UserError(f"hf={folder}: the tokenizer makes id {max(ids)}, but the model has {n_ids}: not its own")
        return ids

    return Subject(
        name=str(folder),
        model=model,
        modules=lasts,
        hidden=lambda _, x: x,
        # GPT-2 stores its products transposed, [in, out]
        widths=[last.weight.shape[0] if hasattr(last, "nf") else last.weight.shape[1] for last in lasts],
        d_model=model.config.hidden_size,
        seq_len=model.config.max_position_embeddings,
        encode=encode,
    )


def _check_weights(folder: Path, found: dict[str, Any]) -> None:
    """UserError unless the folder has the model's weights, all and no others but a head: what transformers does not
    find it makes up, and only its log says so. found: its loading info."""
    mismatched = [entry if isinstance(entry, str) else entry[0] for entry in found["mismatched_keys"]]
    unexpected = [key for key in found["unexpected_keys"] if not key.startswith(HEADS)]
    kinds = {"missing": found["missing_keys"], "of another shape": mismatched, "unknown": unexpected}
    for kind, keys in kinds.items():
        if keys:
            named = first_few(sorted(keys), most=1)
            raise UserError(f"hf={folder}: not the weights that config.json describes; {kind}: {named}")


def _last_product(folder: Path, layer: nn.Module) -> nn.Module:
    """The module whose input is `a`."""
    mlp = getattr(layer, "mlp", None)
    last = getattr(mlp, "down_proj", getattr(mlp, "c_proj", None))
    if last is None:
        raise UserError(
            f"hf={folder}: {type(layer).__name__} has neither mlp.down_proj (Llama's kind) nor mlp.c_proj (GPT-2's); "
            "other layers are not known here"
        )
    return last
