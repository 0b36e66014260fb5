"""Rows: the FFN at the cold non-zeros of every token, by gathering the weight rows of the neurons that fired.

    forward    u = w_up[j] . x,  a = gate * u,  y += a w_down[j]           one program per token, j over its entries
    backward   da = w_down[j] . dy + l1 sign(a),  dgate = da u,  dup = da gate,  dx += dgate w_gate[j] + dup w_up[j]

The cost is the bytes of the gathered rows, which come out of L2: linear in the number of entries.

Rows with more than SPLIT cold entries are cut in segments that work alone and leave fp32 partial sums; another kernel
adds those in their fixed order, so the result does not depend on which finished first. Segments come first in the
grid: they are the longest pieces of work.

The backward pass also scatters dgate, dup and a into the blocks of plan.py, from which weight_grad.py takes them.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.compact import SPLIT, PackedRows
from kernels.launch import capability
from kernels.order import TILE
from kernels.plan import NeuronTiles


@triton.jit
def _work(start, count, hot, segment_row, segment_first, needed, segments, SPLIT_AT: tl.constexpr):
    """(token, first entry, number of entries, is a segment, has a result, token has no entries) of this program."""
    pid = tl.program_id(0)
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
def _poison(x, t, empty, D: tl.constexpr, DP: tl.constexpr):
    """NaN if an empty row's x is not finite, else 0.

    Infinities can push every pre-activation to minus infinity, so that nothing fires; the dense product is NaN then
    (0 times infinity), and a broken token must not become a silent zero here either.
    """
    d = tl.arange(0, DP)
    return tl.sum(
        tl.load(x + t.to(tl.int64) * D + d, mask=d < tl.where(empty, D, 0), other=0.0).to(tl.float32) * 0.0, 0
    )


@triton.jit
def _write(acc, out, partial, t, changes, is_segment, writes, D: tl.constexpr, DP: tl.constexpr, ADD: tl.constexpr):
    """Store a program's row: a partial sum of a segment, or the row of `out`, to which it adds if ADD."""
    d = tl.arange(0, DP)
    if is_segment:
        tl.store(partial + tl.program_id(0).to(tl.int64) * D + d, acc, mask=d < tl.where(writes, D, 0))
    else:
        at = out + t.to(tl.int64) * D + d
        if ADD:
            mask = d < tl.where(changes, D, 0)
            acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
            tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(at, acc.to(out.dtype.element_ty), mask=d < tl.where(writes, D, 0))


