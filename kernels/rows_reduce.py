"""Reduction: the partial sums that the segments of long rows leave, added up in their fixed order."""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.compact import SPLIT, PackedRows

REDUCERS = 512  # programs of the reduction for each 512 dimensions


@triton.jit
def rows_reduce_kernel(
    partial, partial_l1, residual, out, l1, count, hot, segment_row, segment_first, needed, segments,
    D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, SPLIT_AT: tl.constexpr, ADD: tl.constexpr,
    RESIDUAL: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    """out[t] (+)= the sum of the partial rows of token t, l1[t] = that of its partial sums, for every long row.

    A program does so for each of its segments that is the first of its row.
    """
    in_use = tl.minimum(tl.load(needed + 1), segments).to(tl.int32)
    for s in range(tl.program_id(0), in_use, tl.num_programs(0)):
        t = tl.load(segment_row + s)
        if tl.load(segment_first + t) == s:
            _reduce_row(
                partial, partial_l1, residual, out, l1, count, hot, t, s, segments, D, BD, P, SPLIT_AT, ADD, RESIDUAL,
                L1,
            )  # fmt: skip


@triton.jit
def _reduce_row(
    partial, partial_l1, residual, out, l1, count, hot, t, s, segments,
    D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, SPLIT_AT: tl.constexpr, ADD: tl.constexpr,
    RESIDUAL: tl.constexpr, L1: tl.constexpr,
):  # fmt: skip
    parts = (tl.load(count + t) - tl.load(hot + t) + SPLIT_AT - 1) // SPLIT_AT
    parts = tl.minimum(parts, segments - s)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    row = t.to(tl.int64) * D + d
    acc = tl.zeros((BD,), tl.float32)
    total = tl.zeros((), tl.float32)
    if ADD:
        acc += tl.load(out + row, mask=d < D, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + row, mask=d < D, other=0.0).to(tl.float32)
    for k in range(0, parts, P):
        i = k + tl.arange(0, P)
        mask = (i < parts)[:, None] & (d < D)[None, :]
        rows = partial + (s + i[:, None]).to(tl.int64) * D + d[None, :]
        acc += tl.sum(tl.load(rows, mask=mask, other=0.0), 0)
        if L1:
            total += tl.sum(tl.load(partial_l1 + s + i, mask=i < parts, other=0.0), 0)
    tl.store(out + row, acc.to(out.dtype.element_ty), mask=d < D)
    if L1:
        tl.store(l1 + t, total, mask=tl.program_id(1) == 0)


def reduce(
    partial: torch.Tensor, out: torch.Tensor, rows: PackedRows, add: bool, partial_l1: torch.Tensor | None = None,
    l1: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> None:  # fmt: skip
    segments, d = partial.shape
    if segments:
        bd = min(512, triton.next_power_of_2(d))
        rows_reduce_kernel[(min(segments, REDUCERS), triton.cdiv(d, bd))](
            partial, partial if l1 is None else partial_l1, out if residual is None else residual, out,
            partial if l1 is None else l1, rows.count, rows.hot, rows.segment_row, rows.segment_first, rows.needed,
            segments, D=d, BD=bd, P=8, SPLIT_AT=SPLIT, ADD=add, RESIDUAL=residual is not None, L1=l1 is not None,
            num_warps=4,
        )  # fmt: skip


def aot_cases(arch: int) -> list[AotCase]:
    indices = ("count", "hot", "segment_row", "segment_first")
    signature = dict.fromkeys(indices, "*i32") | dict.fromkeys(("partial", "partial_l1", "l1"), "*fp32")
    signature |= {"residual": "*bf16", "out": "*bf16", "needed": "*i64", "segments": "i32"}
    values = {"D": 2048, "BD": 512, "P": 8, "SPLIT_AT": SPLIT, "ADD": True, "RESIDUAL": True, "L1": True}
    types = {a: signature.get(a, "constexpr") for a in rows_reduce_kernel.arg_names}
    return [AotCase("rows_reduce", rows_reduce_kernel, types, values, 4, 3, ("residual", "out"))]
