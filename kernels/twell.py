"""TwELL rows: compaction of the gate product's other packed form, the one of arXiv 2603.23198.

    TwELL slots int32 [n, tiles, slots]  ->  PackedRows, as compact.py makes them

Here the values already lie beside their columns, and no scratch matrix is needed. Against that, the epilogue has to
count along every row of a tile, every tile occupies its slots whether used or not, and a tile can run over: a token of
which more than slots - 1 neurons of one tile fire cannot be represented. `Seen` notes that as an overflow, with the
entries of the fullest tile.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.compact import SPLIT, PackedRows, RowsShape, new_rows, put_entries, reserve_row
from kernels.format import TwELL
from kernels.order import TILE
from kernels.summary import Seen


@triton.jit
def twell_compact_kernel(
    packed, hot_words, rank_of, counted, column, value, start, count, hot, segment_row, segment_first, occupied, fired,
    needed, numbers, n, entries, segments, n_hot,
    TILES: tl.constexpr, TILES_PADDED: tl.constexpr, SLOTS: tl.constexpr, SLOTS_PADDED: tl.constexpr,
    SPLIT_AT: tl.constexpr, TILE_SIZE: tl.constexpr, COUNTED: tl.constexpr, MARK: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    packed += t.to(tl.int64) * TILES * SLOTS
    tile = tl.arange(0, TILES_PADDED)
    place = tl.arange(0, SLOTS_PADDED)
    in_tile = tl.load(packed + tile * SLOTS, mask=tile < TILES, other=0)  # [TILES_PADDED]
    fullest = tl.max(in_tile, 0)
    tl.store(numbers + 6, 1, mask=fullest >= SLOTS)
    tl.atomic_max(numbers + 7, fullest.to(tl.int64), mask=fullest >= SLOTS, sem="relaxed")
    stored = (place[None, :] < in_tile[:, None]) & (place[None, :] < SLOTS - 1)
    bits = tl.load(packed + tile[:, None] * SLOTS + 1 + place[None, :], mask=stored, other=0)
    LANES: tl.constexpr = TILES_PADDED * SLOTS_PADDED
    bits, live = tl.reshape(bits, (LANES,)), tl.reshape(stored, (LANES,))
    col = (bits >> 16) & 0xFFFF
    v = (bits & 0xFFFF).to(tl.uint16).to(value.dtype.element_ty, bitcast=True)
    word = tl.load(hot_words + col // 32, mask=live, other=0)
    is_hot = (((word >> (col % 32)) & 1) != 0) & live
    hot_here, live_here = is_hot.to(tl.int32), live.to(tl.int32)
    total_hot, total = tl.sum(hot_here, 0), tl.sum(live_here, 0)
    base, limit = reserve_row(
        start, count, hot, segment_row, segment_first, needed, t, total, total_hot, entries, segments, SPLIT_AT
    )
    step = tl.full((), 1, tl.int32)
    if COUNTED:
        step = tl.load(counted + t).to(tl.int32)
    before_hot = tl.cumsum(hot_here, 0) - hot_here
    before = tl.cumsum(live_here, 0) - live_here
    slot = base + tl.where(is_hot, before_hot, total_hot + before - before_hot)
    put_entries(
        column, value, rank_of, occupied, fired, t, col, v, slot, live, limit, step, n, n_hot, LANES, TILE_SIZE, MARK,
        STATS,
    )  # fmt: skip


def compact_twell(
    twell: TwELL,
    hot_words: torch.Tensor,
    rank_of: torch.Tensor,
    n_hot: int,
    shape: RowsShape,
    counted: torch.Tensor | None,
    seen: Seen,
    mark: bool = True,
    stats: bool = True,
) -> tuple[torch.Tensor, PackedRows]:
    """(memory, rows), as `compact.compact`; a tile that ran over its slots is noted in `seen`."""
    n, tiles, slots = twell.slots.shape
    memory, rows = new_rows(shape, twell.dtype, twell.slots.device)
    if n > 0:
        twell_compact_kernel[(n,)](
            twell.slots, hot_words, rank_of, rows.count if counted is None else counted, rows.column, rows.value,
            rows.start, rows.count, rows.hot, rows.segment_row, rows.segment_first, rows.occupied, rows.fired,
            rows.needed, seen.numbers, n, shape.entries, shape.segments, n_hot, TILES=tiles,
            TILES_PADDED=triton.next_power_of_2(tiles), SLOTS=slots, SLOTS_PADDED=triton.next_power_of_2(slots - 1),
            SPLIT_AT=SPLIT, TILE_SIZE=TILE, COUNTED=counted is not None, MARK=mark,
            STATS=stats, num_warps=4,
        )  # fmt: skip
    return memory, rows


def aot_cases(arch: int) -> list[AotCase]:
    types = {"value": "*bf16", "counted": "*i8", "occupied": "*i8", "needed": "*i64", "numbers": "*i64"}
    types |= dict.fromkeys(("n", "entries", "segments", "n_hot"), "i32")
    constexprs = {
        "TILES": 44,
        "TILES_PADDED": 64,
        "SLOTS": 32,
        "SLOTS_PADDED": 32,
        "SPLIT_AT": SPLIT,
        "TILE_SIZE": TILE,
    }
    constexprs |= dict.fromkeys(("COUNTED", "MARK", "STATS"), True)
    signature = {a: "constexpr" if a in constexprs else types.get(a, "*i32") for a in twell_compact_kernel.arg_names}
    return [AotCase("twell_compact", twell_compact_kernel, signature, constexprs, 4, 1)]
