"""Hot: the entries of the neurons that fire most, between dense products.

A neuron that fires on more than about 1.5 % of the tokens costs less as one more column of a dense product than as
gathered rows. The first `n_hot` neurons of the order are treated so:

    forward    u = x w_up[hot]^T (dense)     a = gate u at the entries, else 0      y  = a w_down[hot] (dense)
    backward   da = dy w_down[hot]^T         [dgate | dup] at the entries, else 0   dx = [dgate | dup] [w_gate; w_up]

The dense products are torch's; the kernels here pick the entries out of the first and lay them out for the second.
What is kept for backward is still only the packed entries. One program handles one token: it clears its row, then
writes the entries over it.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.compact import PackedRows


@triton.jit
def _clear(row, width, C: tl.constexpr):
    zeros = tl.zeros((C,), row.dtype.element_ty)
    for s in range(0, width, C):
        tl.store(row + s + tl.arange(0, C), zeros, mask=s + tl.arange(0, C) < width)


@triton.jit
def hot_forward_kernel(
    u_hot, column, value, up, start, hot, rank_of, counted, a_hot, l1, n_hot,
    C: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, SAVE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    dtype = a_hot.dtype.element_ty
    t = tl.program_id(0)
    base = t.to(tl.int64) * n_hot
    first = tl.load(start + t)
    length = tl.load(hot + t)
    _clear(a_hot + base, n_hot, C)
    tl.debug_barrier()  # the entries are written over the zeros, by other threads
    total = tl.zeros((), tl.float32)
    for s in range(0, length, B):
        j = s + tl.arange(0, B)
        live = j < length
        rank = tl.load(rank_of + tl.load(column + first + j, mask=live, other=0), mask=live, other=0)
        a = tl.load(value + first + j, mask=live, other=0.0)
        if GATED:
            u = tl.load(u_hot + base + rank, mask=live, other=0.0)
            if SAVE:
                tl.store(up + first + j, u, mask=live)
            a = (a.to(tl.float32) * u.to(tl.float32)).to(dtype)
        tl.store(a_hot + base + rank, a, mask=live)
        total += tl.sum(tl.abs(a.to(tl.float32)), 0)
    if COUNTED:
        total = tl.where(tl.load(counted + t) != 0, total, 0.0)
    tl.store(l1 + t, total)


@triton.jit
def hot_backward_kernel(
    da_hot, dl1, column, value, up, start, hot, rank_of, counted, inner, hidden, n_hot,
    C: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    dtype = hidden.dtype.element_ty
    t = tl.program_id(0)
    base = t.to(tl.int64) * n_hot
    first = tl.load(start + t)
    length = tl.load(hot + t)
    penalty = tl.load(dl1).to(tl.float32)
    if COUNTED:
        penalty = tl.where(tl.load(counted + t) != 0, penalty, 0.0)
    PARTS: tl.constexpr = 2 if GATED else 1
    _clear(inner + base * PARTS, n_hot * PARTS, C)
    _clear(hidden + base, n_hot, C)
    tl.debug_barrier()
    for s in range(0, length, B):
        j = s + tl.arange(0, B)
        live = j < length
        rank = tl.load(rank_of + tl.load(column + first + j, mask=live, other=0), mask=live, other=0)
        g = tl.load(value + first + j, mask=live, other=0.0).to(tl.float32)
        da = tl.load(da_hot + base + rank, mask=live, other=0.0).to(tl.float32)
        if GATED:
            u = tl.load(up + first + j, mask=live, other=0.0).to(tl.float32)
            a = (g * u).to(dtype)
            da += penalty * tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))
            tl.store(inner + base * 2 + rank, (da * u).to(dtype), mask=live)
            tl.store(inner + base * 2 + n_hot + rank, (da * g).to(dtype), mask=live)
        else:
            a = g.to(dtype)
            tl.store(inner + base + rank, (da + penalty + g * 0.0).to(dtype), mask=live)
        tl.store(hidden + base + rank, a, mask=live)


@triton.jit
def hot_copy_kernel(
    w0, w1, w2, packed, order, n_hot, D: tl.constexpr, DP: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Rows order[:n_hot] of up to three matrices [h, D], from or to packed [matrices * n_hot, D]."""
    rank, matrix = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, DP)
    mask = d < D
    inside = packed + (matrix * n_hot + rank).to(tl.int64) * D + d
    outside = tl.load(order + rank).to(tl.int64) * D + d
    if GATHER:
        if matrix == 0:
            row = tl.load(w0 + outside, mask=mask)
        elif matrix == 1:
            row = tl.load(w1 + outside, mask=mask)
        else:
            row = tl.load(w2 + outside, mask=mask)
        tl.store(inside, row, mask=mask)
    else:
        row = tl.load(inside, mask=mask)
        if matrix == 0:
            tl.store(w0 + outside, row, mask=mask)
        elif matrix == 1:
            tl.store(w1 + outside, row, mask=mask)
        else:
            tl.store(w2 + outside, row, mask=mask)


