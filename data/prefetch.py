"""Runs a producer one step ahead in a background thread and moves what it makes to the device."""

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

_PATIENCE_SECONDS = 60  # after which a wait for data is told
_POLL_SECONDS = 0.1  # how often a full queue looks whether it was closed


class Prefetcher:
    """`get()` returns `produce()`'s results in order, made ahead by a thread; an exception in it is raised by `get()`.

    produce: returns (tensors, state): a dict of CPU tensors (or None) and anything. The tensors arrive on `device`.
    On CUDA they are copied from pinned memory on a stream of their own, so that the copy overlaps the running step.
    """

    def __init__(self, produce: Callable[[], tuple[dict[str, torch.Tensor | None], Any]], device: torch.device):
        self._produce, self._device = produce, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.Queue = queue.Queue(maxsize=1)  # one waits here, the next one is in the thread's hands
        self._closed = threading.Event()
        self.wait_seconds = 0.0  # time `get()` has blocked
        self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
        self._thread.start()

    def get(self) -> tuple[dict[str, torch.Tensor | None], Any]:
        start = time.perf_counter()
        while True:
            try:
                tensors, state, copied, error = self._queue.get(timeout=_PATIENCE_SECONDS)
                break
            except queue.Empty:
                print(f"waiting for data for {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        self.wait_seconds += time.perf_counter() - start
        if error is not None:
            raise error
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in tensors.values():
                if tensor is not None:
                    tensor.record_stream(current)  # its memory belongs to the copy stream's pool
        return tensors, state

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                tensors, state = self._produce()
                tensors, copied = self._to_device(tensors)
                item = (tensors, state, copied, None)
            except BaseException as error:
                item = (None, None, None, error)
            self._put(item)
            if item[3] is not None:
                return

    def _put(self, item: tuple) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def _to_device(self, tensors: dict) -> tuple[dict, torch.cuda.Event | None]:
        if self._stream is None:
            return tensors, None
        with torch.cuda.stream(self._stream):
            moved = {
                name: tensor if tensor is None else tensor.pin_memory().to(self._device, non_blocking=True)
                for name, tensor in tensors.items()
            }
        return moved, self._stream.record_event()
