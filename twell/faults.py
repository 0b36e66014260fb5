"""What long runs meet: being told to stop, and other ranks that are gone or stuck.

`StopRequests`: SIGTERM, SIGUSR1 or Ctrl-C on any rank; the loop asks once per step, all ranks save and leave. If that
takes longer than stop_timeout, because a collective or a disk hangs, the process ends by force.

`Watchdog`: every rank leaves a sign of life with the process group's store. A rank that has waited parallel.timeout
seconds for the others says who is behind, in plain words, and ends, before NCCL or gloo would abort with a stack trace.
torchrun then ends what is left, and starts all ranks again if it was given --max-restarts; they resume by themselves.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch.distributed as dist

from twell.errors import first_line

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LOST = 75  # exit code when other ranks are lost: EX_TEMPFAIL, trying again may help
TOLD_AFTER = 10.0  # seconds after which a stop that has not happened is told
WAITING_FOR_DATA = "waiting for data"


class StopRequests:
    """Catches SIGNALS from now on; a call says whether one has come. A second one ends the process at once."""

    def __init__(self, timeout: float, end: Callable[[int], object] = os._exit):
        """`timeout`: seconds after the first signal before `end(1)`, wherever the process then is."""
        self._received: list[int] = []
        self._timeout, self._end = timeout, end
        self._closed = threading.Event()
        # Python runs handlers between two instructions, which never comes while the process hangs in a collective.
        # But a byte for each signal goes into this pipe at once, and a thread reads it.
        self._pipe, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-requests", daemon=True)
        self._thread.start()
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        return bool(self._received)

    def close(self) -> None:
        """Call off the end by force; signals keep their meaning."""
        self._closed.set()
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup)  # ends the thread's reading
        self._thread.join()
        os.close(self._pipe)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _watch(self) -> None:
        while True:
            number = os.read(self._pipe, 1)
            if not number:
                return
            if number[0] in SIGNALS:
                break
        told_after = min(TOLD_AFTER, self._timeout)
        if self._closed.wait(told_after):
            return
        left = self._timeout - told_after
        say(f"told to stop, still in a step or a save; if other ranks are gone, the end comes by force in {left:g} s")
        if self._closed.wait(left):
            return
        say(f"told to stop {self._timeout:g} s ago (stop_timeout) and still not done; ending by force")
        self._end(1)


class Watchdog:
    """Ends this process when it has waited too long for the other ranks. On a single process it does nothing."""

    def __init__(self, timeout: float, end: Callable[[int], object] = os._exit):
        """`timeout`: seconds without `beat` that are too long."""
        self._timeout, self._end = timeout, end
        self._doing, self._since, self._steps = "starting", time.time(), 0
        self._closed = threading.Event()
        self._thread = None
        if dist.is_initialized():
            # A connection of its own: the main one may be in use by a collective that waits.
            self._store = dist.distributed_c10d._get_default_store().clone()
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, step: int, doing: str = "training") -> None:
        """This rank is alive and now begins something that takes less than the timeout."""
        self._steps, self._doing, self._since = step, doing, time.time()

    def close(self) -> None:
        """No further signs of life are expected."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        told, pause = None, 0.0
        while not self._closed.wait(pause):
            pause = min(5.0, self._timeout / 4)
            sign = f"{self._steps} {self._since:.0f} {socket.gethostname()} {self._doing}"
            try:
                if sign != told:
                    self._store.set(f"twell/alive/{self._rank}", sign)
                    told = sign
            except RuntimeError:  # the rank with the store is gone; the collectives will notice
                pass
            if time.time() - self._since > self._timeout:
                cause = "" if self._doing == WAITING_FOR_DATA else ": other ranks are gone or stuck"
                say(
                    f"{self._timeout:g} s without progress (parallel.timeout) after step {self._steps}, {self._doing}"
                    f"{cause}. {self._who_is_behind()}"
                )
                self._end(LOST)
                return

    def _who_is_behind(self) -> str:
        """The ranks with the fewest steps, and what they last said they were doing."""
        signs = {}
        try:
            for rank in range(self._world_size):
                key = f"twell/alive/{rank}"
                if self._store.check([key]):
                    steps, since, host, doing = self._store.get(key).decode().split(" ", 3)
                    signs[rank] = (int(steps), float(since), host, doing)
        except RuntimeError as error:
            return f"The process that kept all ranks' signs of life is gone itself ({first_line(error)})"
        silent = [str(rank) for rank in range(self._world_size) if rank not in signs]
        if silent:
            return f"Never heard of: rank {', '.join(silent)}"
        fewest = min(steps for steps, *_ in signs.values())
        behind = [
            f"rank {rank} on {host} (step {steps}, {doing}, {time.time() - since:.0f} s ago)"
            for rank, (steps, since, host, doing) in signs.items()
            if steps == fewest
        ]
        return f"Furthest behind: {', '.join(behind[:8])}" + (", ..." if len(behind) > 8 else "")


@contextlib.contextmanager
def explain_lost_ranks() -> Iterator[None]:
    """When a collective fails because another rank is gone, say so and end the process, since nothing can go on."""
    try:
        yield
    except RuntimeError as error:
        from_the_network = isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError)
        if not (dist.is_initialized() and (from_the_network or "gloo" in str(error))):
            raise
        say(f"another rank is gone or does not answer ({first_line(error)}); the last checkpoint is where to go on")
        sys.stdout.flush()
        os._exit(LOST)  # leaving the group in order would wait for those that are gone


def say(text: str) -> None:
    """One line on stderr, from whatever rank."""
    print(f"rank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr, flush=True)
