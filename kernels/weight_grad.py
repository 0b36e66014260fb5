"""Weight gradients of the cold neurons: for each tile of 64, tensor-core products over the tokens that touch it.

    [dgate | dup] [tokens of the tile, 128]^T x[tokens]   ->  rows of dw_gate and dw_up
    a             [tokens of the tile, 64]^T  dy[tokens]  ->  rows of dw_down

x and dy are gathered a block of token rows at a time. The cost follows the union of the tokens of a tile, which is
why the order of the neurons matters: tiles of neurons that fire together, or that both fire rarely, touch few tokens.
A tile that no token touches writes zeros and is done.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.gate import precision
from kernels.launch import POINTER, TILE, capability
from kernels.plan import NeuronTiles


@triton.jit
def weight_grad_kernel(
    blocks,  # [B, M], M = TILE_SIZE * OUTPUTS
    source,  # [n, D]
    tokens,
    offsets,
    order,  # int32, neuron of each cold rank
    out_a,  # [H, D], gradient of the first TILE_SIZE columns of the blocks
    out_b,  # [H, D], of the next; unused with one output
    capacity,
    n_cold,
    D: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    M: tl.constexpr = TILE_SIZE * OUTPUTS
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    tile = tl.program_id(0) // CHUNKS
    d = (tl.program_id(0) % CHUNKS) * BD + tl.arange(0, BD)
    in_row = d < D
    m = tl.arange(0, M)
    end = tl.minimum(tl.load(offsets + tile + 1), capacity)
    acc = tl.zeros((M, BD), tl.float32)
    for s in range(tl.load(offsets + tile), end, BK):
        k = s + tl.arange(0, BK)
        live = k < end
        token = tl.load(tokens + k, mask=live, other=0).to(tl.int64)
        v = tl.load(blocks + k[:, None].to(tl.int64) * M + m[None, :], mask=live[:, None], other=0.0)
        x = tl.load(source + token[:, None] * D + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0)
        acc = tl.dot(tl.trans(v), x, acc, input_precision=PRECISION)
    rank = tile * TILE_SIZE + m % TILE_SIZE
    neuron = tl.load(order + rank, mask=rank < n_cold, other=0).to(tl.int64)
    at = neuron[:, None] * D + d[None, :]
    mask = (rank < n_cold)[:, None] & in_row[None, :]
    first = (m < TILE_SIZE)[:, None]
    tl.store(out_a + at, acc.to(out_a.dtype.element_ty), mask=mask & first)
    if OUTPUTS == 2:
        tl.store(out_b + at, acc.to(out_b.dtype.element_ty), mask=mask & ~first)


def _config(arch: int, dtype: torch.dtype, outputs: int) -> tuple[int, int, int, int]:
    """(BD, BK, num_warps, num_stages) for a compute capability."""
    if arch == 0:
        return 32, 16, 1, 1
    if dtype == torch.float32:
        return 64, 32, 4, 2
    if arch in (80, 90, 100):
        return 128, 64, 8, 5
    return 128, 32, 4, 3


def weight_grad(
    blocks: torch.Tensor,
    source: torch.Tensor,
    tiles: NeuronTiles,
    order: torch.Tensor,
    outputs: list[torch.Tensor],
) -> None:
    """Write the rows `order` (int32, the cold neurons by rank) of one or two `outputs` [h, d].

    blocks [B, 64 * len(outputs)] are the value blocks of `tiles`; source [n, d] is x or dy.
    """
    d = source.shape[1]
    n_cold = order.shape[0]
    if n_cold == 0:
        return
    bd, bk, warps, stages = _config(capability(source.device), source.dtype, len(outputs))
    grid = (triton.cdiv(n_cold, TILE) * triton.cdiv(d, bd),)
    weight_grad_kernel[grid](
        blocks, source, tiles.tokens, tiles.offsets, order, outputs[0], outputs[-1], tiles.tokens.shape[0], n_cold,
        D=d, TILE_SIZE=TILE, OUTPUTS=len(outputs), BD=bd, BK=bk, PRECISION=precision(source.dtype), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    for dtype, outputs, d in ((torch.bfloat16, 2, 2048), (torch.bfloat16, 1, 2048), (torch.float32, 2, 768)):
        bd, bk, warps, stages = _config(arch, dtype, outputs)
        signature = dict.fromkeys(("blocks", "source", "out_a", "out_b"), POINTER[dtype])
        signature |= dict.fromkeys(("tokens", "offsets", "order"), "*i32") | {"capacity": "i32", "n_cold": "i32"}
        constexprs = {"D": d, "TILE_SIZE": TILE, "OUTPUTS": outputs, "BD": bd, "BK": bk, "PRECISION": precision(dtype)}
        cases.append(
            AotCase(
                name=f"weight_grad {POINTER[dtype]} {outputs}",
                kernel=weight_grad_kernel,
                signature={a: signature.get(a, "constexpr") for a in weight_grad_kernel.arg_names},
                constexprs=constexprs,
                num_warps=warps,
                num_stages=stages,
                aligned=("blocks", "source", "out_a", "out_b"),
            )
        )
    return cases
