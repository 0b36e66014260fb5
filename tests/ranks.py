"""Starts tiny training runs on several ranks, as torchrun does."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import train
from tests.training import tiny_text

ROOT = Path(train.__file__).parent


def command(folder: Path, n_ranks: int, *jobs: str, launcher: tuple[str, ...] = ()) -> list[str]:
    """The command line that runs `jobs`, each the overrides of one run, one after another on `n_ranks`."""
    tiny_text(folder)  # once, before several ranks write it at the same time
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}", *launcher]
    return [*torchrun, "-m", "tests.rank_jobs", str(folder), *jobs]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@contextlib.contextmanager
def start_ranks(folder: Path, n_ranks: int, *jobs: str, launcher: tuple[str, ...] = ()) -> Iterator[subprocess.Popen]:
    """The launcher; whatever becomes of the test, nothing goes on running."""
    arguments = command(folder, n_ranks, *jobs, launcher=launcher)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, env=environment(), cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
            kill_ranks(folder)  # torchrun gives each a session of its own: they outlive it


def kill_ranks(folder: Path) -> None:
    for rank in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):  # it has ended since, as ranks do when another one is gone
            os.kill(rank, signal.SIGKILL)


def run_ranks(folder: Path, n_ranks: int, *jobs: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run to the end; stdout and stderr are captured."""
    with start_ranks(folder, n_ranks, *jobs, launcher=launcher) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def processes_of(folder: Path) -> list[int]:
    """The ranks of `folder` that run, their launcher not counted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if str(folder).encode() in arguments and b"tests.rank_jobs" in arguments and b"--standalone" not in arguments:
            found.append(int(path.parent.name))
    return sorted(found)
