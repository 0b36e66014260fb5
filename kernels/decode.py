"""Decode: the FFN of a few tokens, forward only, reading of w_up and w_down only the rows of neurons that fire.

With few tokens the FFN is as slow as its weights are large: nothing is computed for long. w_gate must be read whole, to
see which neurons fire; of the other two matrices the rows of neurons that fire on some token are enough. Two kernels:

    gate    one program per BH neurons: z = x w_gate^T; for those that fire, u = x w_up^T and a = relu(z) u.
            Lists them, ascending, in the program's own BH places: column, and a for all tokens; and their number.
    down    one program per (BD columns of y, split of the list): partial sums of a w_down, in fp32.

A place in the whole list is found by counting in the programs' numbers, so nothing is compacted in between. Shapes and
grids depend on no data, nothing waits for the device, and sums have a fixed order: a CUDA graph can capture this, and
the results do not change from run to run. The last sum, over the splits, is left to torch, whose compiler joins it with
what follows.

Exact, like everything here: a neuron that fires for one token of the batch is computed for all, with zeros where it
does not fire, as the dense product does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot import AotCase
from kernels.gate import precision
from kernels.launch import INTERPRETED, POINTER, capability

MAX_TOKENS = 64  # more are no longer few: their products are bound by arithmetic
SPLITS, BD = 8, 128  # of the list of firing neurons, and columns of y: at d = 2048 that makes 128 programs
GROUP = 16  # programs of the gate kernel whose numbers the search for a place looks at together


@triton.jit
def _product(x, w, j, live, n, D: tl.constexpr, T: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
             STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x w[j]^T, fp32 [T, BH]; rows of w that are not live are not read and count as zero."""
    t = tl.arange(0, T)
    k = tl.arange(0, BK)
    acc = tl.zeros((T, BH), tl.float32)
    for first in tl.range(0, D, BK, num_stages=STAGES):
        in_row = (first + k < D)[None, :]
        a = tl.load(x + t[:, None] * D + first + k[None, :], mask=(t < n)[:, None] & in_row, other=0.0)
        b = tl.load(w + j.to(tl.int64)[:, None] * D + first + k[None, :], mask=live[:, None] & in_row, other=0.0)
        if INTERPRETED:  # whose bf16 is wrong
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def decode_gate_kernel(
    x, w_gate, w_up, column, value, count, n,
    H: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dtype = x.dtype.element_ty
    block = tl.program_id(0)
    j = block * BH + tl.arange(0, BH)
    t = tl.arange(0, T)
    z = _product(x, w_gate, j, j < H, n, D, T, BH, BK, STAGES, PRECISION)  # [T, BH]
    g = z.to(dtype).to(tl.float32)
    fires = (g > 0) | (g != g)
    g = tl.where(fires, g, 0.0)
    if GATED:  # u may be infinite, too: zero times infinity is for the product below to decide
        fires = fires | (z == float("-inf"))
    fires = fires & (t < n)[:, None] & (j < H)[None, :]
    listed = tl.max(fires.to(tl.int32), 0)  # [BH]
    number = tl.sum(listed[None, :], 1).item()
    tl.store(count + block, number)
    if number > 0:
        a = g
        if GATED:
            u = _product(x, w_up, j, listed != 0, n, D, T, BH, BK, STAGES, PRECISION)
            a = g * u.to(dtype).to(tl.float32)
        place = block * BH + tl.cumsum(listed, 0) - listed
        tl.store(column + place, j, mask=listed != 0)
        at = value + place[None, :] * T + t[:, None]
        tl.store(at, a.to(dtype), mask=(listed != 0)[None, :])


@triton.jit
def _entry(count, p, group_end, H: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr):
    """Where places p [n] of the whole list lie in the programs' own lists; anywhere for those beyond its end.

    First the group of blocks, whose last places are group_end, then the block in it: [n, GROUP] comparisons each.
    """
    past = group_end[None, :] <= p[:, None]  # [n, groups]
    start = tl.max(tl.where(past, group_end[None, :], 0), 1)
    first = tl.sum(past.to(tl.int32), 1) * GROUP
    block = first[:, None] + tl.arange(0, GROUP)[None, :]
    end = start[:, None] + tl.cumsum(tl.load(count + block, mask=block < (H + BH - 1) // BH, other=0), 1)
    past = end <= p[:, None]
    start = tl.maximum(start, tl.max(tl.where(past, end, 0), 1))
    return (first + tl.sum(past.to(tl.int32), 1)) * BH + p - start


@triton.jit
def decode_down_kernel(
    column, value, count, w_down, partial, n,
    H: tl.constexpr, D: tl.constexpr, T: tl.constexpr, BH: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    BJ: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    block = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    numbers = tl.load(count + block, mask=block < (H + BH - 1) // BH, other=0)
    end = tl.cumsum(tl.sum(numbers, 1), 0)  # [GROUPS], places up to and including each group of blocks
    total = tl.max(end, 0)
    t = tl.arange(0, T)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    acc = tl.zeros((T, BD), tl.float32)
    for first in tl.range(split * BJ, total, splits * BJ, num_stages=STAGES):
        p = first + tl.arange(0, BJ)
        live = p < total
        entry = _entry(count, p, end, H, BH, GROUP)
        row = tl.load(column + entry, mask=live, other=0).to(tl.int64)
        a = tl.load(value + entry[None, :] * T + t[:, None], mask=live[None, :], other=0.0)
        w = tl.load(w_down + row[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        if INTERPRETED:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    at = partial + (split * n + t[:, None]).to(tl.int64) * D + d[None, :]
    tl.store(at, acc, mask=(t < n)[:, None] & (d < D)[None, :])


def _config(arch: int, dtype: torch.dtype, tokens: int) -> tuple[int, int, int]:
    """(BH, BK, pipeline stages) of the gate kernel for `tokens` rows, a power of two from 16."""
    if arch == 0:
        return 32, 32, 1
    if dtype == torch.float32:
        return 32, 32, 3
    # Every program reads all of x out of L2, so many tokens want few programs; and bytes in flight fill the bandwidth.
    bh = 64 if tokens == 64 else 32
    if arch in (80, 90, 100):  # 160 KB of shared memory and more
        return bh, 256 if tokens == 16 else 128, 4
    return bh, 64 if tokens == 64 else 128, 3


def _rows(dtype: torch.dtype) -> int:
    """Rows of w_down in one step of the down kernel."""
    return 16 if dtype == torch.float32 else 32


def _groups(h: int, bh: int) -> int:
    return triton.next_power_of_2(triton.cdiv(h, bh * GROUP))


def decode_partial(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Tensor:
    """fp32 [SPLITS, n, d], whose sum over the splits is y; contiguous x [n, d] with n from 1 to MAX_TOKENS."""
    (n, d), h = x.shape, w_up.shape[0]
    tokens = max(16, triton.next_power_of_2(n))
    bh, bk, stages = _config(capability(x.device), x.dtype, tokens)
    blocks = triton.cdiv(h, bh)
    column = torch.empty(blocks * bh, dtype=torch.int32, device=x.device)
    value = torch.empty(blocks * bh, tokens, dtype=x.dtype, device=x.device)
    count = torch.empty(blocks, dtype=torch.int32, device=x.device)
    partial = torch.empty(SPLITS, n, d, dtype=torch.float32, device=x.device)
    gated = w_gate is not None
    decode_gate_kernel[(blocks,)](
        x, w_gate if gated else w_up, w_up, column, value, count, n, H=h, D=d, T=tokens, BH=bh, BK=bk, STAGES=stages,
        GATED=gated, PRECISION=precision(x.dtype), num_warps=4,
    )  # fmt: skip
    decode_down_kernel[(triton.cdiv(d, BD), SPLITS)](
        column, value, count, w_down, partial, n, H=h, D=d, T=tokens, BH=bh, GROUPS=_groups(h, bh), GROUP=GROUP,
        BJ=_rows(x.dtype), BD=BD, STAGES=2, PRECISION=precision(x.dtype), num_warps=4,
    )  # fmt: skip
    return partial


_operator = torch.library.custom_op("twell::decode_ffn", decode_partial, mutates_args=())


@_operator.register_fake
def _(x, w_gate, w_up, w_down):
    return x.new_empty((SPLITS, *x.shape), dtype=torch.float32)


def decode_ffn(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Tensor:
    """y [..., d] of `kernels.sparse_ffn` for 1 to MAX_TOKENS tokens; no gradients.

    x [..., d]; w_gate [h, d], or None for the non-gated FFN; w_up, w_down [h, d], row j is neuron j; all of one dtype,
    bf16, fp16 or fp32, on a device where `kernels.ops.unsupported` finds no reason against the kernels. Traceable by
    torch.compile(fullgraph=True); can be captured in a CUDA graph after one call outside of it.
    Raises ValueError for another number of tokens or weights of other shapes.
    """
    d, shape = x.shape[-1], w_up.shape
    n = x.numel() // d
    if not 1 <= n <= MAX_TOKENS:
        raise ValueError(f"decode_ffn takes 1 to {MAX_TOKENS} tokens, not {n}: use sparse_ffn")
    if shape[1] != d or w_down.shape != shape or (w_gate is not None and w_gate.shape != shape):
        gate = None if w_gate is None else tuple(w_gate.shape)
        raise ValueError(f"w_gate {gate}, w_up {tuple(shape)} and w_down {tuple(w_down.shape)} must all be (h, {d})")
    weights = [None if w is None else w.contiguous() for w in (w_gate, w_up, w_down)]
    run = _operator if torch.compiler.is_compiling() else decode_partial
    return run(x.reshape(n, d).contiguous(), *weights).sum(0).to(x.dtype).view(x.shape)


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    shapes = (
        (torch.bfloat16, 16, 2048, 5632, True), (torch.bfloat16, 64, 2048, 5632, True),
        (torch.bfloat16, 64, 4096, 14336, True), (torch.float16, 32, 768, 2048, False),
        (torch.float32, 16, 768, 2048, True), (torch.float32, 64, 768, 2048, True),
    )  # fmt: skip
    for dtype, tokens, d, h, gated in shapes:
        bh, bk, stages = _config(arch, dtype, tokens)
        shared = {"H": h, "D": d, "T": tokens, "BH": bh, "PRECISION": precision(dtype)}
        kernels = (
            (decode_gate_kernel, shared | {"BK": bk, "STAGES": stages, "GATED": gated}),
            (
                decode_down_kernel,
                shared | {"GROUPS": _groups(h, bh), "GROUP": GROUP, "BJ": _rows(dtype), "BD": BD, "STAGES": 2},
            ),
        )
        for kernel, values in kernels:
            types = {"column": "*i32", "count": "*i32", "partial": "*fp32", "n": "i32"} | dict.fromkeys(
                values, "constexpr"
            )
            signature = {name: types.get(name, POINTER[dtype]) for name in kernel.arg_names}
            aligned = tuple(name for name, type in signature.items() if type.startswith("*"))
            name = f"{kernel.__name__} {POINTER[dtype][1:]} n={tokens} d={d}"
            cases.append(AotCase(name, kernel, signature, values, 4, stages, aligned))
    return cases
