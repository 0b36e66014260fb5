"""How fast rows of a weight matrix can be read at all: the ceiling that the row products are held against."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot import AotCase

ROWS = 4  # read together, enough to keep loads in flight


@triton.jit
def read_rows_kernel(table, rows, sums, D: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, R: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for s in range(0, PER_TOKEN, R):
        row = tl.load(rows + token * PER_TOKEN + s + tl.arange(0, R))
        values = tl.load(table + row[:, None].to(tl.int64) * D + column, mask=column < D, other=0.0)  # [R, BLOCK]
        acc += tl.sum(values.to(tl.float32), 0)
    tl.store(sums + token, tl.sum(acc, 0))


def read_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Sum of all elements of the rows that each token names, fp32 [n]; table [h, d], rows int32 [n, k], 4 | k."""
    n, per_token = rows.shape
    d = table.shape[1]
    sums = torch.empty(n, dtype=torch.float32, device=table.device)
    read_rows_kernel[(n,)](
        table, rows, sums, D=d, BLOCK=triton.next_power_of_2(d), PER_TOKEN=per_token, R=ROWS, num_warps=4
    )
    return sums


def aot_cases(arch: int) -> list[AotCase]:
    constexprs = {"D": 2048, "BLOCK": 2048, "PER_TOKEN": 64, "R": ROWS}
    signature = {"table": "*bf16", "rows": "*i32", "sums": "*fp32"} | dict.fromkeys(constexprs, "constexpr")
    return [AotCase("read_rows", read_rows_kernel, signature, constexprs, 4, 3, ("table", "rows", "sums"))]
