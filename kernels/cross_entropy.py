"""Cross-entropy of rows of logits, whose gradient takes their place.

One program a row. It reads the row once for the highest logit and the sum of exponentials together, and again, by then
out of a cache, to overwrite it with its gradient: a read and a write of memory in all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot import AotCase
from kernels.launch import POINTER

_LOSS = {"BLOCK": 8192, "num_warps": 16}  # many threads a row: the rows at work at a time must fit a cache
_SCALE = {"BLOCK": 4096, "num_warps": 8}

LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware has exp2 alone
LOWEST = tl.constexpr(-1e38)  # not -inf, whose difference from itself is NaN


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, VOCAB_SIZE: tl.constexpr, N_VOCAB: tl.constexpr, IGNORED: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """losses[row], and if GRADIENT the row of logits becomes softmax - one-hot."""
    dtype = logits.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCAB_SIZE
    run = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    target = tl.load(targets + row)
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, VOCAB_SIZE, BLOCK):
                tl.store(logits + first + run, 0.0, mask=first + run < VOCAB_SIZE)
        return
    is_id = (target >= 0) & (target < N_VOCAB)
    # Before any warp overwrites it: the reductions below, in which all warps wait for each other, lie between.
    picked = tl.load(logits + target, mask=is_id, other=0.0).to(tl.float32)

    # A thread holds runs of 8 (16 bytes of bf16), with a maximum and a sum per run: the loop needs no other thread.
    # Masks by VOCAB_SIZE leave loads whole, which N_VOCAB, rarely a multiple of 8, would not.
    highest = tl.full((BLOCK // 8,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for first in range(0, N_VOCAB, BLOCK):
        ids = first + run
        x = tl.load(logits + ids, mask=ids < VOCAB_SIZE, other=0.0).to(tl.float32)
        if first + BLOCK > N_VOCAB:
            x = tl.where(ids < N_VOCAB, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, 1))  # drops NaN, which the sum keeps
        total = total * tl.exp2((highest - higher) * LOG2_E) + tl.sum(tl.exp2((x - higher[:, None]) * LOG2_E), 1)
        highest = higher
    top = tl.max(highest, 0)
    log2_total = tl.log2(tl.sum(total * tl.exp2((highest - top) * LOG2_E), 0))
    tl.store(losses + row, tl.where(is_id, log2_total / LOG2_E + (top - picked), float("nan")))

    if GRADIENT:
        LAST: tl.constexpr = (VOCAB_SIZE - 1) // BLOCK * BLOCK
        for back in range(0, VOCAB_SIZE, BLOCK):  # last block first: it is the surest to be in a cache still
            ids = LAST - back + run
            mask = ids < VOCAB_SIZE
            x = tl.load(logits + ids, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            softmax = tl.exp2(tl.fma(x - top, LOG2_E, -log2_total))
            tl.store(logits + ids, softmax.to(dtype), mask=mask, eviction_policy="evict_first")
        tl.debug_barrier()  # other threads may have stored what is corrected here
        tl.store(logits + target, (tl.exp2(tl.fma(picked - top, LOG2_E, -log2_total)) - 1).to(dtype), mask=is_id)
        for first in range(N_VOCAB // BLOCK * BLOCK, VOCAB_SIZE, BLOCK):
            ids = first + run
            tl.store(logits + ids, 0.0, mask=(ids >= N_VOCAB) & (ids < VOCAB_SIZE))


@triton.jit
def cross_entropy_scale_kernel(source, factor, out, size, BLOCK: tl.constexpr):
    """out = source * factor, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < size, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


def cross_entropy(logits: Tensor, targets: Tensor, losses: Tensor, n_vocab: int, ignored: int, gradient: bool) -> None:
    """Fill losses, fp32 [n], in nats; with `gradient`, that of their sum replaces logits [n, vocab_size].

    Ids from n_vocab on have no probability. Rows whose target, int64 [n], is `ignored` have loss and gradient 0; any
    other target that is no id below n_vocab gives NaN.
    """
    n, vocab_size = logits.shape
    if n:
        cross_entropy_kernel[(n,)](
            logits, targets.contiguous(), losses, VOCAB_SIZE=vocab_size, N_VOCAB=n_vocab, IGNORED=ignored,
            GRADIENT=gradient, **_LOSS,
        )  # fmt: skip


def scaled(source: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """source * factor in `dtype`, for a dense source of any shape and a factor, fp32 [], on the device."""
    out = torch.empty_like(source, dtype=dtype)
    size = source.numel()
    if size:
        cross_entropy_scale_kernel[(triton.cdiv(size, _SCALE["BLOCK"]),)](source, factor, out, size, **_SCALE)
    return out


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    constexprs = {"VOCAB_SIZE": 50304, "N_VOCAB": 50257, "IGNORED": -100, "BLOCK": _LOSS["BLOCK"]}
    for dtype, gradient in ((torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)):
        pointers = {"logits": POINTER[dtype], "targets": "*i64", "losses": "*fp32"}
        signature = {name: pointers.get(name, "constexpr") for name in cross_entropy_kernel.arg_names}
        cases.append(
            AotCase(
                f"cross_entropy {dtype} gradient={gradient}",
                cross_entropy_kernel,
                signature,
                constexprs | {"GRADIENT": gradient},
                _LOSS["num_warps"],
                3,
                aligned=tuple(pointers),
            )
        )
    signature = {"source": "*fp32", "factor": "*fp32", "out": "*bf16", "size": "i32", "BLOCK": "constexpr"}
    block, warps, aligned = _SCALE["BLOCK"], _SCALE["num_warps"], ("source", "out", "size")
    cases.append(AotCase("scale", cross_entropy_scale_kernel, signature, {"BLOCK": block}, warps, 3, aligned))
    return cases