@triton.jit
def rows_forward_kernel(
    x, w_up, w_down, column, value, up, start, count, hot, segment_row, segment_first, needed, counted, y, partial,
    partial_l1, l1, segments,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr, SPLIT_AT: tl.constexpr,
    GATED: tl.constexpr, SAVE: tl.constexpr, ADD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    t, first, length, is_segment, writes, empty = _work(
        start, count, hot, segment_row, segment_first, needed, segments, SPLIT_AT
    )
    d = tl.arange(0, DP)
    in_row = d < D
    if GATED:
        xt = tl.load(x + t.to(tl.int64) * D + d, mask=d < tl.where(length > 0, D, 0), other=0.0).to(tl.float32)
    acc = tl.zeros((DP,), tl.float32)
    total = tl.zeros((), tl.float32)
    for s in tl.range(0, length, J, num_stages=STAGES):
        j = s + tl.arange(0, J)
        live = j < length
        mask = live[:, None] & in_row[None, :]
        col = tl.load(column + first + j, mask=live, other=0).to(tl.int64)
        a = tl.load(value + first + j, mask=live, other=0.0).to(tl.float32)
        wd = tl.load(w_down + col[:, None] * D + d[None, :], mask=mask, other=0.0)
        if GATED:
            wu = tl.load(w_up + col[:, None] * D + d[None, :], mask=mask, other=0.0)
            u = tl.sum(wu.to(tl.float32) * xt[None, :], 1).to(dtype)
            if SAVE:
                tl.store(up + first + j, u, mask=live)
            a = (a * u.to(tl.float32)).to(dtype).to(tl.float32)
        total += tl.sum(tl.abs(a), 0)
        acc += tl.sum(a[:, None] * wd.to(tl.float32), 0)
    if COUNTED:
        total = tl.where(tl.load(counted + t) != 0, total, 0.0)
    # Segments lie in places that may differ from run to run: rows_reduce_kernel adds those of a row in its own order.
    if is_segment:
        tl.store(partial_l1 + tl.program_id(0), total)
    else:
        tl.store(l1 + t, total, mask=writes)
    acc += _poison(x, t, empty, D, DP)
    _write(acc, y, partial, t, (length > 0) | empty, is_segment, writes, D, DP, ADD)


@triton.jit
def rows_backward_kernel(
    x, dy, dl1, w_gate, w_up, w_down, column, value, up, start, count, hot, segment_row, segment_first, needed, counted,
    rank_of, slot, inner, hidden, dx, partial, segments, n, n_hot, blocks,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr, SPLIT_AT: tl.constexpr,
    TILE_SIZE: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    dtype = dx.dtype.element_ty
    t, first, length, is_segment, writes, empty = _work(
        start, count, hot, segment_row, segment_first, needed, segments, SPLIT_AT
    )
    d = tl.arange(0, DP)
    in_row = d < D
    dyt = tl.load(dy + t.to(tl.int64) * D + d, mask=d < tl.where(length > 0, D, 0), other=0.0).to(tl.float32)
    penalty = tl.load(dl1).to(tl.float32)
    if COUNTED:
        penalty = tl.where(tl.load(counted + t) != 0, penalty, 0.0)
    acc = tl.zeros((DP,), tl.float32)
    for s in tl.range(0, length, J, num_stages=STAGES):
        j = s + tl.arange(0, J)
        live = j < length
        mask = live[:, None] & in_row[None, :]
        col = tl.load(column + first + j, mask=live, other=0)
        g = tl.load(value + first + j, mask=live, other=0.0).to(tl.float32)
        rank = tl.load(rank_of + col, mask=live, other=0) - n_hot
        at = tl.load(slot + (rank // TILE_SIZE).to(tl.int64) * n + t, mask=live, other=0)
        fits = live & (at < blocks)
        lane = rank % TILE_SIZE
        row = col.to(tl.int64)[:, None] * D + d[None, :]
        wd = tl.load(w_down + row, mask=mask, other=0.0)
        wu = tl.load(w_up + row, mask=mask, other=0.0)
        da = tl.sum(wd.to(tl.float32) * dyt[None, :], 1)
        if GATED:
            wg = tl.load(w_gate + row, mask=mask, other=0.0)
            u = tl.load(up + first + j, mask=live, other=0.0).to(tl.float32)
            a = (g * u).to(dtype)
            da += penalty * tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))
            dg = (da * u).to(dtype)
            du = (da * g).to(dtype)
            base = inner + at.to(tl.int64) * (2 * TILE_SIZE) + lane
            tl.store(base, dg, mask=fits)
            tl.store(base + TILE_SIZE, du, mask=fits)
            acc += tl.sum(
                dg.to(tl.float32)[:, None] * wg.to(tl.float32) + du.to(tl.float32)[:, None] * wu.to(tl.float32), 0
            )
        else:
            a = g.to(dtype)
            da = tl.where(live, da + penalty + g * 0.0, 0.0).to(dtype)  # a broken activation breaks its token's dx
            tl.store(inner + at.to(tl.int64) * TILE_SIZE + lane, da, mask=fits)
            acc += tl.sum(da.to(tl.float32)[:, None] * wu.to(tl.float32), 0)
        tl.store(hidden + at.to(tl.int64) * TILE_SIZE + lane, a, mask=fits)
    acc += _poison(x, t, empty, D, DP)
    _write(acc, dx, partial, t, (length > 0) | empty, is_segment, writes, D, DP, ADD)


@triton.jit
def rows_reduce_kernel(
    partial, partial_l1, out, l1, count, hot, segment_row, segment_first, needed, segments,
    D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, SPLIT_AT: tl.constexpr, ADD: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    """out[t] (+)= the sum of the partial rows of token t, l1[t] = that of its partial sums, for every long row.

    A program does so for each of its segments that is the first of its row.
    """
    in_use = tl.minimum(tl.load(needed + 1), segments).to(tl.int32)
    for s in range(tl.program_id(0), in_use, tl.num_programs(0)):
        t = tl.load(segment_row + s)
        if tl.load(segment_first + t) == s:
            _reduce_row(partial, partial_l1, out, l1, count, hot, t, s, segments, D, BD, P, SPLIT_AT, ADD, L1)


@triton.jit
def _reduce_row(
    partial, partial_l1, out, l1, count, hot, t, s, segments,
    D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, SPLIT_AT: tl.constexpr, ADD: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    parts = (tl.load(count + t) - tl.load(hot + t) + SPLIT_AT - 1) // SPLIT_AT
    parts = tl.minimum(parts, segments - s)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = out + t.to(tl.int64) * D + d
    acc = tl.zeros((BD,), tl.float32)
    total = tl.zeros((), tl.float32)
    if ADD:
        acc += tl.load(at, mask=d < D, other=0.0).to(tl.float32)
    for k in range(0, parts, P):
        i = k + tl.arange(0, P)
        mask = (i < parts)[:, None] & (d < D)[None, :]
        rows = partial + (s + i[:, None]).to(tl.int64) * D + d[None, :]
        acc += tl.sum(tl.load(rows, mask=mask, other=0.0), 0)
        if L1:
            total += tl.sum(tl.load(partial_l1 + s + i, mask=i < parts, other=0.0), 0)
    tl.store(at, acc.to(out.dtype.element_ty), mask=d < D)
    if L1:
        tl.store(l1 + t, total, mask=tl.program_id(1) == 0)


def _config(arch: int, d: int, backward: bool) -> tuple[int, int, int]:
    """(num_warps, entries per iteration, pipeline stages) for rows of d values."""
    if arch == 0:
        return 1, 8, 1
    padded = triton.next_power_of_2(d)
    if padded <= 1024:
        return 1, 1 if backward else 2, 1
    if padded <= 2048:
        return 4, 1, 1
    return 8, 1, 1 if backward else 3


REDUCERS = 512  # programs of the reduction for each piece of a row


def _reduce(
    partial: torch.Tensor, out: torch.Tensor, rows: PackedRows, add: bool, partial_l1: torch.Tensor | None = None,
    l1: torch.Tensor | None = None,
) -> None:  # fmt: skip
    segments, d = partial.shape
    if segments:
        bd = min(512, triton.next_power_of_2(d))
        rows_reduce_kernel[(min(segments, REDUCERS), triton.cdiv(d, bd))](
            partial, partial if l1 is None else partial_l1, out, partial if l1 is None else l1, rows.count, rows.hot,
            rows.segment_row, rows.segment_first, rows.needed, segments, D=d, BD=bd, P=8, SPLIT_AT=SPLIT, ADD=add,
            L1=l1 is not None, num_warps=4,
        )  # fmt: skip


def forward(
    x: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    rows: PackedRows,
    y: torch.Tensor,
    add: bool,
    counted: torch.Tensor | None,
    l1: torch.Tensor,
) -> None:
    """Compute the cold entries into y [n, d], adding to it if `add`, and fill rows.up if it has room.

    w_up is None for the non-gated FFN, whose activations are the packed values themselves. l1, fp32 [n],
    receives the sum of |a| over the cold entries of each token (0 if it is not counted).
    """
    n, d = x.shape
    if n == 0:
        return
    sums = torch.empty(rows.segments * (d + 1), dtype=torch.float32, device=x.device)
    partial, partial_l1 = sums[: rows.segments * d].view(-1, d), sums[rows.segments * d :]
    warps, j, stages = _config(capability(x.device), d, backward=False)
    gated = w_up is not None
    rows_forward_kernel[(rows.segments + n,)](
        x, w_up if gated else w_down, w_down, rows.column, rows.value, rows.up, rows.start, rows.count, rows.hot,
        rows.segment_row, rows.segment_first, rows.needed, rows.count if counted is None else counted, y, partial,
        partial_l1, l1, rows.segments, D=d, DP=triton.next_power_of_2(d), J=j, STAGES=stages, SPLIT_AT=SPLIT,
        GATED=gated, SAVE=rows.up.shape[0] > 0, ADD=add, COUNTED=counted is not None, num_warps=warps,
    )  # fmt: skip
    _reduce(partial, y, rows, add, partial_l1, l1)


def backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    dl1: torch.Tensor,
    w_gate: torch.Tensor | None,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    rows: PackedRows,
    rank_of: torch.Tensor,
    n_hot: int,
    tiles: NeuronTiles,
    dx: torch.Tensor,
    add: bool,
    counted: torch.Tensor | None,
) -> None:
    """Compute dx [n, d] of the cold entries (adding to it if `add`) and fill the blocks of `tiles`.

    dl1 is the gradient of the summed L1 term, an fp32 scalar on the device. w_gate is None if non-gated.
    """
    n, d = dy.shape
    partial = torch.empty(rows.segments, d, dtype=torch.float32, device=dy.device)
    if n == 0:
        return
    warps, j, stages = _config(capability(x.device), d, backward=True)
    gated = w_gate is not None
    rows_backward_kernel[(rows.segments + n,)](
        x, dy, dl1, w_gate if gated else w_up, w_up, w_down, rows.column, rows.value, rows.up, rows.start, rows.count,
        rows.hot, rows.segment_row, rows.segment_first, rows.needed, rows.count if counted is None else counted,
        rank_of, tiles.slot, tiles.inner, tiles.hidden, dx, partial, rows.segments, n, n_hot, tiles.tokens.shape[0],
        D=d, DP=triton.next_power_of_2(d), J=j, STAGES=stages, SPLIT_AT=SPLIT, TILE_SIZE=TILE, GATED=gated, ADD=add,
        COUNTED=counted is not None, num_warps=warps,
    )  # fmt: skip
    _reduce(partial, dx, rows, add)


def aot_cases(arch: int) -> list[AotCase]:
    indices = ("column", "start", "count", "hot", "segment_row", "segment_first", "rank_of", "slot")
    signature = dict.fromkeys(indices, "*i32") | dict.fromkeys(("segments", "n", "n_hot", "blocks"), "i32")
    signature |= dict.fromkeys(("partial", "partial_l1", "l1", "dl1"), "*fp32") | {"needed": "*i64", "counted": "*i8"}
    cases = []
    for d, dtype, gated in ((2048, "*bf16", True), (4096, "*bf16", True), (768, "*bf16", False), (1024, "*fp32", True)):
        shared = {"D": d, "SPLIT_AT": SPLIT, "ADD": True}
        flags = shared | {"DP": triton.next_power_of_2(d), "GATED": gated, "COUNTED": True}
        for kernel, backward in (
            (rows_forward_kernel, False),
            (rows_backward_kernel, True),
            (rows_reduce_kernel, None),
        ):
            if backward is None:
                values, warps = shared | {"BD": 512, "P": 8, "L1": True}, 4
            else:
                warps, j, stages = _config(arch, d, backward)
                extra = {"TILE_SIZE": TILE} if backward else {"SAVE": True}
                values = flags | extra | {"J": j, "STAGES": stages}
            types = {a: "constexpr" if a in values else signature.get(a, dtype) for a in kernel.arg_names}
            aligned = tuple(a for a, type in types.items() if type == dtype)
            cases.append(AotCase(f"{kernel.__name__} d={d} {dtype}", kernel, types, values, warps, 3, aligned))
    return cases
