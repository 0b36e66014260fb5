"""Memory: how much is used, what to do when the GPU has too little, and when Python looks for garbage."""

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from twell import parallel
from twell.config import Config
from twell.errors import UserError, first_line


def used_gb(device: torch.device) -> float:
    """Peak allocated GPU memory since the last reset, or the resident memory of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


@contextlib.contextmanager
def explain_out_of_memory(cfg: Config, device: torch.device) -> Iterator[None]:
    """Turn running out of GPU memory into a UserError that says what was asked, what was free, and what would help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"{_what_was_asked(error)}{_what_is_used(device)}; {_what_helps(cfg)}") from error


def _what_was_asked(error: torch.OutOfMemoryError) -> str:
    """From torch's own message: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ..."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    free = re.search(r"of which ([\d.]+ \w+) is free", str(error))
    if asked is None:
        return f"out of GPU memory ({first_line(error)})"
    return f"out of GPU memory: {asked[1]} asked for" + (f", {free[1]} free" if free else "")


def _what_is_used(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    _, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device)
    return f", {used / 2**30:.1f} GiB in use by tensors ({peak / 2**30:.1f} at most) of {total / 2**30:.1f} GiB"


def _what_helps(cfg: Config) -> str:
    """The flags that would lower what `cfg` needs, the cheapest first."""
    flags = []
    if cfg.batch.micro > 1:
        flags.append(f"batch.micro={_largest_divisor_below(cfg.batch.micro)} (the same training, in smaller pieces)")
    if cfg.ffn.kind in ("dense_relu", "dense_silu"):
        flags.append("ffn=sparse (keeps only what is not zero)")
    if cfg.recompute == "none":
        flags.append("recompute=selective")
    if cfg.recompute != "full":
        flags.append("recompute=full")
    if cfg.cuda_graph != "off":
        flags.append("cuda_graph=off")
    if parallel.world_size() > 1 and cfg.parallel.mode != "fsdp":
        harder = "zero1" if cfg.parallel.mode == "ddp" else "fsdp"
        flags.append(f"parallel={harder} (divides more among the GPUs)")
    elif parallel.world_size() > 1 and not cfg.parallel.shard_gradients:
        flags.append("parallel.shard_gradients=true")
    if not flags:
        flags.append("a smaller model.seq_len or model")
    return "try " + ", ".join(flags)


def _largest_divisor_below(n: int) -> int:
    return next(k for k in range(n // 2, 0, -1) if n % k == 0)


@contextlib.contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Let Python look for garbage only in `collect_garbage`.

    Its own schedule interrupts the host at any time, for longer the more objects live, and one rank that pauses makes
    all others wait.
    """
    gc.disable()
    collect_garbage()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def collect_garbage() -> None:
    """Free unreachable cycles. What is left is not looked at again: the program itself, and what compilation made."""
    gc.collect()
    gc.freeze()
