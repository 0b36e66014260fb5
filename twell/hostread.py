"""The one place per optimizer step where the host waits for the device.

Everything the host must know before it lets the optimizer run is folded into one small tensor on the device, made the
same on all ranks, and read once.
"""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from twell import parallel


class StepWord(NamedTuple):
    """What the host learns about a step before the optimizer runs; equal on every rank."""

    nonfinite: bool  # the loss or the gradient norm is NaN or infinite somewhere
    overflowed: bool  # a buffer of the sparse kernels was too small: the gradients are incomplete, repeat the step
    stop: bool  # some rank was asked to stop


class HostRead:
    """Reads the word of a step, and measures what that costs.

    On a GPU the cost is the time the device stands idle between the end of its work and the host's answer, taken
    from two events on its own timeline; the wait for the work itself costs nothing.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def read(self, finite: Tensor, overflowed: Tensor, stop: bool) -> StepWord:
        """Fold, share and read one word.

        Args:
            finite: bool [], on the device, whether this rank's loss and gradient norm are finite.
            overflowed: bool [], on the device, whether a buffer was too small on this rank.
            stop: whether this process was asked to stop.
        """
        # torch.full, not torch.tensor: a fill kernel needs no copy from the host, which would be a second sync
        stop = torch.full((), stop, dtype=torch.bool, device=self.device)
        word = torch.stack([~finite, overflowed, stop]).int()  # [3]
        parallel.max_over_ranks(word)
        if self.device.type == "cuda":
            end_of_work, answered = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            end_of_work.record()
            values = word.tolist()
            answered.record()
            self._events.append((end_of_work, answered))
        else:
            started = time.perf_counter()
            values = word.tolist()
            self._seconds += time.perf_counter() - started
        return StepWord(*map(bool, values))

    def take_seconds(self) -> float:
        """Seconds lost to reads since the last call."""
        seconds = self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1e3
        self._events, self._seconds = [], 0.0
        return seconds
