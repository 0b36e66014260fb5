"""Summary: the last kernel of a forward pass adds up the L1 term and notes down what the pass has seen.

What it notes, per layer, steers later steps: how often each neuron fired, and how much room a complete packing takes.
It stays on the device until somebody asks (`kernels.state`), so no step waits for it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.compact import SPLIT
from kernels.room import PER


class Seen(NamedTuple):
    """What a layer has seen since its state was last updated.

    numbers: 0 calls, 1 counted tokens, then the most per PER tokens of 2 entries, 3 segments, 4 blocks, 5 segments if
    no neuron were hot, and 6 whether some pass ran out of room; 7 the entries of the fullest TwELL tile that ran over.
    """

    numbers: torch.Tensor  # int64 [8]
    fired: torch.Tensor  # int32 [h], counted tokens on which each neuron fired


@triton.jit
def note_room(numbers, index: tl.constexpr, needed, capacity, n, PER_TOKENS: tl.constexpr):
    """Keep the most room per PER_TOKENS tokens that any pass needed, and whether one did not get it."""
    per = (needed.to(tl.int64) * PER_TOKENS + n - 1) // n
    tl.store(numbers + index, tl.maximum(tl.load(numbers + index), per))
    tl.store(numbers + 6, tl.maximum(tl.load(numbers + 6), (needed > capacity).to(tl.int64)))


@triton.jit
def summary_kernel(
    l1_parts, l1, count, fired, fired_out, counted, needed, numbers, fired_total, n, n_parts, h, entries, segments,
    B: tl.constexpr, SPLIT_AT: tl.constexpr, PER_TOKENS: tl.constexpr, COUNTED: tl.constexpr, NOTE: tl.constexpr,
    PACKED: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    if NOTE and PACKED:
        note_room(numbers, 2, tl.load(needed), entries, n, PER_TOKENS)
        note_room(numbers, 3, tl.load(needed + 1), segments, n, PER_TOKENS)
    if STATS:
        _statistics(
            l1_parts, l1, count, fired, fired_out, counted, numbers, fired_total, n, n_parts, h, B, SPLIT_AT,
            PER_TOKENS, COUNTED, NOTE, PACKED,
        )  # fmt: skip


@triton.jit
def _statistics(
    l1_parts, l1, count, fired, fired_out, counted, numbers, fired_total, n, n_parts, h,
    B: tl.constexpr, SPLIT_AT: tl.constexpr, PER_TOKENS: tl.constexpr, COUNTED: tl.constexpr, NOTE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for s in range(0, n_parts, B):
        total += tl.load(l1_parts + s + i, mask=s + i < n_parts, other=0.0)
    tl.store(l1, tl.sum(total, 0))
    if PACKED:
        for s in range(0, h, B):
            tl.store(fired_out + s + i, tl.load(fired + s + i, mask=s + i < h, other=0), mask=s + i < h)
    if NOTE:
        tokens = tl.zeros((), tl.int64) + n
        if COUNTED:
            counted_tokens = tl.zeros((B,), tl.int32)
            for s in range(0, n, B):
                counted_tokens += tl.load(counted + s + i, mask=s + i < n, other=0).to(tl.int32)
            tokens = tl.sum(counted_tokens, 0).to(tl.int64)
        tl.store(numbers, tl.load(numbers) + 1)
        tl.store(numbers + 1, tl.load(numbers + 1) + tokens)
        for s in range(0, h, B):
            j = s + i
            seen = tl.load(fired_total + j, mask=j < h, other=0) + tl.load(fired + j, mask=j < h, other=0)
            tl.store(fired_total + j, seen, mask=j < h)
        n_entries = tl.zeros((B,), tl.int64)
        n_segments = tl.zeros((B,), tl.int64)
        for s in range(0, n, B):
            c = tl.load(count + s + i, mask=s + i < n, other=0)
            n_entries += c
            n_segments += tl.where(c > SPLIT_AT, (c + SPLIT_AT - 1) // SPLIT_AT, 0)
        note_room(numbers, 5, tl.sum(n_segments, 0), 1 << 40, n, PER_TOKENS)
        if not PACKED:
            note_room(numbers, 2, tl.sum(n_entries, 0), 1 << 40, n, PER_TOKENS)


def summarize(
    l1_parts: torch.Tensor,
    count: torch.Tensor,
    fired: torch.Tensor,
    counted: torch.Tensor | None,
    seen: Seen | None,
    needed: torch.Tensor | None,
    entries: int = 0,
    segments: int = 0,
    stats: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the L1 term, fp32 scalar, fired [h]), undefined without `stats`; adds to `seen` if given.

    count int32 [n] and fired int32 [h] describe this pass. needed int64 [2], with the capacities `entries` and
    `segments`, comes from compaction, and `fired` is then copied out of its memory; None for a dense pass, whose room
    is derived from `count`.
    """
    n, h = count.shape[0], fired.shape[0]
    packed = needed is not None
    fired_out = torch.empty_like(fired) if packed else fired
    if n == 0:
        return torch.zeros((), dtype=torch.float32, device=fired.device), fired_out.zero_()
    l1 = torch.empty((), dtype=torch.float32, device=fired.device)
    summary_kernel[(1,)](
        l1_parts, l1, count, fired, fired_out, count if counted is None else counted, needed if packed else count,
        fired if seen is None else seen.numbers, fired if seen is None else seen.fired, n, l1_parts.shape[0], h,
        entries, segments, B=8192, SPLIT_AT=SPLIT, PER_TOKENS=PER, COUNTED=counted is not None, NOTE=seen is not None,
        PACKED=packed, STATS=stats, num_warps=16,
    )  # fmt: skip
    return l1, fired_out


def aot_cases(arch: int) -> list[AotCase]:
    signature = dict.fromkeys(("count", "fired", "fired_out", "fired_total"), "*i32") | {
        "l1_parts": "*fp32",
        "l1": "*fp32",
    }
    signature |= {"counted": "*i8", "needed": "*i64", "numbers": "*i64"}
    signature |= dict.fromkeys(("n", "n_parts", "h", "entries", "segments"), "i32")
    constexprs = {"B": 8192, "SPLIT_AT": SPLIT, "PER_TOKENS": PER, "COUNTED": True, "NOTE": True, "STATS": True}
    return [
        AotCase(
            name=f"summary packed={packed}",
            kernel=summary_kernel,
            signature={name: signature.get(name, "constexpr") for name in summary_kernel.arg_names},
            constexprs=constexprs | {"PACKED": packed},
            num_warps=16,
            num_stages=3,
        )
        for packed in (True, False)
    ]
