"""`profile=N`: a torch trace of N training steps, for chrome://tracing or Perfetto."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

WAIT_STEPS = 5  # compilation and allocation happen in the first steps; they would drown the rest


class Profiler:
    """Traces steps WAIT_STEPS + 1 ... WAIT_STEPS + n_steps into RUN/trace.json; with n_steps = 0 does nothing.

    A run that ends earlier leaves the steps it did, or says that it did not come so far.
    """

    def __init__(self, run: Path, n_steps: int, log: Callable[[str], None]):
        self._profiler = None
        self._log, self._steps = log, 0
        if n_steps == 0:
            return
        path = run / "trace.json"

        def write(profiler: torch.profiler.profile) -> None:
            profiler.export_chrome_trace(str(path))
            log(f"profile: {path}")

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        plan = torch.profiler.schedule(wait=WAIT_STEPS - 1, warmup=1, active=n_steps, repeat=1)
        self._profiler = torch.profiler.profile(activities=activities, schedule=plan, on_trace_ready=write)
        self._profiler.start()

    def step(self) -> None:
        """Tell the profiler that an optimizer step has ended."""
        self._steps += 1
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Stop tracing."""
        if self._profiler is not None:
            self._profiler.stop()
            if self._steps <= WAIT_STEPS:
                self._log(f"profile: no trace, since the run ended within its first {WAIT_STEPS} steps")
