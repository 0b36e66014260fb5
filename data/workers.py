"""A pool of tokenizing processes.

They are plain subprocesses running this file, not `multiprocessing` ones: those would import the caller's main module
(train.py, and torch with it) again, or fork a process that has threads; and a pool whose parent is killed would stay
behind, while these see the end of their input and leave.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data import DataError
from data.encode import EncodedBlock, Encoder
from data.sources import Block
from data.tokenizer import load_tokenizer

_ROOT = Path(__file__).resolve().parents[1]


class WorkerPool:
    """At most `workers` processes that run `Encoder(load_tokenizer(tokenizer_folder), ...)`; a context manager.

    They are started as they are needed, so that a small text does not wait for many.
    """

    def __init__(self, workers: int, tokenizer_folder: Path, val_below: int, only_val: bool):
        self._arguments = [str(tokenizer_folder), str(val_below), str(int(only_val))]
        self._workers = workers
        self._processes: list[subprocess.Popen] = []
        self._idle: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers)  # each waits for one process

    def map(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, EncodedBlock]]:
        """Each block with its encoding, in the order of `blocks`, which is read only a little ahead."""
        pending: deque = deque()
        for block in blocks:
            pending.append((block, self._threads.submit(self._encode, block)))
            if len(pending) > 2 * self._workers:
                block, future = pending.popleft()
                yield block, future.result()
        for block, future in pending:
            yield block, future.result()

    def _encode(self, block: Block) -> EncodedBlock:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = self._start()
        try:
            pickle.dump(block, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            result = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise DataError(
                f"a tokenizing process ended with exit code {process.wait()}; if memory ran out, lower data.workers"
            ) from error
        self._idle.put(process)
        if isinstance(result, BaseException):
            raise result
        return result

    def _start(self) -> subprocess.Popen:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "data.workers", *self._arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # Ctrl-C in a terminal reaches the workers too, even while they start; but it is their parent that ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": path})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._processes.append(process)
        return process

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._threads.shutdown()  # the pipes' other ends are closed: no thread waits any more
        for process in self._processes:
            process.kill()  # one may have been started meanwhile
            process.wait()
            process.stdout.close()
            with contextlib.suppress(OSError):  # what was not sent is lost
                process.stdin.close()


def main(tokenizer_folder: str, val_below: str, only_val: str) -> None:
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that prints may disturb the replies
    encode = Encoder(load_tokenizer(tokenizer_folder), int(val_below), only_val=bool(int(only_val)))
    while True:
        try:
            block = pickle.load(requests)
        except EOFError:
            return
        try:
            result = encode(block)
        except (DataError, OSError) as error:
            result = error
        except Exception:
            result = RuntimeError(f"in a tokenizing process:\n{traceback.format_exc()}")
        pickle.dump(result, replies, protocol=pickle.HIGHEST_PROTOCOL)
        replies.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
