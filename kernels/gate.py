"""Gate: relu(x w^T), packed in the epilogue of the matrix product.

    x [n, d], w [h, d]  ->  words int32 [n, ceil(h / 32)], scratch [n, h]

Bit b of word i of a row says that column 32 i + b fired: that the value, rounded to the compute dtype, is above zero.
`scratch` holds the values of the fired columns; everything else in it is undefined, so it is neither cleared nor
written: at 99 % sparsity the epilogue stores almost nothing, and the stage costs what the plain product costs.

A NaN counts as fired. Dropping it (a maximum with zero does) would turn a broken token into a silent zero.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.format import TwELL
from kernels.launch import POINTER, capability, multiprocessors, popcount

GROUP = 16  # row tiles that walk over the columns together, so that both operands stay in L2


@triton.jit
def _pack(acc, scratch, words, row, first, n, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """ReLU, occupancy words and the fired values of one [BM, BN] block whose first column is `first`."""
    W: tl.constexpr = (H + 31) // 32
    column = first + tl.arange(0, BN)
    gate = acc.to(scratch.dtype.element_ty)
    # A NaN row times the zero padding beyond H is NaN as well: the column mask is not only about bounds.
    fired = ((gate > 0) | (gate != gate)) & (column[None, :] < H)
    at = row[:, None].to(tl.int64) * H + column[None, :]
    tl.store(scratch + at, gate, mask=fired & (row[:, None] < n))
    bit = (1 << tl.arange(0, 32)).to(tl.int32)
    packed = tl.where(tl.reshape(fired, (BM, BN // 32, 32)), bit[None, None, :], 0)
    word = first // 32 + tl.arange(0, BN // 32)
    mask = (row[:, None] < n) & (word[None, :] < W)
    tl.store(words + row[:, None].to(tl.int64) * W + word[None, :], tl.sum(packed, 2), mask=mask)


@triton.jit
def _pack_twell(acc, slots, row, first, n, dtype: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, T: tl.constexpr,
                SLOTS: tl.constexpr):  # fmt: skip
    """ReLU and the TwELL slots of one [BM, T] tile: the count, then column << 16 | bits of the value."""
    TILES: tl.constexpr = (H + T - 1) // T
    column = first + tl.arange(0, T)
    gate = acc.to(dtype)
    fired = ((gate > 0) | (gate != gate)) & (column[None, :] < H)
    # A column's place is the number of bits below its own: cheaper in registers than a running sum along the row.
    bit = (1 << tl.arange(0, 32)).to(tl.int32)[None, None, :]
    word = tl.sum(tl.where(tl.reshape(fired, (BM, T // 32, 32)), bit, 0), 2)  # [BM, T / 32]
    in_word = popcount(word)
    before = tl.cumsum(in_word, 1) - in_word
    place = tl.reshape(popcount(word[:, :, None] & (bit - 1)) + before[:, :, None], (BM, T))
    bits = gate.to(tl.uint16, bitcast=True).to(tl.int32) | (column[None, :] << 16)
    at = slots + (row.to(tl.int64) * TILES + first // T) * SLOTS
    in_range = row < tl.where(first < H, n, 0)
    tl.store(at, tl.sum(in_word, 1), mask=in_range)
    tl.store(at[:, None] + 1 + place, bits, mask=fired & (place < SLOTS - 1) & in_range[:, None])


@triton.jit
def gate_kernel(
    x,  # pointer, or TMA descriptor of [BM, BK] blocks
    w,  # pointer, or TMA descriptor of [BN, BK] blocks
    scratch,
    words,
    n,
    H: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    SLOTS: tl.constexpr,  # 0: words and scratch; else `words` holds the TwELL slots, so many a tile
):
    num_m = tl.cdiv(n, BM)
    num_n: tl.constexpr = (H + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        per_group = GROUP_M * num_n
        first = (tile // per_group) * GROUP_M
        rows_in_group = tl.minimum(num_m - first, GROUP_M)
        pm = first + (tile % per_group) % rows_in_group
        pn = (tile % per_group) // rows_in_group
        row = pm * BM + tl.arange(0, BM)
        column = pn * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            if TMA:
                a = x.load([pm * BM, k])
                b = w.load([pn * BN, k])
            else:
                at = k + tl.arange(0, BK)
                live = at[None, :] < D
                a = tl.load(x + row[:, None].to(tl.int64) * D + at[None, :], mask=(row[:, None] < n) & live, other=0.0)
                b = tl.load(w + column[:, None] * D + at[None, :], mask=(column[:, None] < H) & live, other=0.0)
            acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
        # Two halves: fewer registers live at once than with the whole tile, which is worth 10 % of the stage.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        if SLOTS == 0:
            _pack(left, scratch, words, row, pn * BN, n, H, BM, BN // 2)
            _pack(right, scratch, words, row, pn * BN + BN // 2, n, H, BM, BN // 2)
        else:
            dtype: tl.constexpr = scratch.dtype.element_ty
            _pack_twell(left, words, row, pn * BN, n, dtype, H, BM, BN // 2, SLOTS)
            _pack_twell(right, words, row, pn * BN + BN // 2, n, dtype, H, BM, BN // 2, SLOTS)


def _config(arch: int, dtype: torch.dtype, twell: bool = False) -> tuple[int, int, int, int, int, bool]:
    """(BM, BN, BK, num_warps, num_stages, TMA) for a compute capability."""
    if arch == 0:
        return 32, 64, 32, 1, 1, False
    if dtype == torch.float32:
        return 64, 64, 32, 8, 2, False
    if arch in (90, 100):  # counting along the rows of wider tiles runs out of registers
        return (64, 128, 64, 8, 4, True) if twell else (128, 256, 64, 8, 4, True)
    return 128, 128, 32, 8, 4, False


def precision(dtype: torch.dtype) -> str:
    """How a product of fp32 operands is computed: as torch.get_float32_matmul_precision() asks for."""
    return "ieee" if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest" else "tf32"


def gate(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(words int32 [n, ceil(h / 32)], scratch [n, h]) of relu(x w^T); x [n, d] and w [h, d] contiguous."""
    n, h = x.shape[0], w.shape[0]
    words = torch.empty(n, triton.cdiv(h, 32), dtype=torch.int32, device=x.device)
    scratch = torch.empty(n, h, dtype=x.dtype, device=x.device)
    _launch(x, w, scratch, words, slots=0)
    return words, scratch


