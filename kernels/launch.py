"""What every stage needs to know about the machine: whether kernels are interpreted, and what picks a configuration."""

import functools
import os

import torch
import triton
import triton.language as tl

# Triton reads TRITON_INTERPRET when a kernel is decorated: this is fixed at import, like the kernels themselves.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
INTERPRETED = tl.constexpr(INTERPRET)  # the same, visible inside kernels

# Triton's name of a pointer to each dtype that the kernels support.
POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Programs of a persistent kernel: one a multiprocessor; two when interpreting, so that the loop is exercised."""
    return 2 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability as one number (90 for Hopper); 0 on a CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache; when interpreting so little that what is cut to fit it is cut."""
    return 1 << 16 if device.type == "cpu" else torch.cuda.get_device_properties(device).L2_cache_size


def supported(device: torch.device, dtype: torch.dtype) -> str | None:
    """None when the Triton path can run there, else the reason why not."""
    if dtype not in POINTER:
        return f"dtype {dtype} (supported: bfloat16, float16, float32)"
    if device.type == "cpu":
        return None if INTERPRET else "no GPU (set TRITON_INTERPRET=1 before the first import to interpret the kernels)"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"device type {device.type}"
    if capability(device) < 80:
        return f"compute capability {capability(device) / 10} (8.0 or newer is needed)"
    return None


@triton.jit
def popcount(x):
    """Number of set bits of each int32."""
    if INTERPRETED:
        x = x.to(tl.uint32, bitcast=True)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = x + (x >> 8)
        return ((x + (x >> 16)) & 0x3F).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
