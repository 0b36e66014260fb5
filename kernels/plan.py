"""Plan: which tokens touch each tile of cold neurons, and where each (tile, token) block of values lies.

    occupied int8 [tiles, n]  ->  tokens int32 [B], offsets int32 [tiles + 1], slot int32 [tiles, n]

tokens[offsets[i] : offsets[i + 1]] are the tokens of tile i, ascending; slot[i, t] is the place of token t in `tokens`
(undefined where the tile is not occupied). The two value blocks that rows.py fills, one row of TILE (or twice as many)
values for each slot, are cleared here, because only this stage knows which part of them is in use.

Two kernels over the same grid (tile, block of tokens): count, then place. A program of the second adds up what comes
before it by itself: the totals of the earlier tiles and the counts of its own tile's earlier blocks. That is a thousand
integers out of L2, cheaper than another launch for a scan.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.order import TILE
from kernels.room import PER
from kernels.summary import Seen, note_room

BLOCK = 1024  # tokens per program


class NeuronTiles(NamedTuple):
    """The tokens of every tile of cold neurons, and their blocks of values."""

    tokens: torch.Tensor  # int32 [B]
    offsets: torch.Tensor  # int32 [tiles + 1]; offsets[tiles] may exceed the capacity B, which is the overflow test
    slot: torch.Tensor  # int32 [tiles, n]
    inner: torch.Tensor  # [B, 2 TILE] gradients of gate | up pre-activations (gated), [B, TILE] of the one (non-gated)
    hidden: torch.Tensor  # [B, TILE] activations


@triton.jit
def plan_count_kernel(occupied, totals, counts, n, B: tl.constexpr):
    block, tile = tl.program_id(0), tl.program_id(1)
    t = block * B + tl.arange(0, B)
    o = tl.load(occupied + tile.to(tl.int64) * n + t, mask=t < n, other=0).to(tl.int32)
    count = tl.sum(o, 0)
    tl.store(counts + tile * tl.num_programs(0) + block, count)
    tl.atomic_add(totals + tile, count, sem="relaxed")


@triton.jit
def _sum_of_first(numbers, length, B: tl.constexpr):
    i = tl.arange(0, B)
    parts = tl.zeros((B,), tl.int32)
    for s in range(0, length, B):
        parts += tl.load(numbers + s + i, mask=s + i < length, other=0)
    return tl.sum(parts, 0)


@triton.jit
def plan_place_kernel(
    occupied, totals, counts, tokens, offsets, slot, inner, hidden, numbers, n, capacity,
    B: tl.constexpr, INNER: tl.constexpr, HIDDEN: tl.constexpr, CLEAR: tl.constexpr,
    PER_TOKENS: tl.constexpr, NOTE: tl.constexpr,
):  # fmt: skip
    block, tile = tl.program_id(0), tl.program_id(1)
    blocks, tiles = tl.num_programs(0), tl.num_programs(1)
    before = _sum_of_first(totals, tile, 1024) + _sum_of_first(counts + tile * blocks, block, 32)
    t = block * B + tl.arange(0, B)
    o = tl.load(occupied + tile.to(tl.int64) * n + t, mask=t < n, other=0).to(tl.int32)
    at = before + tl.cumsum(o, 0) - o
    end = before + tl.sum(o, 0)
    tl.store(slot + tile.to(tl.int64) * n + t, at, mask=o != 0)
    tl.store(tokens + at, t, mask=(o != 0) & (at < capacity))
    if block == 0:
        tl.store(offsets + tile, before)
    if (tile == tiles - 1) & (block == blocks - 1):
        tl.store(offsets + tiles, end)
        if NOTE:
            note_room(numbers, 4, end, capacity, n, PER_TOKENS)
    row = tl.arange(0, CLEAR)
    for s in range(before, tl.minimum(end, capacity), CLEAR):
        live = (s + row[:, None]) < tl.minimum(end, capacity)
        base = (s + row[:, None]).to(tl.int64)
        zeros = tl.zeros((CLEAR, INNER), inner.dtype.element_ty)
        tl.store(inner + base * INNER + tl.arange(0, INNER)[None, :], zeros, mask=live)
        zeros = tl.zeros((CLEAR, HIDDEN), hidden.dtype.element_ty)
        tl.store(hidden + base * HIDDEN + tl.arange(0, HIDDEN)[None, :], zeros, mask=live)


def plan(
    occupied: torch.Tensor, capacity: int, inner: int, hidden: int, dtype: torch.dtype, seen: Seen | None
) -> NeuronTiles:
    """Token lists and cleared value blocks (`inner` and `hidden` wide) of every tile in `occupied`.

    There is room for `capacity` blocks; how many are needed goes to `seen` if given.
    """
    tiles, n = occupied.shape
    device = occupied.device
    blocks = triton.cdiv(n, BLOCK)
    numbers = torch.zeros(tiles * (1 + blocks), dtype=torch.int32, device=device)
    totals, counts = numbers[:tiles], numbers[tiles:]
    result = NeuronTiles(
        tokens=torch.empty(capacity, dtype=torch.int32, device=device),
        offsets=torch.empty(tiles + 1, dtype=torch.int32, device=device),
        slot=torch.empty(tiles, n, dtype=torch.int32, device=device),
        inner=torch.empty(capacity, inner, dtype=dtype, device=device),
        hidden=torch.empty(capacity, hidden, dtype=dtype, device=device),
    )
    if tiles * blocks == 0:
        result.offsets.zero_()
        return result
    plan_count_kernel[(blocks, tiles)](occupied, totals, counts, n, B=BLOCK, num_warps=4)
    plan_place_kernel[(blocks, tiles)](
        occupied, totals, counts, *result, counts if seen is None else seen.numbers, n, capacity, B=BLOCK, INNER=inner,
        HIDDEN=hidden, CLEAR=32, PER_TOKENS=PER, NOTE=seen is not None, num_warps=4,
    )  # fmt: skip
    return result


def aot_cases(arch: int) -> list[AotCase]:
    signature = {
        "occupied": "*i8",
        "totals": "*i32",
        "counts": "*i32",
        "tokens": "*i32",
        "offsets": "*i32",
        "slot": "*i32",
        "inner": "*bf16",
    }
    signature |= {"hidden": "*bf16", "numbers": "*i64", "n": "i32", "capacity": "i32"}
    place = {
        "B": BLOCK,
        "INNER": 2 * TILE,
        "HIDDEN": TILE,
        "CLEAR": 32,
        "PER_TOKENS": PER,
        "NOTE": True,
    }
    cases = [(plan_count_kernel, {"B": BLOCK}), (plan_place_kernel, place)]
    return [
        AotCase(
            name=kernel.__name__,
            kernel=kernel,
            signature={name: signature.get(name, "constexpr") for name in kernel.arg_names},
            constexprs=constexprs,
            num_warps=4,
            num_stages=3,
        )
        for kernel, constexprs in cases
    ]