def gate_twell(x: torch.Tensor, w: torch.Tensor, slots: int = 16) -> TwELL:
    """relu(x w^T) as TwELL, tiles half as wide as a program's; 16-bit dtypes. Mind the result's `overflow`."""
    n, h = x.shape[0], w.shape[0]
    tile = _config(capability(x.device), x.dtype, twell=True)[1] // 2
    packed = torch.empty(n, triton.cdiv(h, tile), slots, dtype=torch.int32, device=x.device)
    result = TwELL(packed, h, tile, x.dtype)
    _launch(x, w, x, packed, slots)
    return result


def _launch(x: torch.Tensor, w: torch.Tensor, scratch: torch.Tensor, words: torch.Tensor, slots: int) -> None:
    n, d = x.shape
    h = w.shape[0]
    bm, bn, bk, warps, stages, tma = _config(capability(x.device), x.dtype, twell=slots > 0)
    # A TMA descriptor needs rows whose length is a multiple of 16 bytes, and at least one row.
    tma = tma and d * x.element_size() % 16 == 0 and n > 0
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x, w = TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(w, [bn, bk])
    grid = (max(1, min(multiprocessors(words.device), triton.cdiv(n, bm) * triton.cdiv(h, bn))),)
    gate_kernel[grid](
        x, w, scratch, words, n, H=h, D=d, BM=bm, BN=bn, BK=bk, GROUP_M=GROUP, TMA=tma,
        PRECISION=precision(scratch.dtype), SLOTS=slots, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    shapes = (
        (torch.bfloat16, 5632, 2048, 0), (torch.float16, 2048, 768, 0), (torch.float32, 2048, 768, 0),
        (torch.bfloat16, 5632, 2048, 16),
    )  # fmt: skip
    for dtype, h, d, slots in shapes:
        bm, bn, bk, warps, stages, tma = _config(arch, dtype, twell=slots > 0)
        element = POINTER[dtype].removeprefix("*")
        operands = [f"tensordesc<{element}[{rows}, {bk}]>" if tma else POINTER[dtype] for rows in (bm, bn)]
        cases.append(
            AotCase(
                name=f"gate {element}{' twell' if slots else ''}",
                kernel=gate_kernel,
                signature={"x": operands[0], "w": operands[1], "scratch": POINTER[dtype], "words": "*i32", "n": "i32"}
                | dict.fromkeys(("H", "D", "BM", "BN", "BK", "GROUP_M", "TMA", "PRECISION", "SLOTS"), "constexpr"),
                constexprs={
                    "H": h,
                    "D": d,
                    "BM": bm,
                    "BN": bn,
                    "BK": bk,
                    "GROUP_M": GROUP,
                    "TMA": tma,
                    "PRECISION": precision(dtype),
                    "SLOTS": slots,
                },
                num_warps=warps,
                num_stages=stages,
                aligned=("scratch", "words") if tma else ("x", "w", "scratch", "words"),
            )
        )
    return cases
