"""CUDA graphs: the micro-step of a small model, launched at once.

A model of 124M parameters starts thousands of kernels a step, many of a few microseconds: the host can hardly keep up,
and the sparse kernels, which are more and shorter, only pay there if launching costs nothing. So forward, backward and
accumulation of one micro-batch are recorded once and replayed for every micro-batch. Weights, gradients, sums and
statistics stay where they are, and the input is copied into fixed buffers.

What it costs: the activations of a micro-step keep their memory between steps too (validation brings its own, which
are fewer), and each new recording takes as long as a few micro-steps. A large model keeps the device busy anyway.
"""

from collections.abc import Callable, Hashable
from dataclasses import fields

import torch

from data.loader import Batch
from twell.config import Config

AUTO_BELOW = 500_000_000  # parameters; larger models keep the device busy by themselves
WARM_UP = 3  # micro-steps launched one by one before the first recording: they compile, tune and allocate
AGAIN = 1  # the same before the next ones: kernels that were not used yet are compiled


def wanted(cfg: Config, device: torch.device, world_size: int, n_params: int) -> bool:
    """Whether `cfg` asks for graphs; auto: on one GPU, for models below AUTO_BELOW."""
    if cfg.cuda_graph == "auto":
        return device.type == "cuda" and world_size == 1 and n_params < AUTO_BELOW
    return cfg.cuda_graph == "on"


class CudaRecorder:
    """Records work on a stream of its own, on which it must have run before."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        """Do `work` on that stream, in the order of the current one."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` without doing it; the result does it. Waits for the device."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that prepares the next batch allocates memory meanwhile
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def wait(self) -> None:
        torch.cuda.synchronize(self._stream.device)


class GraphedMicroStep:
    """Does what `micro_step` does, mostly by replaying it.

    What the host decides while it launches kernels is baked into a recording: `signature()` must change whenever that
    does, and the recording is then made anew. All batches have one shape.
    """

    def __init__(self, micro_step: Callable[[Batch], None], signature: Callable[[], Hashable], recorder: CudaRecorder):
        self._micro_step, self._signature, self._recorder = micro_step, signature, recorder
        self._replay: Callable[[], None] | None = None
        self._baked_in: Hashable = None
        self._n_launched, self._warm_up = 0, WARM_UP  # micro-steps launched one by one under that signature, and wanted
        self._input: Batch | None = None

    def __call__(self, batch: Batch) -> None:
        signature = self._signature()
        if signature != self._baked_in:
            self._forget()
            self._baked_in = signature
        if self._n_launched < self._warm_up:
            self._n_launched += 1
            self._recorder.run(lambda: self._micro_step(batch))
            return
        if self._input is None:
            self._input = _map(torch.clone, batch)
        if self._replay is None:
            self._replay = self._recorder.record(lambda: self._micro_step(self._input))
        _map(torch.Tensor.copy_, self._input, batch)
        self._replay()

    def _forget(self) -> None:
        """Drop the recording, once the device is done with it."""
        if self._replay is not None:
            self._recorder.wait()
            self._warm_up = AGAIN
        self._replay, self._n_launched = None, 0


def _map(function: Callable, *batches: Batch) -> Batch:
    """`function` of the corresponding tensors of `batches`; None where they have None."""
    columns = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(Batch)}
    return Batch(**{name: None if tensors[0] is None else function(*tensors) for name, tensors in columns.items()})
