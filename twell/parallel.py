"""Processes and devices: the one file that knows about ranks.

One process needs no setup; under torchrun each process reads RANK, LOCAL_RANK and WORLD_SIZE, joins a process group
(NCCL on GPUs, gloo on CPU). Every rank holds the whole model; after the last micro-batch of a step `sum_over_ranks`
adds up their gradients, which lie in one buffer.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twell.errors import UserError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # data preparation on rank 0 makes the others wait


@dataclass(frozen=True)
class Ranks:
    """This process's place among all processes of the run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def world_size_from_environment() -> int:
    """Number of processes that torchrun started (1 without torchrun), known before anything is initialised."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(device: str) -> Ranks:
    """Join the process group if torchrun started this process, and pick its device.

    Args:
        device: "auto", "cpu" or "cuda", as in the config.
    """
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda:
        torch.cuda.set_device(local_rank)
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if "RANK" in os.environ and not dist.is_initialized():
        backend, device_id = ("nccl", place) if use_cuda else ("gloo", None)
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=device_id)
    if not dist.is_initialized():
        return Ranks(0, 1, place)
    return Ranks(dist.get_rank(), dist.get_world_size(), place)


def is_distributed() -> bool:
    """Whether this process belongs to a group."""
    return dist.is_initialized()


def is_main() -> bool:
    """Whether this is the first rank, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Wait until every rank has come here."""
    if dist.is_initialized():
        dist.barrier()


def compute_dtype(dtype: str, device_type: str) -> torch.dtype:
    """The dtype of activations and products that config.dtype asks for: auto is bf16 on a GPU and fp32 on a CPU."""
    bf16 = dtype == "bf16" or (dtype == "auto" and device_type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def finish() -> None:
    """Leave the process group together, so that a following run of the same process starts clean.

    Without the barrier a rank that leaves early takes gloo's connections down under the others, which then now and
    then abort at exit.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sum_over_ranks(value: Tensor) -> Tensor:
    """`value` summed over ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.SUM)
    return value


def max_over_ranks(value: Tensor) -> Tensor:
    """Elementwise maximum of `value` over ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value


def from_main(value: Any) -> Any:
    """The main rank's `value` (any picklable object) on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextlib.contextmanager
def main_first(ranks: Ranks) -> Iterator[None]:
    """The main rank runs the block alone, then the others run it and find its work done.

    If the block fails on some rank, it fails on all, so that nobody waits for a process that has gone: with its own
    error where it failed, with a UserError that quotes it elsewhere. If it is the main rank, the others just leave.
    """
    if not ranks.is_main and from_main(None) is not None:
        raise SystemExit(2)
    problem = None
    try:
        yield
    except BaseException as error:
        problem = f"rank {ranks.rank}: {str(error) or type(error).__name__}"
        raise
    finally:
        if ranks.is_main:
            from_main(problem)
        problems = [] if ranks.is_main and problem else _gather(problem)
    for problem in problems:
        if problem is not None:
            raise UserError(problem)


def _gather(value: Any) -> list[Any]:
    """Every rank's `value`, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def stop_requests() -> Callable[[], bool]:
    """Catch SIGTERM and Ctrl-C from now on; the result says whether one has come.

    The loop asks once per optimizer step, saves and leaves. A second signal ends the process at once.
    """
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    return lambda: bool(received)
