"""FFN inputs and weights whose firing follows a chosen law: what benchmarks and tests run on.

A neuron fires when its pre-activation, a standard normal plus a bias, is positive. Dimension 0 of x is constant and
gives every neuron its bias, dimension 1 gives every token its own; so real gate products yield the wanted pattern.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CONSTANT = 4.0  # value of x[:, 0]: a bias of b is a weight of b / 4, which bf16 rounds less harmfully than a larger one
ALWAYS = 8.0  # a bias of so many standard deviations fires on every token (and its negative on none)


@dataclass(frozen=True)
class FiringLaw:
    """A share `dead` of the neurons never fires; the rates of the rest are log-normal, capped at `max_rate`.

    mean_nnz: active neurons per token; h or more: every neuron on every token. token_sigma: log-normal spread of the
    expected number over tokens (real tokens are far from equal); 0: every token expects the mean.
    """

    mean_nnz: float
    dead: float = 0.3
    sigma: float = 1.3
    max_rate: float = 0.5
    token_sigma: float = 0.0

    def biases(self, h: int, generator: torch.Generator) -> Tensor:
        """Bias of every neuron, fp64 [h], in random order."""
        device = generator.device
        if self.mean_nnz >= h:
            return torch.full((h,), ALWAYS, dtype=torch.float64, device=device)
        rate = torch.exp(self.sigma * torch.randn(h, generator=generator, device=device, dtype=torch.float64))
        rate[torch.rand(h, generator=generator, device=device) < self.dead] = 0
        for _ in range(50):  # the cap takes from the largest; scaling again hands it to the rest
            rate = (rate * (self.mean_nnz / rate.sum())).clamp(max=self.max_rate)
        return torch.special.ndtri(rate).clamp(min=-ALWAYS)

    def token_shift(self, biases: Tensor, n: int, generator: torch.Generator) -> Tensor:
        """What each token adds to every neuron's bias, fp64 [n], so that its expected nnz is log-normal."""
        normal = torch.randn(n, generator=generator, device=biases.device, dtype=torch.float64)
        if self.token_sigma == 0:
            return torch.zeros_like(normal)
        live = biases[biases > -ALWAYS]
        shift = torch.linspace(-4, 4, 801, dtype=torch.float64, device=biases.device)
        expected = torch.special.ndtr(live + shift[:, None]).sum(1)  # nnz of a token with this shift, rising
        target = self.mean_nnz * torch.exp(self.token_sigma * normal - self.token_sigma**2 / 2)
        return shift[torch.searchsorted(expected, target).clamp(max=len(shift) - 1)]


@dataclass(frozen=True)
class Weights:
    """Weights [h, d] of one FFN; gate None: non-gated."""

    gate: Tensor | None
    up: Tensor
    down: Tensor

    def __iter__(self):
        return iter((self.gate, self.up, self.down))


class Problem:
    """One FFN under a firing law, and as many batches of it as are wanted, each from its own seed."""

    def __init__(self, law: FiringLaw, d: int, h: int, *, gated=True, dtype=torch.bfloat16, device="cpu", seed=0):
        self.law, self.d, self.dtype = law, d, dtype
        self.device, self.seed = torch.device(device), seed
        generator = self._generator(0)
        self.biases = law.biases(h, generator)
        firing, up, down = (torch.randn(h, d, generator=generator, device=device) for _ in range(3))
        firing /= math.sqrt(d)
        firing[:, 0] = self.biases / CONSTANT
        firing[:, 1] = 1.0
        down = (0.02 * down).to(dtype)
        firing = firing.to(dtype)
        self.weights = Weights(firing, (0.02 * up).to(dtype), down) if gated else Weights(None, firing, down)

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1_000_003 * self.seed + stream)

    def batch(self, n: int, number: int) -> tuple[Tensor, Tensor]:
        """(x, dy), both [n, d], of batch `number` >= 0."""
        generator = self._generator(1 + number)
        x = torch.randn(n, self.d, generator=generator, device=self.device)
        x[:, 0] = CONSTANT
        x[:, 1] = self.law.token_shift(self.biases, n, generator)
        dy = torch.randn(n, self.d, generator=generator, device=self.device)
        return x.to(self.dtype), dy.to(self.dtype)


class MaskProblem:
    """A gated FFN whose neurons fire exactly where a recorded mask says, with random values.

    x and w_gate are fitted so that every product x w_gate^T is at least a margin above zero where the mask fires and
    below elsewhere. Possible whenever the mask came from a layer not much wider than d; `mismatches` counts failures.
    """

    def __init__(self, mask: Tensor, d: int, *, dtype=torch.bfloat16, device="cpu", seed=0, steps=80):
        """mask: bool [tokens, h]. Batches with even numbers take their tokens from its first half, odd from the second,
        so that what is learnt from one half can be timed on the other."""
        generator = torch.Generator(device).manual_seed(seed)
        mask = mask.to(device)
        h = mask.shape[1]
        x, w_gate = fit_mask(mask, d, generator, steps)
        self.x = x.to(dtype)
        up, down = (0.02 * torch.randn(h, d, generator=generator, device=device) for _ in range(2))
        self.weights = Weights(w_gate.to(dtype), up.to(dtype), down.to(dtype))
        self.mismatches = int(((F.linear(self.x, self.weights.gate) > 0) != mask).sum())

    def batch(self, n: int, number: int) -> tuple[Tensor, Tensor]:
        """(x, dy), both [n, d]: tokens of one half in order, round and round, from a start that depends on `number`."""
        half = self.x.chunk(2)[number % 2]
        generator = torch.Generator(half.device).manual_seed(number)
        start = number // 2 * len(half) // 4
        x = half[(start + torch.arange(n, device=half.device)) % len(half)]
        dy = torch.randn(x.shape, generator=generator, device=half.device)
        return x, dy.to(x.dtype)


@torch.enable_grad()
def fit_mask(mask: Tensor, d: int, generator: torch.Generator, steps: int) -> tuple[Tensor, Tensor]:
    """(x fp32 [n, d], w fp32 [h, d]) with sign(x w^T) = +1 where mask [n, h] and -1 elsewhere: squared hinge, Adam."""
    n, h = mask.shape
    sign = torch.where(mask, 1.0, -1.0)
    x, w = (0.1 * torch.randn(rows, d, generator=generator, device=mask.device) for rows in (n, h))
    x[:, 0] = 1.0  # w[:, 0] starts as each neuron's bias, for its own firing rate
    w[:, 0] = torch.special.ndtri(mask.float().mean(0).clamp(1e-5, 1 - 1e-5))
    x.requires_grad_(), w.requires_grad_()
    optimizer = torch.optim.Adam([x, w], lr=0.02, betas=(0.9, 0.98))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        optimizer.zero_grad()
        (1 - sign * (x @ w.T)).clamp(min=0).square().sum().backward()
        optimizer.step()
    return x.detach(), w.detach()
