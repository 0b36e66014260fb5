"""Weight gradients of the cold neurons: for each tile of 16, tensor-core products over the tokens that touch it.

    x[tokens]^T   [dgate | dup] [tokens of the tile, 32]  ->  rows of dw_gate and dw_up, transposed
    dy[tokens]^T  a             [tokens of the tile, 16]  ->  rows of dw_down, transposed

A token fires one or two neurons of a tile it touches, so these products are mostly zeros and small tiles waste less.
They are transposed because the tensor cores take any multiple of 8 columns, but 64 rows at a time.

x and dy are gathered a block of token rows at a time. The cost follows the union of the tokens of a tile, which is
why the order of the neurons matters: tiles of neurons that fire together, or that both fire rarely, touch few tokens.
A tile that no token touches writes zeros and is done.

Rows of x and dy are wanted by many tiles, blocks of values by every piece of d. So programs go through a group of tiles
for one piece of d before they go on to the next piece: that piece of x and dy, a few MB, stays in the L2 cache for all
tiles of the group, and the group is as large as leaves its values in the cache from one piece to the next.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.gate import precision
from kernels.launch import POINTER, capability, l2_bytes
from kernels.order import TILE
from kernels.plan import NeuronTiles


@triton.jit
def _product(
    blocks, source, tokens, begin, end, d, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """source[tokens[begin:end]]^T blocks[begin:end], fp32 [BD, M]."""
    acc = tl.zeros((BD, M), tl.float32)
    m = tl.arange(0, M)
    for s in range(begin, end, BK):
        k = s + tl.arange(0, BK)
        live = k < end
        token = tl.load(tokens + k, mask=live, other=0).to(tl.int64)
        v = tl.load(blocks + k[:, None].to(tl.int64) * M + m[None, :], mask=live[:, None], other=0.0)
        x = tl.load(source + token[:, None] * D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(tl.trans(x), v, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _store(acc, out, order, n_cold, d, first, D: tl.constexpr, M: tl.constexpr, TILE_SIZE: tl.constexpr):
    """Columns first .. first + TILE_SIZE of acc [BD, M] -> rows order[0 .. TILE_SIZE] of `out`."""
    rank = tl.arange(0, M) - first
    live = (rank >= 0) & (rank < tl.minimum(n_cold, TILE_SIZE))
    neuron = tl.load(order + rank, mask=live, other=0).to(tl.int64)
    at = neuron[:, None] * D + d[None, :]
    tl.store(out + at, tl.trans(acc).to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["group"])
def weight_grad_kernel(
    inner, hidden, x, dy, tokens, offsets, order, dw_gate, dw_up, dw_down, capacity, n_cold, group,
    D: tl.constexpr, TILE_SIZE: tl.constexpr, GATED: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = 2 * TILE_SIZE if GATED else TILE_SIZE
    CHUNKS: tl.constexpr = (D + BD - 1) // BD
    first = tl.program_id(0) // (group * 2 * CHUNKS) * group
    in_group = tl.minimum(group, (n_cold + TILE_SIZE - 1) // TILE_SIZE - first)
    place = tl.program_id(0) - first * 2 * CHUNKS
    tile = first + place % in_group
    piece = place // in_group  # of d, first of x, then of dy
    d = piece // 2 * BD + tl.arange(0, BD)
    begin = tl.load(offsets + tile)
    end = tl.minimum(tl.load(offsets + tile + 1), capacity)
    order += tile * TILE_SIZE
    n_cold -= tile * TILE_SIZE
    if piece % 2 == 0:
        inner_acc = _product(inner, x, tokens, begin, end, d, D, M, BD, BK, PRECISION)
        if GATED:
            _store(inner_acc, dw_gate, order, n_cold, d, 0, D, M, TILE_SIZE)
            _store(inner_acc, dw_up, order, n_cold, d, TILE_SIZE, D, M, TILE_SIZE)
        else:
            _store(inner_acc, dw_up, order, n_cold, d, 0, D, M, TILE_SIZE)
    else:
        hidden_acc = _product(hidden, dy, tokens, begin, end, d, D, TILE_SIZE, BD, BK, PRECISION)
        _store(hidden_acc, dw_down, order, n_cold, d, 0, D, TILE_SIZE, TILE_SIZE)


def _config(arch: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(BD, BK, num_warps, num_stages) for a compute capability."""
    if arch == 0:
        return 32, 16, 1, 1
    if dtype == torch.float32:
        return 64, 32, 8, 2
    if arch in (80, 90, 100):
        return 128, 32, 4, 6
    return 128, 32, 4, 3


def weight_grad(
    tiles: NeuronTiles,
    x: torch.Tensor,
    dy: torch.Tensor,
    order: torch.Tensor,
    dw_gate: torch.Tensor | None,
    dw_up: torch.Tensor,
    dw_down: torch.Tensor,
) -> None:
    """Write rows `order` (int32, the cold neurons by rank) of dw_gate (None if non-gated), dw_up and dw_down [h, d]."""
    d = x.shape[1]
    n_cold = order.shape[0]
    if n_cold == 0:
        return
    bd, bk, warps, stages = _config(capability(x.device), x.dtype)
    n_tiles = triton.cdiv(n_cold, TILE)
    values = tiles.inner.nbytes + tiles.hidden.nbytes
    group = max(1, min(n_tiles, n_tiles * l2_bytes(x.device) // (4 * values + 1)))
    grid = (n_tiles * triton.cdiv(d, bd) * 2,)
    weight_grad_kernel[grid](
        tiles.inner, tiles.hidden, x, dy, tiles.tokens, tiles.offsets, order, dw_up if dw_gate is None else dw_gate,
        dw_up, dw_down, tiles.tokens.shape[0], n_cold, group, D=d, TILE_SIZE=TILE, GATED=dw_gate is not None, BD=bd,
        BK=bk, PRECISION=precision(x.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    for dtype, gated, d in ((torch.bfloat16, True, 2048), (torch.bfloat16, False, 2048), (torch.float32, True, 768)):
        bd, bk, warps, stages = _config(arch, dtype)
        signature = dict.fromkeys(("tokens", "offsets", "order"), "*i32") | {
            "capacity": "i32",
            "n_cold": "i32",
            "group": "i32",
        }
        constexprs = {"D": d, "TILE_SIZE": TILE, "GATED": gated, "BD": bd, "BK": bk, "PRECISION": precision(dtype)}
        types = {
            a: "constexpr" if a in constexprs else signature.get(a, POINTER[dtype])
            for a in weight_grad_kernel.arg_names
        }
        aligned = tuple(a for a, type in types.items() if type == POINTER[dtype])
        name = f"weight_grad {POINTER[dtype]} gated={gated}"
        cases.append(AotCase(name, weight_grad_kernel, types, constexprs, warps, stages, aligned))
    return cases
