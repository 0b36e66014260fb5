"""Dense: the same FFN by dense products, for layers too dense for anything else to pay.

The products are torch's; the two kernels here do everything element-wise in one pass each, L1 term, firing statistics
and all, so that a layer that is not sparse (yet) loses nothing against compiled torch code.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.launch import POINTER

_FORWARD = {"BM": 64, "BH": 128, "num_warps": 8}
_BACKWARD = {"BM": 4, "BH": 1024, "num_warps": 8}


@triton.jit
def dense_forward_kernel(
    z, u, a, counted, count, fired, l1, n, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, GATED: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """a = relu(z) * u (non-gated: relu(z)); entries per row into count, per column into fired; sum of |a| a program."""
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BH + tl.arange(0, BH)
    mask = (t < n)[:, None] & (j < H)[None, :]
    at = t[:, None].to(tl.int64) * H + j[None, :]
    gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
    fires = ((gate > 0) | (gate != gate)) & mask
    act = tl.where(fires, gate, 0.0)
    if GATED:
        act = (act * tl.load(u + at, mask=mask, other=0.0).to(tl.float32)).to(a.dtype.element_ty).to(tl.float32)
    tl.store(a + at, act.to(a.dtype.element_ty), mask=mask)
    ones = fires.to(tl.int32)
    tl.atomic_add(count + t, tl.sum(ones, 1), mask=t < n, sem="relaxed")
    size = tl.abs(act)
    if COUNTED:
        keep = tl.load(counted + t, mask=t < n, other=0).to(tl.int32)
        ones = ones * keep[:, None]
        size = tl.where(keep[:, None] != 0, size, 0.0)
    tl.atomic_add(fired + j, tl.sum(ones, 0), mask=j < H, sem="relaxed")
    tl.store(l1 + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(size, 1), 0))


@triton.jit
def dense_backward_kernel(
    z, u, a, da, du, dl1, counted, n, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, GATED: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """da becomes the gradient of z, in place; du that of u (gated)."""
    dtype = da.dtype.element_ty
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BH + tl.arange(0, BH)
    mask = (t < n)[:, None] & (j < H)[None, :]
    at = t[:, None].to(tl.int64) * H + j[None, :]
    act = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(da + at, mask=mask, other=0.0).to(tl.float32)
    sign = tl.where(act > 0, 1.0, tl.where(act < 0, -1.0, 0.0)) * tl.load(dl1).to(tl.float32)
    if COUNTED:
        sign = tl.where(tl.load(counted + t, mask=t < n, other=0)[:, None] != 0, sign, 0.0)
    grad += sign
    if GATED:
        gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        fires = (gate > 0) | (gate != gate)
        up = tl.load(u + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(da + at, tl.where(fires, grad * up, 0.0).to(dtype), mask=mask)
        tl.store(du + at, tl.where(fires, grad * gate, 0.0).to(dtype), mask=mask)
    else:
        tl.store(da + at, tl.where((act > 0) | (act != act), grad, 0.0).to(dtype), mask=mask)


def activate(
    z: torch.Tensor, u: torch.Tensor | None, a: torch.Tensor, counted: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill a [n, h] from z (and u, gated); a may be z or u itself. Returns (count [n], fired [h], sums of |a|)."""
    n, h = z.shape
    count_fired = torch.zeros(n + h, dtype=torch.int32, device=z.device)
    count, fired = count_fired[:n], count_fired[n:]
    grid = (triton.cdiv(n, _FORWARD["BM"]), triton.cdiv(h, _FORWARD["BH"]))
    l1 = torch.empty(grid[0] * grid[1], dtype=torch.float32, device=z.device)
    if n:
        dense_forward_kernel[grid](
            z, z if u is None else u, a, count if counted is None else counted, count, fired, l1, n, H=h,
            GATED=u is not None, COUNTED=counted is not None, **_FORWARD,
        )  # fmt: skip
    return count, fired, l1


def activate_backward(
    z: torch.Tensor | None,
    u: torch.Tensor | None,
    a: torch.Tensor,
    da: torch.Tensor,
    du: torch.Tensor | None,
    dl1: torch.Tensor,
    counted: torch.Tensor | None,
) -> None:
    """Turn da [n, h] into the gradient of z in place, and fill du [n, h]; z, u and du are None if non-gated."""
    n, h = a.shape
    if n:
        dense_backward_kernel[(triton.cdiv(n, _BACKWARD["BM"]), triton.cdiv(h, _BACKWARD["BH"]))](
            a if z is None else z, a if u is None else u, a, da, da if du is None else du, dl1,
            a if counted is None else counted, n, H=h, GATED=z is not None, COUNTED=counted is not None, **_BACKWARD,
        )  # fmt: skip


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    for kernel, options in ((dense_forward_kernel, _FORWARD), (dense_backward_kernel, _BACKWARD)):
        pointers = {"counted": "*i8", "count": "*i32", "fired": "*i32", "l1": "*fp32", "dl1": "*fp32", "n": "i32"}
        constexprs = {"H": 5632, "BM": options["BM"], "BH": options["BH"], "GATED": True, "COUNTED": True}
        signature = {
            a: "constexpr" if a in constexprs else pointers.get(a, POINTER[torch.bfloat16]) for a in kernel.arg_names
        }
        cases.append(AotCase(kernel.__name__, kernel, signature, constexprs, options["num_warps"], 3))
    return cases
