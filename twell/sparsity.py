"""What is counted of a sparse model while it trains: how many neurons fire, on which tokens, and which neurons.

L0 of a token in a layer = the number of neurons that fire on it. Counted tokens are those that the loss counts.
Counting stays on the device and takes about ten small kernels a micro-batch; `SparsityMeter.summary`, called when
logging, is the first to wait for it. Counts are exact integers, so their sums do not depend on how a batch was divided
into micro-batches and ranks.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twell.tracking import Histogram

PARTS = 8  # of the sequence, over which L0 is reported
PERCENTILES = (50, 99)  # of L0 over tokens
HOTTEST = (1, 5, 10)  # per cent of a layer's neurons, those that fire most often


class SparsityStats(NamedTuple):
    """What one forward pass of a model saw.

    nnz      int32 [layers, b, t]  number of neurons that fire on each token, counted or not.
    counted  bool  [b, t]          the tokens that the loss counts.
    fired    int32 [layers, h]     number of counted tokens on which each neuron fires.
    """

    nnz: Tensor
    counted: Tensor
    fired: Tensor


class Tally:
    """Counts over counted tokens, int64, in one tensor: adding, clearing and joining ranks take one operation each.

    histogram    [layers, h + 1]    tokens by the number of neurons that fire on them
    by_position  [layers, seq_len]  firings by the token's position in its sequence
    fired        [layers, h]        tokens on which each neuron fires
    counted      [seq_len]          counted tokens by position
    """

    def __init__(self, n_layers: int, d_ff: int, seq_len: int, device: torch.device | str):
        shapes = [(n_layers, d_ff + 1), (n_layers, seq_len), (n_layers, d_ff), (seq_len,)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        views = [part.view(shape) for part, shape in zip(self.all.split(sizes), shapes)]
        self.histogram, self.by_position, self.fired, self.counted = views

    @torch.no_grad()
    def add(self, stats: SparsityStats) -> None:
        """Add one micro-batch of sequences no longer than seq_len."""
        count_neurons(self.histogram, stats)
        counted = stats.counted.long()  # [b, t]
        t = counted.shape[1]
        self.by_position[:, :t].add_((stats.nnz * counted).sum(1))
        self.counted[:t].add_(counted.sum(0))
        self.fired += stats.fired

    def l0_sum(self) -> Tensor:
        """Firings of each layer, int64 [layers]."""
        return self.by_position.sum(1)


def count_neurons(histogram: Tensor, stats: SparsityStats) -> None:
    """Add counted tokens to `histogram`, int64 [layers, h + 1], by the number of neurons that fire on them."""
    nnz = stats.nnz.flatten(1).long()  # [layers, n]
    # Not bincount, which would wait for the device to learn the largest number.
    histogram.scatter_add_(1, nnz, stats.counted.flatten().long().expand(len(nnz), -1))


class SparsityMeter:
    """Gathers the counts of one optimizer step, and adds those of accepted steps up between two log lines.

    On several ranks each gathers its own share; `merge` joins the shares, and only then are the numbers the run's.
    """

    def __init__(self, n_layers: int, d_ff: int, seq_len: int, device: torch.device | str):
        self.d_ff = d_ff
        self.step = Tally(n_layers, d_ff, seq_len, device)
        self.interval = Tally(n_layers, d_ff, seq_len, device)

    def add(self, stats: SparsityStats) -> None:
        """Count one micro-batch of the current step."""
        self.step.add(stats)

    def accept(self) -> None:
        """The step counts: add it to the interval."""
        self.interval.all += self.step.all
        self.step.all.zero_()

    def drop(self) -> None:
        """The step does not count: it is repeated, or its update is left out."""
        self.step.all.zero_()

    def merge(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace this rank's interval by that of all ranks, through one in-place reduction, just before `summary`.

        `reset` must follow before the next `accept`.
        """
        sum_over_ranks(self.interval.all)

    def reset(self) -> None:
        """Start a new interval."""
        self.interval.all.zero_()

    def summary(self) -> dict[str, Any]:
        """The interval's numbers, read from the device; twell.tracking.METRICS says what each of them is.

        NaN, all of them, if no step was accepted.
        """
        tally = self.interval
        n_tokens = tally.counted.sum().item()
        l0 = (tally.l0_sum() / max(1, n_tokens)).tolist()
        by_layer = {"l0": l0}
        for q in PERCENTILES:
            by_layer[f"l0_p{q}"] = percentile(tally.histogram, q).tolist()
        by_layer["l0_max"] = percentile(tally.histogram, 100).tolist()
        result: dict[str, Any] = {
            "sparsity/l0_mean": sum(l0) / len(l0),
            "sparsity/density": sum(l0) / len(l0) / self.d_ff,
            "sparsity/l0_max": float(max(by_layer["l0_max"])),
            "sparsity/l0_heatmap": Histogram(l0, list(range(len(l0) + 1))),
        }
        for share, value in zip(HOTTEST, hottest_shares(tally.fired).mean(1).tolist()):
            result[f"sparsity/hottest_{share}pct"] = value
        for i, value in enumerate(l0_by_part(tally).tolist()):
            result[f"sparsity/l0_part/part_{i}"] = value
        for name, values in by_layer.items():
            for i, value in enumerate(values):
                result[f"sparsity/{name}/layer_{i:02d}"] = float(value)
        return result if n_tokens else dict.fromkeys(result, math.nan)


def percentile(histogram: Tensor, q: int) -> Tensor:
    """The smallest number that at least q % of the tokens do not exceed, int64 [layers]; 0 if there are no tokens.

    histogram [layers, numbers]: tokens by number.
    """
    upto = histogram.cumsum(1)  # [layers, numbers]
    return (upto * 100 < q * upto[:, -1:]).sum(1)


def hottest_shares(fired: Tensor) -> Tensor:
    """Share of a layer's firings that its hottest 1, 5, 10 % of neurons (at least one) have, float64 [3, layers].

    fired [layers, h]: firings by neuron.
    """
    n_neurons = fired.shape[1]
    upto = fired.sort(1, descending=True).values.cumsum(1)  # [layers, h]
    counts = [max(1, round(n_neurons * share / 100)) for share in HOTTEST]
    return torch.stack([upto[:, n - 1] / upto[:, -1].clamp(min=1).double() for n in counts])


def l0_by_part(tally: Tally) -> Tensor:
    """L0, mean over layers, in each of PARTS equal parts of the sequence, float64; NaN where no token was counted."""
    firings = tally.by_position.double().mean(0)  # [seq_len]
    part = torch.arange(len(firings), device=firings.device) * PARTS // len(firings)  # [seq_len]
    empty = torch.zeros(PARTS, dtype=torch.float64, device=firings.device)
    return empty.index_add(0, part, firings) / empty.index_add(0, part, tally.counted.double())
