"""What an optimizer step does to flat memory: adding up gradients, and AdamW, one pass each.

Both do a few operations a number and are bound by the bytes they move: 10 a parameter and micro-batch to add up bf16
gradients (6 for the first), 30 for AdamW, which also scales the gradients and rounds the weights on the way.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.launch import POINTER

# Four numbers a thread: 16 bytes of fp32. With more, bf16 would be laid out otherwise and pass through shared memory.
_OPTIONS = {"BLOCK": 1024, "num_warps": 8}


@triton.jit
def accumulate_kernel(total, grad, n, OVERWRITE: tl.constexpr, BLOCK: tl.constexpr):
    """total += grad; if OVERWRITE, total = grad."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(grad + i, mask=i < n, other=0.0).to(tl.float32)
    if not OVERWRITE:
        value += tl.load(total + i, mask=i < n, other=0.0)
    tl.store(total + i, value, mask=i < n)


@triton.jit
def adamw_kernel(
    master, grad, compute, exp_avg, exp_avg_sq, factor, corrections, n, lr, decay, rest1, beta2, rest2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of all; rest1 and rest2 are 1 - beta, rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    g = tl.load(grad + i, mask=mask, other=0.0) * tl.load(factor)
    m = tl.load(exp_avg + i, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + i, mask=mask, other=0.0)
    p = tl.load(master + i, mask=mask, other=0.0) * decay
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * (g * g)
    step_size = lr / tl.load(corrections).to(tl.float32)
    root = tl.sqrt(tl.load(corrections + 1).to(tl.float32))
    p -= step_size * (m / (tl.sqrt(v) / root + eps))
    tl.store(exp_avg + i, m, mask=mask)
    tl.store(exp_avg_sq + i, v, mask=mask)
    tl.store(master + i, p, mask=mask)
    tl.store(compute + i, p.to(compute.dtype.element_ty), mask=mask)


def accumulate(total: torch.Tensor, grad: torch.Tensor, overwrite: bool = False) -> None:
    """Add `grad`, of any supported dtype, to the contiguous fp32 `total` of its shape; `overwrite`: copy it there."""
    n = total.numel()
    accumulate_kernel[(triton.cdiv(n, _OPTIONS["BLOCK"]),)](
        total, grad.contiguous(), n, OVERWRITE=overwrite, **_OPTIONS
    )


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    compute: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    factor: torch.Tensor,
    corrections: torch.Tensor,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """A step of torch.optim.AdamW (arXiv 1711.05101) along `factor * grad`, in place; `compute` is `master`, rounded.

    Args:
        master, grad, exp_avg, exp_avg_sq: fp32 [n].
        compute: [n], in any supported dtype.
        factor: fp32 [], on the device.
        corrections: float64 [2], on the device: 1 - beta1^t and 1 - beta2^t in step t.
    """
    n = master.numel()
    adamw_kernel[(triton.cdiv(n, _OPTIONS["BLOCK"]),)](
        master, grad, compute, exp_avg, exp_avg_sq, factor, corrections, n, lr, 1 - lr * weight_decay, 1 - betas[0],
        betas[1], 1 - betas[1], eps, **_OPTIONS,
    )  # fmt: skip


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    kinds = dict.fromkeys(("master", "total", "exp_avg", "exp_avg_sq", "factor"), "*fp32")
    kinds |= {"corrections": "*fp64", "compute": POINTER[torch.bfloat16], "n": "i32"}
    for kernel, grad, overwrite in (
        (accumulate_kernel, torch.bfloat16, False),
        (accumulate_kernel, torch.bfloat16, True),
        (adamw_kernel, torch.float32, False),
    ):
        constexprs = {"OVERWRITE": overwrite, "BLOCK": _OPTIONS["BLOCK"]}
        constexprs = {a: constexprs[a] for a in kernel.arg_names if a in constexprs}
        of = kinds | {"grad": POINTER[grad]} | dict.fromkeys(constexprs, "constexpr")
        signature = {a: of.get(a, "fp32") for a in kernel.arg_names}
        aligned = tuple(a for a, kind in signature.items() if kind[0] == "*" or a == "n")
        name = f"{kernel.__name__} overwrite={overwrite}"
        cases.append(AotCase(name, kernel, signature, constexprs, _OPTIONS["num_warps"], 3, aligned))
    return cases
