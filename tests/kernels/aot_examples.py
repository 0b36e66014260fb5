"""Kernels with known faults, to show that the ahead-of-time checks find them."""

from types import SimpleNamespace

import triton
import triton.language as tl


@triton.jit
def _product(x, w, out, K: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, 64):
        column = k + tl.arange(0, 64)
        acc = tl.dot(tl.load(x + i[:, None] * K + column), tl.load(w + i[:, None] * K + column).T, acc)
    tl.store(out + i[:, None] * BLOCK + i, acc)


@triton.jit
def _misspelt(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.no_such_function(BLOCK))


def _product_case(name: str, block: int, num_warps: int, num_stages: int) -> SimpleNamespace:
    signature = {"x": "*bf16", "w": "*bf16", "out": "*fp32", "K": "constexpr", "BLOCK": "constexpr"}
    return SimpleNamespace(
        name=name,
        kernel=_product,
        signature=signature,
        constexprs={"K": 4096, "BLOCK": block},
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=("x", "w", "out"),
    )


def aot_cases(arch: int) -> list[SimpleNamespace]:
    misspelt = SimpleNamespace(
        name="misspelt",
        kernel=_misspelt,
        signature={"x": "*fp32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": 32},
        num_warps=1,
        num_stages=1,
        aligned=(),
    )
    return [
        _product_case("sound", 64, 4, 2),
        _product_case("spilling", 128, 1, 2),
        _product_case("too_many_stages", 128, 8, 8),
        misspelt,
    ]