def _copy(matrices: list[torch.Tensor], packed: torch.Tensor, order: torch.Tensor, n_hot: int, gather: bool) -> None:
    d = packed.shape[1]
    w0, w1, w2 = (*matrices, *matrices[-1:] * (3 - len(matrices)))
    hot_copy_kernel[(n_hot, len(matrices))](
        w0, w1, w2, packed, order, n_hot, D=d, DP=triton.next_power_of_2(d), GATHER=gather, num_warps=4
    )


def gather_rows(matrices: list[torch.Tensor], order: torch.Tensor, n_hot: int) -> torch.Tensor:
    """Rows order[:n_hot] of one to three matrices [h, d], one under the other: [len(matrices) * n_hot, d]."""
    packed = matrices[0].new_empty(len(matrices) * n_hot, matrices[0].shape[1])
    _copy(matrices, packed, order, n_hot, gather=True)
    return packed


def scatter_rows(packed: torch.Tensor, matrices: list[torch.Tensor], order: torch.Tensor, n_hot: int) -> None:
    """The inverse: write rows order[:n_hot] of each matrix."""
    _copy(matrices, packed, order, n_hot, gather=False)


def _options(n_hot: int) -> dict[str, int]:
    """One warp a token is enough while the rows are short."""
    return {"C": 512, "B": 64, "num_warps": 1} if n_hot <= 1024 else {"C": 1024, "B": 128, "num_warps": 4}


def forward(
    u_hot: torch.Tensor | None,
    rows: PackedRows,
    rank_of: torch.Tensor,
    n_hot: int,
    counted: torch.Tensor | None,
    l1: torch.Tensor,
) -> torch.Tensor:
    """a_hot [n, n_hot] from u_hot [n, n_hot] (None if non-gated); fills rows.up if it has room.

    l1, fp32 [n], receives the sum of |a| of each token (0 if it is not counted).
    """
    n = rows.start.shape[0]
    a_hot = torch.empty(n, n_hot, dtype=rows.value.dtype, device=rows.value.device)
    if n:
        hot_forward_kernel[(n,)](
            a_hot if u_hot is None else u_hot, rows.column, rows.value, rows.up, rows.start, rows.hot, rank_of,
            rows.count if counted is None else counted, a_hot, l1, n_hot, GATED=u_hot is not None,
            SAVE=rows.up.shape[0] > 0, COUNTED=counted is not None, **_options(n_hot),
        )  # fmt: skip
    return a_hot


def backward(
    da_hot: torch.Tensor,
    dl1: torch.Tensor,
    rows: PackedRows,
    gated: bool,
    rank_of: torch.Tensor,
    n_hot: int,
    counted: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(inner, hidden): [dgate | dup] [n, 2 n_hot] (non-gated: da [n, n_hot]) and a [n, n_hot], zero off the entries."""
    n = rows.start.shape[0]
    new = {"dtype": rows.value.dtype, "device": rows.value.device}
    inner, hidden = torch.empty(n, n_hot * (2 if gated else 1), **new), torch.empty(n, n_hot, **new)
    if n:
        hot_backward_kernel[(n,)](
            da_hot, dl1, rows.column, rows.value, rows.up, rows.start, rows.hot, rank_of,
            rows.count if counted is None else counted, inner, hidden, n_hot, GATED=gated, COUNTED=counted is not None,
            **_options(n_hot),
        )  # fmt: skip
    return inner, hidden


def aot_cases(arch: int) -> list[AotCase]:
    signature = dict.fromkeys(("column", "start", "hot", "rank_of", "order"), "*i32") | {
        "counted": "*i8",
        "n_hot": "i32",
    }
    signature |= dict.fromkeys(("l1", "dl1"), "*fp32")
    options = _options(2048)
    flags = {"C": options["C"], "B": options["B"], "GATED": True, "COUNTED": True}
    cases = [(hot_forward_kernel, flags | {"SAVE": True}), (hot_backward_kernel, flags)]
    cases += [(hot_copy_kernel, {"D": 2048, "DP": 2048, "GATHER": gather}) for gather in (True, False)]
    return [
        AotCase(
            name=f"{kernel.__name__} {values.get('GATHER', '')}",
            kernel=kernel,
            signature={a: "constexpr" if a in values else signature.get(a, "*bf16") for a in kernel.arg_names},
            constexprs=values,
            num_warps=options["num_warps"],
            num_stages=3,
            aligned=("n_hot",),
        )
        for kernel, values in cases
    ]
