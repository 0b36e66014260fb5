"""Saving while training goes on: a copy in the host's memory, written in the background.

The tensors of a checkpoint change in one place only, where a step updates them. So they are copied to the host while
the device already computes the next step's gradients (on a stream of its own), `before_update` makes the device wait
for the end of that copy, and a thread writes the files. The host's memory for the copy is taken at the start.

What all ranks hold alike is divided among them; of what is sharded each writes its share, once if there are copies.
"""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from twell import checkpoint, parallel
from twell.checkpoint import CheckpointError
from twell.parallel import Ranks
from twell.sharded import belongs_to_first_copy, local_rows, with_share

BLOCK, ALIGNMENT = 1 << 28, 64  # bytes
MOST_OF_MEMORY = 0.6  # of what the host has available: what the copies of all its ranks may take


class Saver:
    """Writes the checkpoints of one run.

    `tensors` are the run's own, under their checkpoint names; all ranks call everything here at the same steps.
    """

    def __init__(
        self, run: Path, tensors: Mapping[str, Tensor], ranks: Ranks, *, background: bool, log: Callable[[str], None]
    ):
        """`background`: go on while it writes, if the host has the memory; else every save is waited for."""
        self._run, self._log = run, log
        self._tensors = share_of(tensors, ranks)
        self._thread: threading.Thread | None = None
        self._step, self._error = 0, None
        self._copied: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._host: dict[str, Tensor] | None = None
        n_bytes = sum(local_rows(tensor)[0].nbytes for tensor in self._tensors.values())
        if background and _all_have_room(n_bytes, log):
            self._host = _room_on_host(self._tensors, pinned=self._stream is not None)

    def save(self, step: int, meta: dict, own: Any, *, keep: int, best: int | None, wait: bool) -> None:
        """Begin to write the checkpoint of `step`; then remove all but the newest `keep` and the `best`.

        wait: until it is on disk; raises CheckpointError if it cannot be written. Otherwise a failure is logged, later,
        and training goes on.
        """
        self.finish(wait=True)
        self._step = step
        rng = checkpoint.rng_tensors(parallel.rank(), self._stream.device if self._stream else torch.device("cpu"))
        tensors = (self._tensors if self._host is None else self._copy_to_host()) | rng

        def write() -> None:
            try:
                if self._stream is not None:
                    self._stream.synchronize()
                checkpoint.save(self._run, step, tensors, meta, own)
                if parallel.is_main():
                    checkpoint.prune(self._run, keep, best)
            except Exception as error:  # raised or logged by `finish`
                self._error = error

        if self._host is None:
            write()
            self._report(raises=wait)
            return
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        if wait:
            self.finish(wait=True, raises=True)

    def before_update(self) -> None:
        """Call before anything changes the tensors."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None
        self.finish()

    def finish(self, wait: bool = False, raises: bool = False) -> None:
        """Report what has been written; `wait` until it is. Failures are logged, or raised."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        self._thread = None
        self._report(raises)

    def _report(self, raises: bool) -> None:
        error, self._error = self._error, None
        if error is None:
            self._log(f"saved {checkpoint.folder(self._run, self._step)}")
        elif raises or not isinstance(error, CheckpointError):
            raise error
        else:
            self._log(f"NOT saved: {error}; training goes on, and the next checkpoint is tried as usual")

    def _copy_to_host(self) -> dict[str, Tensor]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, tensor in self._tensors.items():
                self._host[name].copy_(local_rows(tensor)[0], non_blocking=True)
        if self._stream is not None:
            self._copied = self._stream.record_event()
        return {
            name: with_share(tensor, self._host[name]) if isinstance(tensor, DTensor) else self._host[name]
            for name, tensor in self._tensors.items()
        }


def _room_on_host(tensors: Mapping[str, Tensor], pinned: bool) -> dict[str, Tensor]:
    """Uninitialised tensors in the host's memory for this rank's rows of all of `tensors`.

    They share a few large blocks: torch takes pinned memory by powers of two.
    """
    room, block, used = {}, torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in tensors.items():
        rows = local_rows(tensor)[0]
        if used + rows.nbytes > len(block):
            block, used = torch.empty(max(BLOCK, rows.nbytes), dtype=torch.uint8, pin_memory=pinned), 0
        room[name] = block[used : used + rows.nbytes].view(rows.dtype).view(rows.shape)
        used += -(-rows.nbytes // ALIGNMENT) * ALIGNMENT
    return room


def share_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The tensors that this rank writes: about as many bytes as every other one."""
    mine = {}
    load = [0] * ranks.world_size
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        if isinstance(tensor, DTensor):
            if belongs_to_first_copy(tensor):
                mine[name] = tensor
            continue
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes
        if lightest == ranks.rank:
            mine[name] = tensor
    return mine


def _all_have_room(n_bytes: int, log: Callable[[str], None]) -> bool:
    """Whether the hosts of all ranks have memory for a copy of `n_bytes` each; says so if not."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, available = n_bytes * local_ranks, available_memory()
    if all(parallel.gather(needed <= MOST_OF_MEMORY * available)):
        return True
    log(
        f"checkpoint.background: a copy takes {needed / 1e9:.1f} GB of the {available / 1e9:.1f} GB that the host has "
        "available; every save will be waited for"
    )
    return False


def available_memory() -> int:
    """Bytes that this host, or the container this runs in, can still give."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        limits.append(1024 * int(lines["MemAvailable"].split()[0]))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and limit.read_text().strip() != "max":
        limits.append(int(limit.read_text()) - int(used.read_text()))
    return min(limits, default=0)
