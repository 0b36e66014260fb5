"""Dense: the same FFN by dense products, for layers too dense for anything else to pay.

The products are torch's; the two kernels here do everything element-wise in one pass each, L1 term, firing statistics
and all, so that a layer that is not sparse (yet) loses nothing against compiled torch code. Programs go along the rows
first: what is written last, and still in the cache for the next product, is whole rows.
"""

import torch
import triton
import triton.language as tl

from kernels.aot import AotCase
from kernels.launch import POINTER

_FORWARD = {"BM": 16, "BH": 128, "ROWS": 64, "STAGES": 3, "num_warps": 4}  # a warp counts along whole rows of a block
_FORWARD_ALONE = {"BM": 4, "BH": 1024, "ROWS": 4, "STAGES": 1, "num_warps": 8}  # without statistics
_BACKWARD = {"BM": 4, "BH": 1024, "num_warps": 8}


@triton.jit
def dense_forward_kernel(
    z, u, a, counted, count, fired, l1, n, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, COUNTED: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """a = relu(z) * u (non-gated: relu(z)) for ROWS rows; if STATS, entries per row and column and the sum of |a|."""
    COLUMN_BLOCKS: tl.constexpr = (H + BH - 1) // BH
    j = tl.program_id(0) % COLUMN_BLOCKS * BH + tl.arange(0, BH)
    in_row = (j < H)[None, :]
    per_column = tl.zeros((BM, BH), tl.int32)
    total = tl.zeros((BM, BH), tl.float32)
    for s in tl.range(0, ROWS, BM, num_stages=STAGES):
        t = tl.program_id(0) // COLUMN_BLOCKS * ROWS + s + tl.arange(0, BM)
        mask = (t < n)[:, None] & in_row
        at = t[:, None].to(tl.int64) * H + j[None, :]
        gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
        fires = (gate > 0) | (gate != gate)
        act = tl.where(fires, gate, 0.0)
        if GATED:
            act = (act * tl.load(u + at, mask=mask, other=0.0).to(tl.float32)).to(a.dtype.element_ty).to(tl.float32)
        tl.store(a + at, act.to(a.dtype.element_ty), mask=mask)
        if STATS:
            ones = fires.to(tl.int32)
            tl.atomic_add(count + t, tl.sum(ones, 1), mask=t < n, sem="relaxed")
            if COUNTED:
                keep = tl.load(counted + t, mask=t < n, other=0).to(tl.int32)[:, None]
                ones = ones * keep
                act = tl.where(keep != 0, act, 0.0)
            per_column += ones
            total += tl.abs(act)
    if STATS:
        tl.atomic_add(fired + j, tl.sum(per_column, 0), mask=j < H, sem="relaxed")
        tl.store(l1 + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


@triton.jit
def dense_backward_kernel(
    z, u, da, du, dl1, counted, n, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, GATED: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """da becomes the gradient of z, in place; du that of u (gated)."""
    dtype = da.dtype.element_ty
    COLUMN_BLOCKS: tl.constexpr = (H + BH - 1) // BH
    t = tl.program_id(0) // COLUMN_BLOCKS * BM + tl.arange(0, BM)
    j = tl.program_id(0) % COLUMN_BLOCKS * BH + tl.arange(0, BH)
    mask = (t < n)[:, None] & (j < H)[None, :]
    at = t[:, None].to(tl.int64) * H + j[None, :]
    gate = tl.load(z + at, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(da + at, mask=mask, other=0.0).to(tl.float32)
    penalty = tl.load(dl1).to(tl.float32)
    if COUNTED:
        penalty = tl.where(tl.load(counted + t, mask=t < n, other=0)[:, None] != 0, penalty, 0.0)
    fires = (gate > 0) | (gate != gate)
    if GATED:
        up = tl.load(u + at, mask=mask, other=0.0).to(tl.float32)
        act = (gate * up).to(dtype)
        grad += penalty * tl.where(act > 0, 1.0, tl.where(act < 0, -1.0, 0.0))
        tl.store(da + at, tl.where(fires, grad * up, 0.0).to(dtype), mask=mask)
        tl.store(du + at, tl.where(fires, grad * gate, 0.0).to(dtype), mask=mask)
    else:
        tl.store(da + at, tl.where(fires, grad + penalty, 0.0).to(dtype), mask=mask)


def activate(
    z: torch.Tensor, u: torch.Tensor | None, a: torch.Tensor, counted: torch.Tensor | None, stats: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill a [n, h] from z (and u, gated); a may be z or u itself.

    Returns (count [n], fired [h], sums of |a|), undefined without `stats`.
    """
    n, h = z.shape
    new = torch.zeros if stats else torch.empty
    count, fired = (new(size, dtype=torch.int32, device=z.device) for size in (n, h))
    options = _FORWARD if stats else _FORWARD_ALONE
    grid = (triton.cdiv(h, options["BH"]) * triton.cdiv(n, options["ROWS"]),)
    l1 = torch.empty(grid[0], dtype=torch.float32, device=z.device)
    if n:
        dense_forward_kernel[grid](
            z, z if u is None else u, a, count if counted is None else counted, count, fired, l1, n, H=h,
            GATED=u is not None, COUNTED=counted is not None, STATS=stats, **options,
        )  # fmt: skip
    return count, fired, l1


def activate_backward(
    z: torch.Tensor,
    u: torch.Tensor | None,
    da: torch.Tensor,
    du: torch.Tensor | None,
    dl1: torch.Tensor,
    counted: torch.Tensor | None,
) -> None:
    """Turn da [n, h] into the gradient of z in place, and fill du [n, h].

    Non-gated: u and du are None, and z may be the activation itself, which is positive where z is.
    """
    n, h = z.shape
    if n:
        dense_backward_kernel[(triton.cdiv(h, _BACKWARD["BH"]) * triton.cdiv(n, _BACKWARD["BM"]),)](
            z, z if u is None else u, da, da if du is None else du, dl1, z if counted is None else counted, n, H=h,
            GATED=u is not None, COUNTED=counted is not None, **_BACKWARD,
        )  # fmt: skip


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    for kernel, options, stats in (
        (dense_forward_kernel, _FORWARD, True),
        (dense_forward_kernel, _FORWARD_ALONE, False),
        (dense_backward_kernel, _BACKWARD, True),
    ):
        pointers = {"counted": "*i8", "count": "*i32", "fired": "*i32", "l1": "*fp32", "dl1": "*fp32", "n": "i32"}
        constexprs = {"H": 5632, "GATED": True, "COUNTED": True, "STATS": stats} | options
        warps = constexprs.pop("num_warps")
        constexprs = {a: constexprs[a] for a in kernel.arg_names if a in constexprs}
        signature = {
            a: "constexpr" if a in constexprs else pointers.get(a, POINTER[torch.bfloat16]) for a in kernel.arg_names
        }
        cases.append(AotCase(f"{kernel.__name__} stats={stats}", kernel, signature, constexprs, warps, 3))
    return cases
