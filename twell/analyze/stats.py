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

# What kernels/README.md has measured of gated layers: d_model, active neurons per token, d_ff, and the gain of the
# FFN's training step (forward and backward) over the best dense one. One H200, 16384 tokens, firing rates drawn by
# chance; the last row is of a trained model, which fires less evenly. Wider and sparser layers gain more.
MEASURED = (
    (4096, 30, 14336, 3.81), (4096, 60, 14336, 2.92), (4096, 120, 14336, 2.23),
    (2048, 15, 5632, 3.04), (2048, 30, 5632, 2.42), (2048, 60, 5632, 1.93), (2048, 120, 5632, 1.58),
    (2048, 250, 5632, 1.28),
    (1024, 15, 2816, 2.07), (1024, 30, 2816, 1.74), (768, 20, 2048, 1.62),
    (1024, 52, 2816, 1.15),
)  # fmt: skip
NARROWEST = min(d_model for d_model, *_ in MEASURED)
WORTH = 1.2  # gain of all FFNs together from which sparsity is called worth it
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
    mean = f"{sum(densities) / n:.2%} of the neurons are active on a token"
    if d_model < NARROWEST:
        return f"Not known: {mean}, but nothing narrower than d_model {NARROWEST} has been measured; this is {d_model}."
    gains = [predicted_gain(d_model, density) for density in densities]
    dense = sum(gain == 1 for gain in gains)
    if dense == n:
        return (
            f"Not as it is: {mean}, and at d_model {d_model} no layer is sparse enough for a gain that was measured. "
            "Training on with an L1 penalty, or a stronger one, makes ReLU layers sparse."
        )
    gain = n / sum(1 / gain for gain in gains)  # of the sum of the layers' times
    text = (
        f"{'Worth it' if gain >= WORTH else 'Hardly worth it'}: {mean}. A prediction for an H200, from what was "
        f"measured up to this width (kernels/README.md): the FFNs' training step is {gain:.2f}x as fast as the dense "
        "one. It gains less where neurons fire unevenly, with few tokens in a batch, and without a gate."
    )
    if dense:
        text += f" {dense} of {n} layers are better computed densely; a stronger L1 penalty makes more of them sparse."
    return text


def predicted_gain(d_model: int, density: float) -> float:
    """How much faster than a dense one a layer's training step is: the most that was measured for a layer that is no
    wider and no sparser; 1 if there is none, as a layer then runs dense."""
    return max((gain for d, active, h, gain in MEASURED if d <= d_model and density <= active / h), default=1.0)
