"""What is measured of a model's sparsity beyond the counts of training: on the validation text, and in operations.

The validation windows are always the same, so that histograms and tables of different steps and runs compare.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from twell.flops import dense_flops, executed_flops
from twell.model import Transformer
from twell.sparsity import SparsityStats, count_neurons
from twell.tracking import Histogram, Table

LISTED = 20  # tokens in a table
SEEN_AT_LEAST = 10  # times, for a token to be listed
EDGES_PER_OCTAVE = 2


class ValidationSparsity:
    """How many neurons fire on the validation text: by layer, and by token id."""

    def __init__(self, n_layers: int, d_ff: int, n_vocab: int, device: torch.device | str):
        self._n_layers = n_layers
        sizes = [n_layers * (d_ff + 1), n_vocab, n_vocab]
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        histogram, self._firings, self._seen = self._all.split(sizes)  # firings over layers, and tokens, by id
        self._histogram = histogram.view(n_layers, d_ff + 1)  # tokens by number of neurons

    def clear(self) -> None:
        """Forget everything, before a validation."""
        self._all.zero_()

    def add(self, tokens: Tensor, stats: SparsityStats) -> None:
        """Count one batch; tokens int [b, t] are the model's input."""
        count_neurons(self._histogram, stats)
        ids, counted = tokens.flatten().long(), stats.counted.flatten().long()  # [n]
        self._firings.index_add_(0, ids, stats.nnz.sum(0).flatten() * counted)
        self._seen.index_add_(0, ids, counted)

    def summary(self, decode: Callable[[list[int]], str], sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Histograms and tables over all ranks, whose counts are joined in place; call it on every rank.

        decode: the text of a list of token ids.
        """
        sum_over_ranks(self._all)
        counts = self._histogram.cpu()
        edges = log_edges(counts.shape[1])
        start = torch.tensor(edges[:-1])
        bins = torch.zeros(self._n_layers, len(start), dtype=torch.int64)
        bins.index_add_(1, torch.searchsorted(start, torch.arange(counts.shape[1]), right=True) - 1, counts)
        result: dict[str, Any] = {
            f"sparsity/l0_histogram/layer_{i:02d}": Histogram(row, edges) for i, row in enumerate(bins.tolist())
        }
        ids = (self._seen >= SEEN_AT_LEAST).nonzero().squeeze(1)
        l0 = self._firings[ids] / self._n_layers / self._seen[ids]
        order = l0.argsort(descending=True, stable=True)
        for name, chosen in (("most", order[:LISTED]), ("fewest", order.flip(0)[:LISTED])):
            columns = (ids[chosen].tolist(), l0[chosen].tolist(), self._seen[ids[chosen]].tolist())
            rows = [[decode([i]), value, seen] for i, value, seen in zip(*columns)]
            result[f"sparsity/tokens_{name}"] = Table(["token", "active neurons", "times seen"], rows)
        return result


def log_edges(n: int) -> list[int]:
    """Edges of bins for the integers from 0 to n - 1: one bin a number at first, then EDGES_PER_OCTAVE an octave."""
    edges, exponent = [0], 0
    while edges[-1] < n:
        edge = min(n, round(2 ** (exponent / EDGES_PER_OCTAVE)))
        if edge > edges[-1]:
            edges.append(edge)
        exponent += 1
    return edges


def executed_share(model: Transformer, values: Mapping[str, Any]) -> float:
    """Operations executed over those of the dense model, forward and backward.

    values: a record's metrics: where sparsity/route says that a layer runs sparse, its sparsity/l0 counts.
    """
    neurons = []
    for i, block in enumerate(model.blocks):
        is_sparse = values.get(f"sparsity/route/layer_{i:02d}", 0) > 0
        neurons.append(values[f"sparsity/l0/layer_{i:02d}"] if is_sparse else len(block.ffn.w_up))
    return executed_flops(model, neurons, backward=True) / dense_flops(model, backward=True)
