"""How sparse the hidden activations of a layer are, over many tokens; what a user needs to judge them.

An activation is *active* when it is not exactly zero. Models without exact zeros (SiLU, GELU) are looked at through
`eps` as well: how many activations are at least that large.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twell.sparsity import HOTTEST, hottest_shares, percentile

# Up to these densities the sparse FFN is faster than the best dense one at d_model 2048 (kernels/README.md): its step
# at 2.1 % by 1.47x, at 4.4 % by 1.19x. The step is forward and backward.
CLEAR_GAIN, SOME_GAIN = 0.025, 0.05
SMALLEST_WIDTH = 2048  # d_model below which no gain was measured in training
EXACT = 0.01  # share of exact zeros that an activation function makes and chance does not


class LayerStats:
    """Counts one layer's activations; fills up by `update`.

    h: hidden width. Everything is counted in integers, per neuron and per token, for the thresholds |a| > 0 and
    |a| >= eps.
    """

    def __init__(self, h: int, eps: float, device: torch.device | str = "cpu"):
        self.h, self.eps, self.tokens = h, eps, 0
        self.squares = torch.zeros((), dtype=torch.float64, device=device)
        self.fired = torch.zeros(2, h, dtype=torch.int64, device=device)  # tokens by neuron, for both thresholds
        self.numbers = torch.zeros(2, h + 1, dtype=torch.int64, device=device)  # tokens by number of active neurons

    def update(self, a: Tensor) -> None:
        """Count the activations a [..., h] of some tokens."""
        a = a.flatten(0, -2)  # [n, h]
        self.tokens += len(a)
        self.squares += a.double().square().sum()
        for i, active in enumerate((a != 0, a.abs() >= self.eps)):
            self.fired[i] += active.sum(0)
            self.numbers[i] += torch.bincount(active.sum(1), minlength=self.h + 1)

    def summary(self) -> dict[str, Any]:
        """What was counted, as numbers that JSON knows.

        zeros, below_eps: shares of all activations; rms: their root mean square. For `active` (|a| > 0) and `above_eps`
        (|a| >= eps): mean, p50, p99 and max over tokens of the number of such neurons; density = mean / h;
        never = neurons that were so on no token; hottest_1pct ...: share that the hottest 1 % of neurons have.
        """
        result: dict[str, Any] = {"d_ff": self.h, "rms": math.sqrt(self.squares.item() / (self.tokens * self.h))}
        levels = {"active": 0, "above_eps": 1}
        for name, i in levels.items():
            counts = torch.arange(self.h + 1, device=self.numbers.device)  # [h + 1]
            mean = (self.numbers[i] * counts).sum().item() / self.tokens
            result[name] = {
                "mean": mean,
                "p50": percentile(self.numbers[i : i + 1], 50).item(),
                "p99": percentile(self.numbers[i : i + 1], 99).item(),
                "max": self.numbers[i].nonzero().max().item(),
                "density": mean / self.h,
                "never": (self.fired[i] == 0).sum().item(),
            }
            for share, value in zip(HOTTEST, hottest_shares(self.fired[i : i + 1])[:, 0].tolist()):
                result[name][f"hottest_{share}pct"] = value
        result["zeros"] = 1 - result["active"]["density"]
        result["below_eps"] = 1 - result["above_eps"]["density"]
        return result


def has_exact_zeros(layers: Sequence[dict[str, Any]]) -> bool:
    """Whether the model's activation function makes zeros, as ReLU does and SiLU does not."""
    return sum(layer["zeros"] for layer in layers) / len(layers) >= EXACT


def verdict(layers: Sequence[dict[str, Any]], d_model: int, eps: float) -> str:
    """One sentence or two: is it worth computing only the non-zeros of this model?"""
    n = len(layers)
    if not has_exact_zeros(layers):
        below = sum(layer["below_eps"] for layer in layers) / n
        return (
            f"Not as it is: no activation is exactly zero, so nothing can be skipped without an error. {below:.1%} are "
            f"below {eps:g} in magnitude. Sparsity would have to be trained, with ReLU and an L1 penalty."
        )
    densities = [layer["active"]["density"] for layer in layers]
    clear, some = (sum(density <= limit for density in densities) for limit in (CLEAR_GAIN, SOME_GAIN))
    mean = f"{sum(densities) / n:.2%} of the neurons are active on a token"
    width = (
        "" if d_model >= SMALLEST_WIDTH else f" But at d_model {d_model}, below {SMALLEST_WIDTH}, no gain was measured."
    )
    if clear == n:
        return f"Worth it: {mean}, and every layer is sparse enough for a clear gain (at most {CLEAR_GAIN:.1%}).{width}"
    if some:
        return (
            f"Worth it in part: {mean}; {clear} of {n} layers are sparse enough for a clear gain (at most "
            f"{CLEAR_GAIN:.1%}), {some - clear} for some (at most {SOME_GAIN:.0%}), and {n - some} are better computed "
            f"densely.{width} A stronger L1 penalty makes more of them sparse."
        )
    return (
        f"Not as it is: {mean}, where dense products are faster (above {SOME_GAIN:.0%} in every layer). "
        "Training on with an L1 penalty, or a stronger one, makes ReLU layers sparse."
    )
