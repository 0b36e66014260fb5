"""Compaction: occupancy words + scratch values -> one packed row of (column, value) entries per token.

    words [n, W], scratch [n, h]  ->  PackedRows: column int32 [E], value [E], start, count, hot int32 [n]

Row t owns entries start[t] .. start[t] + count[t]. The first hot[t] of them belong to hot neurons (the ones that fire
so often that a dense product over them is cheaper than gathers), the rest to cold ones; both parts ascend by column.
One warp handles one token. Rows take their place in the entry buffer with an atomic add, so where a row lies may differ
from run to run; what it holds, and therefore every result, does not.

The same pass, which is the only one that sees every non-zero, also
  - counts how often each neuron fired on counted tokens,
  - marks which (tile of cold neurons, token) pairs are occupied, for the weight gradients,
  - cuts the cold part of long rows in segments of `SPLIT` entries, so that no program waits for one heavy token.

Nothing is ever dropped silently: a row that does not fit is left empty, and `needed` says what would have fitted.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.launch import popcount
from kernels.order import TILE

SPLIT = 64  # cold entries per segment of a long row


class PackedRows(NamedTuple):
    """The non-zeros of one [n, h] activation, and what the later stages need to know about them."""

    needed: torch.Tensor  # int64 [2], entries and segments that a complete packing takes: compare with E and S
    fired: torch.Tensor  # int32 [h], counted tokens on which each neuron fired
    occupied: torch.Tensor  # int8 [cold tiles, n], 1 where a token fired a neuron of the tile
    column: torch.Tensor  # int32 [E]
    value: torch.Tensor  # [E]
    up: torch.Tensor  # [E], x . w_up at every entry, filled by the forward; [0] if nobody will ask for it
    start: torch.Tensor  # int32 [n], first entry of the row
    hot: torch.Tensor  # int32 [n], how many of its entries, from the first, belong to hot neurons
    segment_first: torch.Tensor  # int32 [n], first segment of a long row; undefined for the others
    segment_row: torch.Tensor  # int32 [S], the token of each segment of the long rows
    count: torch.Tensor  # int32 [n], entries of the row

    @property
    def segments(self) -> int:
        return self.segment_row.shape[0]


class RowsShape(NamedTuple):
    """What decides the size of `PackedRows`."""

    n: int
    h: int
    tiles: int  # cold tiles, 0 if nobody asks which are occupied
    entries: int  # capacity E
    segments: int  # capacity S
    save_up: bool

    def bytes(self, dtype: torch.dtype) -> int:
        return sum(_layout(self, dtype)[0])

    def cleared_bytes(self) -> int:
        """How much of the memory, from its start, must be zero before compaction: needed, fired and occupied."""
        return 16 + _aligned(4 * self.h) + self.tiles * self.n

    def carve(self, memory: torch.Tensor, dtype: torch.dtype, count: torch.Tensor) -> PackedRows:
        """PackedRows as views of uint8 `memory` of `bytes(dtype)`: one buffer, which is all that backward keeps."""
        sizes, types = _layout(self, dtype)
        pieces = memory.split_with_sizes(sizes)[::2]  # every other piece is padding
        needed, fired, occupied, *rest = (piece.view(type) for piece, type in zip(pieces, types))
        return PackedRows(needed, fired, occupied.view(self.tiles, self.n), *rest, count)


@functools.lru_cache(maxsize=256)
def _layout(shape: RowsShape, dtype: torch.dtype) -> tuple[list[int], list[torch.dtype]]:
    """(bytes of each field and of the padding after it, type of each field)."""
    i32, n = torch.int32, shape.n
    fields = [
        (torch.int64, 2), (i32, shape.h), (torch.int8, shape.tiles * n), (i32, shape.entries), (dtype, shape.entries),
        (dtype, shape.entries if shape.save_up else 0), (i32, n), (i32, n), (i32, n), (i32, shape.segments),
    ]  # fmt: skip
    sizes = []
    for type, count in fields:
        size = count * type.itemsize
        sizes += [size, _aligned(size) - size]
    return sizes, [type for type, _ in fields]


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


@triton.jit
def reserve_row(
    start, count, hot, segment_row, segment_first, needed, t, total, total_hot, entries, segments,
    SPLIT_AT: tl.constexpr,
):  # fmt: skip
    """Give the row of token t its place, and segments if it is long: (first entry, what its entries stay under)."""
    place = tl.atomic_add(needed, total.to(tl.int64), sem="relaxed")
    limit = tl.where(place + total <= entries, entries, 0)  # a row that does not fit writes nothing
    base = place.to(tl.int32)
    tl.store(start + t, base)
    tl.store(count + t, tl.where(limit > 0, total, 0))
    tl.store(hot + t, tl.where(limit > 0, total_hot, 0))
    if total - total_hot > SPLIT_AT:
        parts = (total - total_hot + SPLIT_AT - 1) // SPLIT_AT
        first = tl.atomic_add(needed + 1, parts.to(tl.int64), sem="relaxed").to(tl.int32)
        tl.store(segment_first + t, first)
        for part in range(0, parts):
            tl.store(segment_row + first + part, t, mask=first + part < segments)
    return base, limit


@triton.jit
def put_entries(
    column, value, rank_of, occupied, fired, t, col, v, slot, live, limit, step, n, n_hot,
    LANES: tl.constexpr, TILE_SIZE: tl.constexpr, MARK: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Store entries (col, v) [LANES] of token t at `slot`; MARK: mark their tiles; STATS: count their neurons."""
    fits = live & (slot < limit)
    tl.store(column + slot, col, mask=fits)
    tl.store(value + slot, v, mask=fits)
    if MARK:
        rank = tl.load(rank_of + col, mask=live, other=0)
        pair = ((rank - n_hot) // TILE_SIZE).to(tl.int64) * n + t
        tl.store(occupied + pair, tl.full((LANES,), 1, tl.int8), mask=live & (rank >= n_hot))
    if STATS:
        tl.atomic_add(fired + col, step, mask=live, sem="relaxed")


@triton.jit
def compact_kernel(
    words,
    scratch,
    occupied_words,  # int16 [n, W], work space
    hot_words,  # int32 [W], which columns are hot
    rank_of,  # int32 [h], place of a neuron in the neuron order
    counted,  # int8 [n], or unused
    column,
    value,
    start,
    count,
    hot,
    segment_row,
    segment_first,
    occupied,
    fired,
    needed,
    n,
    entries,  # capacity E
    segments,  # capacity S
    n_hot,
    H: tl.constexpr,
    W: tl.constexpr,
    W_PADDED: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT_AT: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    COUNTED: tl.constexpr,
    MARK: tl.constexpr,
    STATS: tl.constexpr,
):
    t = tl.program_id(0)
    words += t.to(tl.int64) * W
    occupied_words += t.to(tl.int64) * W
    i = tl.arange(0, W_PADDED)
    row = tl.load(words + i, mask=i < W, other=0)
    total_hot = tl.sum(popcount(row & tl.load(hot_words + i, mask=i < W, other=0)), 0)
    total = tl.sum(popcount(row), 0)
    # At 99 % sparsity most words are empty: list the others, and look only at those.
    listed = (row != 0).to(tl.int32)
    tl.store(occupied_words + tl.cumsum(listed, 0) - listed, i.to(tl.int16), mask=listed != 0)
    n_listed = tl.sum(listed, 0)

    base, limit = reserve_row(
        start, count, hot, segment_row, segment_first, needed, t, total, total_hot, entries, segments, SPLIT_AT
    )
    step = tl.full((), 1, tl.int32)  # what an entry adds to the firing count of its neuron
    if COUNTED:
        step = tl.load(counted + t).to(tl.int32)
    hot_base = base
    cold_base = base + total_hot
    tl.debug_barrier()  # the list of words is read by other threads than wrote it
    for s in range(0, n_listed, LANES):
        j = s + tl.arange(0, LANES)
        at = tl.load(occupied_words + j, mask=j < n_listed, other=0).to(tl.int32)
        word = tl.load(words + at, mask=j < n_listed, other=0)
        hot_word = tl.load(hot_words + at)
        n_hot_here = popcount(word & hot_word)
        n_cold_here = popcount(word & ~hot_word)
        hot_slot = hot_base + tl.cumsum(n_hot_here, 0) - n_hot_here
        cold_slot = cold_base + tl.cumsum(n_cold_here, 0) - n_cold_here
        hot_base += tl.sum(n_hot_here, 0)
        cold_base += tl.sum(n_cold_here, 0)
        while tl.max((word != 0).to(tl.int32), 0) != 0:
            live = word != 0
            lowest = word & (-word)
            col = at * 32 + popcount(lowest - 1)
            is_hot = (hot_word & lowest) != 0
            slot = tl.where(is_hot, hot_slot, cold_slot)
            v = tl.load(scratch + t.to(tl.int64) * H + col, mask=live, other=0.0)
            put_entries(
                column, value, rank_of, occupied, fired, t, col, v, slot, live, limit, step, n, n_hot, LANES, TILE_SIZE,
                MARK, STATS,
            )  # fmt: skip
            hot_slot += is_hot.to(tl.int32)
            cold_slot += 1 - is_hot.to(tl.int32)
            word = word & (word - 1)


def new_rows(shape: RowsShape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, PackedRows]:
    """(memory, rows in it), ready for a compaction kernel to fill."""
    memory = torch.empty(shape.bytes(dtype), dtype=torch.uint8, device=device)
    memory[: shape.cleared_bytes()].zero_()
    return memory, shape.carve(memory, dtype, torch.empty(shape.n, dtype=torch.int32, device=device))


def compact(
    words: torch.Tensor,
    scratch: torch.Tensor,
    hot_words: torch.Tensor,
    rank_of: torch.Tensor,
    n_hot: int,
    shape: RowsShape,
    counted: torch.Tensor | None,
    mark: bool = True,
    stats: bool = True,
) -> tuple[torch.Tensor, PackedRows]:
    """Pack every row of (words, scratch): (the memory of the rows, the rows).

    counted is an int8 [n] mask, or None if every token counts. Without `mark`, `occupied`, which only backward needs,
    stays zero, as `fired` does without `stats`.
    """
    n, h = scratch.shape
    w = words.shape[1]
    device = words.device
    memory, rows = new_rows(shape, scratch.dtype, device)
    occupied_words = torch.empty(n, w, dtype=torch.int16, device=device)
    if n > 0:
        compact_kernel[(n,)](
            words, scratch, occupied_words, hot_words, rank_of, words if counted is None else counted, rows.column,
            rows.value, rows.start, rows.count, rows.hot, rows.segment_row, rows.segment_first, rows.occupied,
            rows.fired, rows.needed, n, shape.entries, shape.segments, n_hot, H=h, W=w,
            W_PADDED=triton.next_power_of_2(w), LANES=32, SPLIT_AT=SPLIT, TILE_SIZE=TILE, COUNTED=counted is not None,
            MARK=mark, STATS=stats, num_warps=1,
        )  # fmt: skip
    return memory, rows


def aot_cases(arch: int) -> list[AotCase]:
    pointers = (
        "words",
        "hot_words",
        "rank_of",
        "column",
        "start",
        "count",
        "hot",
        "segment_row",
        "segment_first",
        "fired",
    )
    signature = dict.fromkeys(pointers, "*i32") | {
        "needed": "*i64",
        "occupied_words": "*i16",
        "scratch": "*bf16",
        "value": "*bf16",
        "counted": "*i8",
        "occupied": "*i8",
        "n": "i32",
        "entries": "i32",
        "segments": "i32",
        "n_hot": "i32",
    }
    constexprs = {
        "H": 5632,
        "W": 176,
        "W_PADDED": 256,
        "LANES": 32,
        "SPLIT_AT": SPLIT,
        "TILE_SIZE": TILE,
        "COUNTED": True,
        "MARK": True,
        "STATS": True,
    }
    signature = {name: signature.get(name, "constexpr") for name in compact_kernel.arg_names}
    return [AotCase("compact", compact_kernel, signature, constexprs, num_warps=1, num_stages=1)]
