"""Sampling: which token comes next, given the logits and one random number per row.

The randomness comes in from outside, one number in [0, 1) per token, drawn by inverting the distribution function. So a
request has its own stream of numbers, whoever shares its batch, on any device, and inside a CUDA graph.
"""

import random
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from twell.arguments import check_values

NOT_FINITE = -1  # in place of a token


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; ConfigError for a value of a wrong type or out of range."""

    temperature: float = 0.8  # 0 = always the most probable token
    top_k: int | None = 50  # among the k most probable tokens; None = all
    top_p: float | None = 0.95  # and among the fewest of these whose probabilities reach p; None = all

    def __post_init__(self):
        t, k, p = self.temperature, self.top_k, self.top_p
        rules = (
            (
                isinstance(t, Real) and 0 <= t <= 1e6,
                "temperature",
                "must be from 0, always the likeliest token, to 1e6",
            ),
            (k is None or (isinstance(k, Integral) and k >= 1), "top_k", "must be a whole number from 1, or null"),
            (p is None or (isinstance(p, Real) and 0 < p <= 1), "top_p", "must be in (0, 1], or null"),
        )
        check_values(self, rules)


GREEDY = Sampling(temperature=0.0, top_k=None, top_p=None)


def uniform_numbers(seed: int) -> random.Random:
    """The stream of random numbers of one request: call its `random()` once per token."""
    return random.Random(str(seed))  # of a number it would drop the sign


def next_token(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Draw one id per row: logits [n, vocab_size], uniform fp64 [n] in [0, 1) -> int64 [n].

    Ids at -inf are never drawn. `top_k` keeps the k most probable ids, then `top_p` the fewest of them, in falling
    order, whose probabilities sum to at least p (arXiv 1904.09751): always at least one. NOT_FINITE where logits are
    NaN or +inf, or all -inf: those of a diverged model. Nothing here waits for the device.
    """
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)  # [n, 1]; NaN where there is one
    if sampling.temperature == 0:
        token = logits.argmax(-1)
    else:
        # From the highest down, and by a divisor whose reciprocal is finite: 0 stays 0, the others may reach -inf.
        scaled = (logits - highest) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
        token = _draw(scaled, uniform, sampling)
    return token.where(highest.squeeze(-1).isfinite(), NOT_FINITE)


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    ids = None
    if sampling.top_k is not None:
        logits, ids = logits.topk(min(sampling.top_k, logits.shape[-1]))
    elif sampling.top_p is not None:
        logits, ids = logits.sort(-1, descending=True)
    p = logits.double().softmax(-1)  # fp64: a sum of 100,000 numbers in fp32 would lose the small ones
    total = p.cumsum(-1)
    allowed = p > 0
    if sampling.top_p is not None:
        allowed &= total - p < sampling.top_p  # p had not been reached before this one
    mass = (p * allowed).sum(-1, keepdim=True)
    # The first allowed place where the sum exceeds the number; if rounding leaves none, the last that is allowed.
    place = torch.arange(p.shape[-1], device=p.device)
    last = place.where(allowed, 0).amax(-1)
    first = place.where(allowed & (total > uniform[:, None] * mass), p.shape[-1]).amin(-1)
    drawn = torch.minimum(first, last)
    return drawn if ids is None else ids.gather(-1, drawn[:, None]).squeeze(-1)
