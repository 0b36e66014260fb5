"""Sparsity of the FFN: the weight of the L1 penalty, and the statistics that say what it achieves.

L1 of a model = mean over layers and counted tokens of (sum over neurons of |a|); with norm "mean" the sum over neurons
is divided by d_ff. L0 of a token in a layer = the number of neurons that fire on it. Counted tokens are those that the
loss counts. Everything here stays on the device until `SparsityMeter.summary`, which is called when logging.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from twell.config import FFNConfig, L1Config

DEAD_AFTER = 1_000_000  # tokens without firing that make a neuron count as dead (as in arXiv 2603.23198)


class SparsityStats(NamedTuple):
    """What one forward pass of a model saw, over its counted tokens.

    l0_sum  int64 [layers]     sum over tokens of the number of neurons that fired.
    l0_max  int32 [layers]     the same number for the token where it was largest.
    fired   int32 [layers, h]  number of tokens on which each neuron fired.
    """

    l0_sum: Tensor
    l0_max: Tensor
    fired: Tensor


def l1_coefficient(cfg: L1Config, step: int) -> float:
    """The penalty's coefficient at optimizer step `step` (from 0): rises linearly from 0 over `warmup_steps`."""
    if step >= cfg.warmup_steps:
        return cfg.coef
    return cfg.coef * step / cfg.warmup_steps


def l1_weight(cfg: FFNConfig, n_layers: int, step: int) -> float:
    """What to multiply `ModelOutput.l1_sum` by, so that it can be added to `ModelOutput.loss_sum`.

    Dividing loss_sum + l1_weight * l1_sum by the number of counted tokens gives CE + coef * L1.
    """
    per_neuron = cfg.d_ff if cfg.l1.norm == "mean" else 1
    return l1_coefficient(cfg.l1, step) / (n_layers * per_neuron)


class SparsityMeter:
    """Gathers L0 over the micro-batches between two log lines, and how long each neuron has been silent.

    A neuron is dead when it has not fired for `DEAD_AFTER` tokens, or since the meter's start if it has seen fewer.
    On several ranks each gathers its own share; `merge` joins the shares, and only then are the numbers the run's.
    """

    def __init__(self, n_layers: int, d_ff: int, device: torch.device | str, n_ranks: int = 1):
        self.d_ff = d_ff
        self.n_ranks = n_ranks
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.l0_sum = torch.zeros(n_layers, dtype=torch.int64, device=device)
        self.l0_max = torch.zeros(n_layers, dtype=torch.int32, device=device)
        # The two that a checkpoint keeps. A rank counts the tokens of all ranks (its own times n_ranks), so that the
        # silence of a neuron is simply the minimum over ranks.
        self.silent = torch.zeros(n_layers, d_ff, dtype=torch.int64, device=device)  # tokens since the last firing
        self.seen = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, stats: SparsityStats, n_counted: Tensor) -> None:
        """Add one micro-batch with `n_counted` counted tokens (integer scalar on the device)."""
        self.tokens += n_counted
        self.l0_sum += stats.l0_sum
        torch.maximum(self.l0_max, stats.l0_max, out=self.l0_max)
        self.seen += n_counted * self.n_ranks
        self.silent += n_counted * self.n_ranks
        self.silent.masked_fill_(stats.fired > 0, 0)

    def merge(self, sum_over_ranks: Callable[[Tensor], Tensor], max_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace this rank's numbers by those of all ranks, through two in-place reductions.

        Call it on every rank just before `summary` or before saving `state`. `tokens` and the L0 sums become totals:
        `reset` must follow before the next update.
        """
        sum_over_ranks(self.tokens)
        sum_over_ranks(self.l0_sum)
        max_over_ranks(self.l0_max)
        max_over_ranks(self.seen)
        self.silent.neg_()
        max_over_ranks(self.silent).neg_()

    def reset(self) -> None:
        """Start a new interval; silence goes on."""
        for tensor in (self.tokens, self.l0_sum, self.l0_max):
            tensor.zero_()

    def summary(self) -> dict[str, float]:
        """The interval's numbers, read from the device.

        sparsity/l0_mean        neurons that fire on a token: mean over counted tokens and layers
        sparsity/density        the same as a share of d_ff
        sparsity/l0_max         the largest number on any token in any layer
        sparsity/dead_share     share of neurons that are dead
        sparsity/l0/layer_00    mean over counted tokens, one key for each layer
        sparsity/l0_max/layer_00, sparsity/dead_share/layer_00    likewise
        """
        dead = (self.silent >= self.seen.clamp(max=DEAD_AFTER)) & (self.seen > 0)  # [layers, h]
        l0 = (self.l0_sum / self.tokens.clamp(min=1)).tolist()
        l0_max = self.l0_max.tolist()
        dead_share = dead.float().mean(1).tolist()
        n_layers = len(l0)
        result = {
            "sparsity/l0_mean": sum(l0) / n_layers,
            "sparsity/density": sum(l0) / n_layers / self.d_ff,
            "sparsity/l0_max": float(max(l0_max)),
            "sparsity/dead_share": sum(dead_share) / n_layers,
        }
        for i in range(n_layers):
            result[f"sparsity/l0/layer_{i:02d}"] = l0[i]
            result[f"sparsity/l0_max/layer_{i:02d}"] = float(l0_max[i])
            result[f"sparsity/dead_share/layer_{i:02d}"] = dead_share[i]
        return result

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps, named; loading fills them in place. `merge` first on several ranks."""
        return {"sparsity.silent": self.silent, "sparsity.seen": self.seen}
