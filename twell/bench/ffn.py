"""The FFNs that benchmarks compare: dense ones in torch, eager and compiled, and a sparse layer that learns."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import FFNOutput, sparse_ffn

DL1 = 0.1  # gradient of the L1 sum; large, so that an error in it would show


class Dense:
    """The dense FFNs, eager and compiled, of one shape."""

    def __init__(self, gated: bool, compiled: bool):
        torch._dynamo.reset()  # what was compiled for other shapes would count towards the recompilation limit
        functions = {"relu": _relu, "relu_l1": _relu_l1, "silu": _silu}
        self.eager = {name: f(gated) for name, f in functions.items()}
        self.compiled = {}
        if compiled:
            self.compiled = {name: torch.compile(f(gated), dynamic=False) for name, f in functions.items()}

    def variants(self, name: str) -> dict[str, Callable]:
        compiled = {f"{name} compiled": self.compiled[name]} if self.compiled else {}
        return {f"{name} eager": self.eager[name]} | compiled


def _hidden(gated: bool, act: Callable) -> Callable[..., Tensor]:
    def hidden(x: Tensor, w_gate: Tensor | None, w_up: Tensor) -> Tensor:
        return act(F.linear(x, w_gate)) * F.linear(x, w_up) if gated else act(F.linear(x, w_up))

    return hidden


def _plain(gated: bool, act: Callable) -> Callable[..., tuple[Tensor, ...]]:
    hidden = _hidden(gated, act)
    return lambda x, w_gate, w_up, w_down: (hidden(x, w_gate, w_up) @ w_down,)


def _relu(gated: bool) -> Callable[..., tuple[Tensor, ...]]:
    return _plain(gated, F.relu)


def _silu(gated: bool) -> Callable[..., tuple[Tensor, ...]]:
    return _plain(gated, F.silu)


def _relu_l1(gated: bool) -> Callable[..., tuple[Tensor, ...]]:
    hidden = _hidden(gated, F.relu)

    def ffn(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
        a = hidden(x, w_gate, w_up)
        return a @ w_down, a.abs().sum(dtype=torch.float32)

    return ffn


class Sparse:
    """One sparse layer, with what it learns from the batches that it is shown."""

    def __init__(self, impl: str, h: int, device: torch.device, packing: str = "bitmap"):
        self.impl = impl
        self.state = None
        if device.type == "cuda" and impl != "torch":
            from kernels.state import FFNState  # needs triton

            self.state = FFNState(h, device, packing)

    def learn(self, batches: list[tuple[Tensor, Tensor]], weights: Iterable[Tensor | None]) -> None:
        """Show it the batches until it has settled: the first time tells how sparse it is, the second which neurons
        fire together, the third how much room that takes. It looks as if captured, when more passes run sparse."""
        with self.capturing():
            for _ in range(3):
                self._see(batches, weights)
                self._update()

    def repair(self, batches: list[tuple[Tensor, Tensor]], weights: Iterable[Tensor | None]) -> int:
        """Enlarge its buffers until the batches fit, as a trainer does that repeats the step; returns how often."""
        with self.capturing():
            for repeats in range(4):
                self._see(batches, weights)
                if not self.overflowed():
                    return repeats
                self._update()
        raise RuntimeError("the buffers overflow again and again")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """What runs meanwhile is captured in a CUDA graph: routes are chosen as if the host cost nothing."""
        if self.state is not None:
            self.state.captured = True
        yield
        if self.state is not None:
            self.state.captured = False

    def _see(self, batches: list[tuple[Tensor, Tensor]], weights: Iterable[Tensor | None]) -> None:
        for x, dy in batches:
            self.full(x, *weights)
            leaves = leaves_of(x, weights)
            gradients_of(self(*leaves), leaves, dy)

    def _update(self) -> None:
        if self.state is not None:
            from kernels.state import update

            update([self.state])

    def overflowed(self) -> bool:
        """Whether a buffer was too small since the last update: then results are incomplete."""
        if self.state is None:
            return False
        from kernels.state import overflowed

        return bool(overflowed([self.state]))

    def layout(self, h: int) -> tuple[Tensor, int]:
        """(neuron order int32 [h], number of hot neurons) of its training passes."""
        if self.state is None:
            return torch.arange(h, dtype=torch.int32), 0
        order = self.state.decision.train
        return order.order, order.n_hot

    def decision(self) -> str:
        """How it decided to run."""
        if self.state is None:
            return "dense products in torch"
        from kernels.state import table

        return table([self.state])

    def full(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> FFNOutput:
        return sparse_ffn(x, w_gate, w_up, w_down, impl=self.impl, state=self.state)

    def infer(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Tensor:
        """y alone, as inference wants it."""
        return sparse_ffn(x, w_gate, w_up, w_down, impl=self.impl, state=self.state, stats=False).y

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.full(*tensors)[:2]


def leaves_of(x: Tensor, weights: Iterable[Tensor | None]) -> list[Tensor | None]:
    """(x, w_gate, w_up, w_down) as leaves of a new graph."""
    return [None if t is None else t.detach().requires_grad_() for t in (x, *weights)]


def gradients_of(outputs: tuple[Tensor, ...], leaves: list[Tensor | None], dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients of all leaves, from dy for y and DL1 for l1, if the outputs have one."""
    gradients = (dy, torch.full((), DL1, device=dy.device))[: len(outputs)]
    return torch.autograd.grad(outputs, [t for t in leaves if t is not None], gradients)
