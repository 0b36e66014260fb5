"""Processes and devices: the one file that knows about ranks.

One process needs no setup; under torchrun each process reads RANK, LOCAL_RANK and WORLD_SIZE and joins a process group
(NCCL on GPUs, gloo on CPU) for what happens on the device. What the host says, and the saving of checkpoints in the
background, go through groups of their own on gloo.

How the ranks share a model is parallel.mode of the config. ddp: every rank holds everything, and `GradientSync` adds
the gradients up, fp32, while the last backward pass of a step still runs. zero1, fsdp: twell/sharded.py. The optimizer
state of ddp is whole on every rank: dividing it is what zero1 is, which moves 6 instead of 8 bytes a parameter.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twell.errors import UserError

PATIENCE = timedelta(
    days=2
)  # of what the host waits for: the main rank may tokenize a whole data set before the others
GRACE = 60  # seconds that a collective may outlast parallel.timeout, so that twell.faults speaks before NCCL aborts
BUCKET = 1 << 25  # gradients (128 MiB) that are summed over ranks by one operation: enough to fill the links

_host_group: dist.ProcessGroup | None = None
_saving_group: dist.ProcessGroup | None = None
_n_joined = 0  # groups that this process has joined one after another


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


def start(device: str, timeout: int = 600) -> Ranks:
    """Join the process group if torchrun started this process, and pick its device.

    Args:
        device: "auto", "cpu" or "cuda", as in the config.
        timeout: parallel.timeout, in seconds.
    """
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if use_cuda:
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"LOCAL_RANK={local_rank}: torch sees {torch.cuda.device_count()} GPUs; start fewer processes"
            )
        torch.cuda.set_device(local_rank)
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if "RANK" in os.environ and not dist.is_initialized():
        _join(place, timedelta(seconds=timeout + GRACE))
    if not dist.is_initialized():
        return Ranks(0, 1, place)
    return Ranks(dist.get_rank(), dist.get_world_size(), place)


def _join(place: torch.device, timeout: timedelta) -> None:
    global _host_group, _saving_group, _n_joined
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    # The store outlives the group. The next one, after torchrun's restart or of a sweep's next job, must not find the
    # addresses of this one there.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"group-{world_size}-{restarts}-{_n_joined}", store)
    _n_joined += 1
    backend, device_id = ("nccl", place) if place.type == "cuda" else ("gloo", None)
    dist.init_process_group(
        backend, timeout=timeout, store=store, rank=rank, world_size=world_size, device_id=device_id
    )
    _host_group = dist.new_group(backend="gloo", timeout=PATIENCE)
    _saving_group = dist.new_group(backend="gloo", timeout=PATIENCE)


def is_distributed() -> bool:
    """Whether this process belongs to a group."""
    return dist.is_initialized()


def rank() -> int:
    """This process's number among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Processes in all."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the first rank, or the only process."""
    return rank() == 0


def saving_group() -> dist.ProcessGroup | None:
    """What a checkpoint is saved through, in the background of everything else; None on a single process."""
    return _saving_group


def compute_dtype(dtype: str, device_type: str) -> torch.dtype:
    """The dtype of activations and products that config.dtype asks for: auto is bf16 on a GPU and fp32 on a CPU."""
    bf16 = dtype == "bf16" or (dtype == "auto" and device_type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def finish() -> None:
    """Leave the process group together, so that a following run of the same process starts clean.

    Without the barrier a rank that leaves early takes gloo's connections down under the others, which then now and
    then abort at exit.
    """
    global _host_group, _saving_group
    if dist.is_initialized():
        gather(None)
        dist.destroy_process_group()
        _host_group = _saving_group = None


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
    dist.broadcast_object_list(box, src=0, group=_host_group)
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
        problems = [] if ranks.is_main and problem else gather(problem)
    for problem in problems:
        if problem is not None:
            raise UserError(problem)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (any picklable object), in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group or _host_group)
    return values


class GradientSync:
    """Sums a flat gradient buffer over ranks, bucket by bucket, while backward still fills the rest of it.

    Backward comes to the parameters in about the reverse of their order, so buckets are cut and summed in that order,
    which is the same on every rank. What backward did not come to is summed by `wait`.
    """

    def __init__(
        self,
        grad: Tensor,
        parameters: Sequence[nn.Parameter],
        starts: Sequence[int],
        complete: Callable[[Sequence[int]], None],
        bucket: int = BUCKET,
    ):
        """
        Args:
            grad: fp32 [n], where parameter i has its gradient from starts[i] on.
            complete: called with parameters' numbers when backward has been through them, just before their gradients
                are summed: puts what backward left into `grad`.
            bucket: elements that are summed at once, at least.
        """
        self._grad, self._complete = grad, complete
        self._buckets: list[tuple[slice, list[int]]] = []
        self._missing: list[int] | None = None  # gradients that each bucket waits for; None: nothing is to be summed
        self._works: list[dist.Work] = []  # of the buckets on their way
        end, members = len(grad), []
        for i in reversed(range(len(parameters))):
            members.append(i)
            if end - starts[i] >= bucket or i == 0:
                for member in members:
                    arrived = functools.partial(self._arrived, len(self._buckets))
                    parameters[member].register_post_accumulate_grad_hook(arrived)
                self._buckets.append((slice(starts[i], end), members))
                end, members = starts[i], []

    def begin(self) -> None:
        """The backward pass that comes now is the last one of the step."""
        self._missing = [len(members) for _, members in self._buckets]

    def wait(self) -> None:
        """Sum what is left; from here on the device's work comes after all sums."""
        while len(self._works) < len(self._buckets):
            self._sum_next()
        for work in self._works:
            work.wait()
        self._missing, self._works = None, []

    def _arrived(self, bucket: int, _parameter: Tensor) -> None:
        if self._missing is None:
            return
        self._missing[bucket] -= 1
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] == 0:
            self._sum_next()

    def _sum_next(self) -> None:
        where, members = self._buckets[len(self._works)]
        self._complete(members)
        self._works.append(dist.all_reduce(self._grad[where], async_op=True))
