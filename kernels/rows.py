"""Rows: the FFN at the cold non-zeros of every token, by gathering the weight rows of the neurons that fired.

    forward    u = w_up[j] . x,  a = gate * u,  y += a w_down[j]           one program per token, j over its entries
    backward   da = w_down[j] . dy + l1 sign(a),  dgate = da u,  dup = da gate,  dx += dgate w_gate[j] + dup w_up[j]

The cost is the bytes of the gathered rows, which come out of L2: linear in the number of entries. Weights that L2
cannot hold are gathered in pieces: all tokens for some hundred dimensions, then all tokens for the next, so that the
pieces in use stay in the cache. The dot products come from rows_dot.py then. The tokens' own rows, each used once, are
the first to leave the cache.

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
from kernels.rows_dot import partial_dots, piece_of, place_of, rows_config, rows_work, sum_of_dots
from kernels.rows_reduce import reduce


@triton.jit
def _poison(x, t, empty, d, D: tl.constexpr):
    """NaN if an empty row's x is not finite, else 0.

    Infinities can push every pre-activation to minus infinity, so that nothing fires; the dense product is NaN then
    (0 times infinity), and a broken token must not become a silent zero here either.
    """
    return tl.sum(
        tl.load(x + t.to(tl.int64) * D + d, mask=d < tl.where(empty, D, 0), other=0.0).to(tl.float32) * 0.0, 0
    )


@triton.jit
def _write(
    acc, residual, out, partial, pid, t, d, changes, is_segment, writes,
    D: tl.constexpr, ADD: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store a program's part of a row: a partial sum of a segment, or the row of `out`, to which it adds if ADD; with
    that of `residual` if RESIDUAL."""
    if is_segment:
        tl.store(partial + pid.to(tl.int64) * D + d, acc, mask=d < tl.where(writes, D, 0))
    else:
        row = t.to(tl.int64) * D + d
        mask = d < tl.where(changes if ADD and not RESIDUAL else writes, D, 0)
        if ADD:
            acc += tl.load(out + row, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if RESIDUAL:
            acc += tl.load(residual + row, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(out + row, acc.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def rows_forward_kernel(
    x, w_up, w_down, dots, column, value, up, start, count, hot, segment_row, segment_first, needed, counted, residual,
    y, partial, partial_l1, l1, segments, programs, entries,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr, SPLIT_AT: tl.constexpr,
    PIECES: tl.constexpr, GATED: tl.constexpr, SAVE: tl.constexpr, ADD: tl.constexpr, RESIDUAL: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    dtype = y.dtype.element_ty
    pid, piece = place_of(programs, PIECES)
    t, first, length, is_segment, writes, empty = rows_work(
        pid, start, count, hot, segment_row, segment_first, needed, segments, SPLIT_AT
    )
    d = piece * DP + tl.arange(0, DP)
    in_row = d < D
    if GATED and PIECES == 1:
        xt = tl.load(
            x + t.to(tl.int64) * D + d, mask=d < tl.where(length > 0, D, 0), other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
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
            if PIECES == 1:
                wu = tl.load(w_up + col[:, None] * D + d[None, :], mask=mask, other=0.0)
                u = tl.sum(wu.to(tl.float32) * xt[None, :], 1).to(dtype)
            else:
                u = sum_of_dots(dots, first + j, live, entries, PIECES).to(dtype)
            if SAVE:
                tl.store(up + first + j, u, mask=tl.where(piece == 0, live, False))
            a = (a * u.to(tl.float32)).to(dtype).to(tl.float32)
        total += tl.sum(tl.abs(a), 0)
        acc += tl.sum(a[:, None] * wd.to(tl.float32), 0)
    if COUNTED:
        total = tl.where(tl.load(counted + t) != 0, total, 0.0)
    # Segments lie in places that may differ from run to run: rows_reduce_kernel adds those of a row in its own order.
    if is_segment:
        tl.store(partial_l1 + pid, total, mask=piece == 0)
    else:
        tl.store(l1 + t, total, mask=tl.where(piece == 0, writes, False))
    acc += _poison(x, t, empty, d, D)
    changes = (length > 0) | empty
    _write(acc, residual, y, partial, pid, t, d, changes, is_segment, writes, D, ADD, RESIDUAL)


@triton.jit
def rows_backward_kernel(
    x, dy, dl1, w_gate, w_up, w_down, dots, column, value, up, start, count, hot, segment_row, segment_first, needed,
    counted, rank_of, slot, inner, hidden, dx, partial, segments, programs, entries, n, n_hot, blocks,
    D: tl.constexpr, DP: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr, SPLIT_AT: tl.constexpr,
    TILE_SIZE: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    dtype = dx.dtype.element_ty
    pid, piece = place_of(programs, PIECES)
    t, first, length, is_segment, writes, empty = rows_work(
        pid, start, count, hot, segment_row, segment_first, needed, segments, SPLIT_AT
    )
    d = piece * DP + tl.arange(0, DP)
    in_row = d < D
    if PIECES == 1:
        dyt = tl.load(
            dy + t.to(tl.int64) * D + d, mask=d < tl.where(length > 0, D, 0), other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
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
        fits = tl.where(piece == 0, live & (at < blocks), False)
        lane = rank % TILE_SIZE
        row = col.to(tl.int64)[:, None] * D + d[None, :]
        wu = tl.load(w_up + row, mask=mask, other=0.0)
        if PIECES == 1:
            wd = tl.load(w_down + row, mask=mask, other=0.0)
            da = tl.sum(wd.to(tl.float32) * dyt[None, :], 1)
        else:
            da = sum_of_dots(dots, first + j, live, entries, PIECES)
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
    acc += _poison(x, t, empty, d, D)
    changes = (length > 0) | empty
    _write(acc, dx, dx, partial, pid, t, d, changes, is_segment, writes, D, ADD, False)


def forward(
    x: torch.Tensor,
    w_up: torch.Tensor | None,
    w_down: torch.Tensor,
    rows: PackedRows,
    y: torch.Tensor,
    add: bool,
    counted: torch.Tensor | None,
    l1: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """Compute the cold entries into y [n, d], adding to it if `add`, and fill rows.up if it has room.

    residual [n, d] is added, too: to the fp32 sum, which is then rounded once.

    w_up is None for the non-gated FFN, whose activations are the packed values themselves. l1, fp32 [n],
    receives the sum of |a| over the cold entries of each token (0 if it is not counted).
    """
    n, d = x.shape
    if n == 0:
        return
    sums = torch.empty(rows.segments * (d + 1), dtype=torch.float32, device=x.device)
    partial, partial_l1 = sums[: rows.segments * d].view(-1, d), sums[rows.segments * d :]
    gated = w_up is not None
    piece = piece_of(x.device, d, w_down.shape[0], x.element_size())
    pieces, programs = triton.cdiv(d, piece), rows.segments + n
    dots = partial_dots(x, w_up, rows, piece) if gated and pieces > 1 else sums
    saves = rows.up.shape[0] > 0
    warps, j, stages = rows_config(capability(x.device), piece, backward=False, alone=gated and not saves)
    rows_forward_kernel[(pieces * programs,)](
        x, w_up if gated else w_down, w_down, dots, rows.column, rows.value, rows.up, rows.start, rows.count, rows.hot,
        rows.segment_row, rows.segment_first, rows.needed, rows.count if counted is None else counted,
        y if residual is None else residual, y, partial, partial_l1, l1, rows.segments, programs, rows.column.shape[0],
        D=d, DP=piece, J=j, STAGES=stages, SPLIT_AT=SPLIT, PIECES=pieces, GATED=gated, SAVE=saves, ADD=add,
        RESIDUAL=residual is not None, COUNTED=counted is not None, num_warps=warps,
    )  # fmt: skip
    reduce(partial, y, rows, add, partial_l1, l1, residual)


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
    gated = w_gate is not None
    piece = piece_of(x.device, d, w_down.shape[0], x.element_size())
    pieces, programs = triton.cdiv(d, piece), rows.segments + n
    dots = partial_dots(dy, w_down, rows, piece) if pieces > 1 else partial
    warps, j, stages = rows_config(capability(x.device), piece, backward=True)
    rows_backward_kernel[(pieces * programs,)](
        x, dy, dl1, w_gate if gated else w_up, w_up, w_down, dots, rows.column, rows.value, rows.up, rows.start,
        rows.count, rows.hot, rows.segment_row, rows.segment_first, rows.needed,
        rows.count if counted is None else counted, rank_of, tiles.slot, tiles.inner, tiles.hidden, dx, partial,
        rows.segments, programs, rows.column.shape[0], n, n_hot, tiles.tokens.shape[0], D=d, DP=piece, J=j,
        STAGES=stages, SPLIT_AT=SPLIT, TILE_SIZE=TILE, PIECES=pieces, GATED=gated, ADD=add,
        COUNTED=counted is not None, num_warps=warps,
    )  # fmt: skip
    reduce(partial, dx, rows, add)


def aot_cases(arch: int) -> list[AotCase]:
    indices = ("column", "start", "count", "hot", "segment_row", "segment_first", "rank_of", "slot")
    numbers = ("segments", "programs", "entries", "n", "n_hot", "blocks")
    signature = dict.fromkeys(indices, "*i32") | dict.fromkeys(numbers, "i32")
    signature |= dict.fromkeys(("partial", "partial_l1", "l1", "dl1", "dots"), "*fp32")
    signature |= {"needed": "*i64", "counted": "*i8"}
    cases = []
    for d, piece, dtype, gated in (
        (2048, 2048, "*bf16", True), (4096, 4096, "*bf16", True), (4096, 1024, "*bf16", True),
        (768, 1024, "*bf16", False), (1024, 1024, "*fp32", True),
    ):  # fmt: skip
        flags = {"D": d, "DP": piece, "PIECES": -(-d // piece), "SPLIT_AT": SPLIT, "ADD": True, "GATED": gated}
        for kernel, backward, save in (
            (rows_forward_kernel, False, True), (rows_forward_kernel, False, False), (rows_backward_kernel, True, True),
        ):  # fmt: skip
            warps, j, stages = rows_config(arch, piece, backward, alone=gated and not save)
            extra = {"TILE_SIZE": TILE} if backward else {"SAVE": save, "RESIDUAL": True}
            values = flags | extra | {"COUNTED": True, "J": j, "STAGES": stages}
            types = {a: "constexpr" if a in values else signature.get(a, dtype) for a in kernel.arg_names}
            aligned = tuple(a for a, type in types.items() if type == dtype)
            name = f"{kernel.__name__} d={d} {piece} {dtype} save={save}"
            cases.append(AotCase(name, kernel, types, values, warps, 3, aligned))
    return cases
