"""Pieces of rows: what a program of the row kernels works on, and dot products where L2 cannot hold the weights.

A program has one token (or one segment of a long row) and one piece of the d dimensions. All programs of a piece come
before those of the next, so that only the pieces of the weights that are in use compete for the L2 cache. Where the
weights fit there is one piece. Where they do not, no program sees whole rows: this file's kernel leaves one partial sum
of every dot product per piece, and who needs the products adds those up, in their order.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.compact import SPLIT, PackedRows
from kernels.launch import INTERPRET, capability, l2_bytes


@triton.jit
def place_of(programs, PIECES: tl.constexpr):
    """(number of this program within its piece, piece); `programs`: of a piece."""
    pid = tl.program_id(0)
    if PIECES == 1:
        return pid, pid * 0
    else:
        return pid % programs, pid // programs


@triton.jit
def rows_work(pid, start, count, hot, segment_row, segment_first, needed, segments, SPLIT_AT: tl.constexpr):
    """(token, first entry, number of entries, is a segment, has a result, token has no entries) of program `pid` of a
    piece."""
    is_segment = pid < segments
    in_use = pid < tl.minimum(tl.load(needed + 1), segments).to(tl.int32)
    t = tl.where(is_segment, tl.load(segment_row + pid, mask=in_use, other=0), pid - segments)
    part = tl.where(is_segment, pid - tl.load(segment_first + t, mask=in_use, other=0), 0)
    n_hot = tl.load(hot + t)
    cold = tl.load(count + t) - n_hot
    writes = tl.where(is_segment, in_use, cold <= SPLIT_AT)
    length = tl.where(writes, tl.minimum(cold - part * SPLIT_AT, SPLIT_AT), 0)
    return t, tl.load(start + t) + n_hot + part * SPLIT_AT, length, is_segment, writes, (cold == 0) & (n_hot == 0)


@triton.jit
def sum_of_dots(dots, entry, live, entries, PIECES: tl.constexpr):
    """Dot products of entries: the sums of their partial sums, dots fp32 [PIECES, entries]."""
    total = tl.load(dots + entry, mask=live, other=0.0)
    for piece in tl.static_range(1, PIECES):
        total += tl.load(dots + piece * entries.to(tl.int64) + entry, mask=live, other=0.0)
    return total


@triton.jit
def rows_dot_kernel(
    x, w, column, start, count, hot, segment_row, segment_first, needed, dots, segments, programs, entries,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr, SPLIT_AT: tl.constexpr,
):  # fmt: skip
    """dots[piece, entry] = x[t] . w[j] over one piece of the dimensions, for the entries (t, j)."""
    pid, piece = place_of(programs, (D + DP - 1) // DP)
    t, first, length, _, _, _ = rows_work(
        pid, start, count, hot, segment_row, segment_first, needed, segments, SPLIT_AT
    )
    d = piece * DP + tl.arange(0, DP)
    mask = d < tl.where(length > 0, D, 0)
    xt = tl.load(x + t.to(tl.int64) * D + d, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    dots += piece * entries.to(tl.int64)
    for s in tl.range(0, length, J, num_stages=STAGES):
        j = s + tl.arange(0, J)
        live = j < length
        col = tl.load(column + first + j, mask=live, other=0).to(tl.int64)
        row = tl.load(w + col[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        tl.store(dots + first + j, tl.sum(row.to(tl.float32) * xt[None, :], 1), mask=live)


def rows_config(arch: int, d: int, backward: bool, alone: bool = False) -> tuple[int, int, int]:
    """(num_warps, entries per iteration, pipeline stages) for rows of d values; alone: a forward that saves nothing."""
    if arch == 0:
        return 1, 8, 1
    padded = triton.next_power_of_2(d)
    if padded <= 1024:
        return 1, 1 if backward else 2, 1
    if padded <= 2048:
        return (2, 2, 1) if alone else (4, 1, 1)
    return 8, 1, 1 if backward else 3


LEAST_PIECE = 32 if INTERPRET else 256  # dimensions


def piece_of(device: torch.device, d: int, h: int, itemsize: int) -> int:
    """How many dimensions, a power of two, are gathered at a time: all if two matrices [h, d] fit in L2, else so many
    that two pieces of them do."""
    if 2 * h * d * itemsize <= l2_bytes(device):
        return triton.next_power_of_2(d)
    most = l2_bytes(device) // (2 * h * itemsize)
    return max(LEAST_PIECE, 1 << max(0, most.bit_length() - 1))


def partial_dots(x: torch.Tensor, w: torch.Tensor, rows: PackedRows, piece: int) -> torch.Tensor:
    """x[t] . w[j] of the cold entries, a sum per piece of the dimensions: fp32 [pieces, E]."""
    n, d = x.shape
    entries, pieces, programs = rows.column.shape[0], triton.cdiv(d, piece), rows.segments + n
    dots = torch.empty(pieces, entries, dtype=torch.float32, device=x.device)
    warps, j, stages = rows_config(capability(x.device), piece, backward=False)
    rows_dot_kernel[(pieces * programs,)](
        x, w, rows.column, rows.start, rows.count, rows.hot, rows.segment_row, rows.segment_first, rows.needed, dots,
        rows.segments, programs, entries, D=d, DP=piece, J=j, STAGES=stages, SPLIT_AT=SPLIT, num_warps=warps,
    )  # fmt: skip
    return dots


def aot_cases(arch: int) -> list[AotCase]:
    indices = ("column", "start", "count", "hot", "segment_row", "segment_first")
    signature = dict.fromkeys(indices, "*i32") | {"x": "*bf16", "w": "*bf16", "needed": "*i64", "dots": "*fp32"}
    signature |= dict.fromkeys(("segments", "programs", "entries"), "i32")
    warps, j, stages = rows_config(arch, 512, backward=False)
    values = {"D": 4096, "DP": 512, "J": j, "STAGES": stages, "SPLIT_AT": SPLIT}
    types = {a: signature.get(a, "constexpr") for a in rows_dot_kernel.arg_names}
    return [AotCase("rows_dot", rows_dot_kernel, types, values, warps, 3, ("x", "w"))]
