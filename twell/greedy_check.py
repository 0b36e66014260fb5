"""Is the greedy text of the sparse FFN that of the dense one?

Both compute the same function but round its sums differently, so where two tokens are equally probable, to the last
digit of the logits, either may win, and the texts part. That is a tie; any other difference is a fault.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from twell.decoder import Decoder, KVCache
from twell.inference import SLOTS, Engine
from twell.sampling import GREEDY

BF16_DIGITS = 8  # of the significand, the leading one included


class Comparison(NamedTuple):
    """Of one prompt's two continuations. Logits are the dense implementation's where the texts part."""

    n_equal: int  # tokens before the first difference, or all of them
    differs: bool
    chosen: float = math.nan  # logit of the token that the dense text goes on with
    other: float = math.nan  # of the sparse text's

    @property
    def tie(self) -> bool:
        """The two logits are at most one bf16 step apart."""
        return abs(self.chosen - self.other) <= bf16_step(self.chosen)

    def __str__(self) -> str:
        if not self.differs:
            return f"{self.n_equal} tokens, identical"
        kind = "a tie" if self.tie else "NOT A TIE"
        return (
            f"{self.n_equal} tokens identical, then {kind}: logits {self.chosen:.6g} and {self.other:.6g}; "
            f"one bf16 step is {bf16_step(self.chosen):.6g}"
        )


def bf16_step(value: float) -> float:
    """Distance from `value` to the next larger bf16 number, in magnitude."""
    return math.ldexp(1.0, math.frexp(value)[1] - BF16_DIGITS)


def compare_greedy(dense: Engine, sparse: Engine, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Comparison]:
    """Continue `prompts` by `n_tokens` greedily with both engines, and find out where and why the texts part.

    A prompt and its continuation must fit into the rows of the engines.
    """
    texts = [engine.generate(prompts, n_tokens, GREEDY, [0] * len(prompts)) for engine in (dense, sparse)]
    comparisons = []
    for prompt, expected, answer in zip(prompts, *texts):
        same = next((i for i, pair in enumerate(zip(expected, answer)) if pair[0] != pair[1]), n_tokens)
        if same == n_tokens:
            comparisons.append(Comparison(n_tokens, differs=False))
            continue
        logits = logits_after(dense.decoder, prompt, expected[:same])
        comparisons.append(Comparison(same, True, logits[expected[same]].item(), logits[answer[same]].item()))
    return comparisons


def logits_after(decoder: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """fp32 [vocab_size] after the prompt, computed at once, and the answer, token by token."""
    device = decoder.device
    length = -(-(len(prompt) + len(answer)) // SLOTS) * SLOTS
    cache = KVCache(decoder, rows=1, length=length)
    ids = torch.tensor([[*prompt, *answer]], device=device)
    n = torch.tensor([len(prompt)], device=device)
    logits = decoder.prefill(ids[:, : len(prompt)], n, torch.zeros_like(n), cache)
    for i in range(len(prompt), ids.shape[1]):
        logits = decoder.step(ids[:, i], torch.full_like(n, i), cache, length)
    return logits[0].float()
