"""Removes neurons that never fire on calibration text: on that text the smaller model is the same function.

Stock architectures have one width for all layers, so every layer keeps as many neurons as the layer with the most live
ones, rounded up; where it has fewer, dead ones fill the rest.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from data.loader import Batch

WIDTH_MULTIPLE = 64  # widths that matrix units like


@torch.no_grad()
def count_firing(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, int]:
    """On how many counted tokens of `batches` each neuron fires, int64 [layers, d_ff] on the CPU, and out of how many.

    `model` is a Transformer of a ReLU kind, made ready by `twell.evaluate.compute_densely`.
    """
    total, seen = 0, 0
    for batch in batches:
        total = total + model(batch.tokens, batch.targets, batch.doc_ids).stats.fired.long().cpu()
        seen += int((batch.targets >= 0).sum())
    return total, seen


def neurons_to_keep(fired: Tensor) -> Tensor:
    """The neurons that stay, ascending: int64 [layers, width], given their counts [layers, d_ff]."""
    d_ff = fired.shape[1]
    alive = int((fired > 0).sum(1).max())
    width = min(d_ff, -(-max(alive, 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    return fired.argsort(dim=1, descending=True, stable=True)[:, :width].sort(dim=1).values


def prune(tensors: dict[str, Tensor], keep: Tensor) -> dict[str, Tensor]:
    """The model's tensors with only the neurons `keep` [layers, width]."""
    pruned = dict(tensors)
    for layer, neurons in enumerate(keep):
        for name in ("w_gate", "w_up", "w_down"):
            key = f"blocks.{layer}.ffn.{name}"
            if key in pruned:  # w_gate: gated kinds only
                pruned[key] = pruned[key][neurons]
    return pruned
