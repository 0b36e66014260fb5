"""Weights: fp32 masters for the optimizer, and what the model computes with.

In bf16 a parameter of the model is only a rounded copy: a step of the optimizer is often smaller than the distance
between two bf16 numbers and would be lost. So the optimizer, and the checkpoint, have fp32 masters; the model's
parameters are cast from them once per optimizer step instead of in every forward pass, and the gradients of all
micro-batches are added up in fp32. With fp32 compute the masters are the model's parameters themselves.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.ops import has_kernels
from twell import parallel

ALIGNMENT = 64  # elements; every tensor starts at a multiple, so that kernels may load 16 bytes at once


def padded(n: int) -> int:
    """Elements that a tensor of `n` takes in a flat buffer."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def _layout(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """(where each tensor starts in a flat buffer, the buffer's length)."""
    starts, n = [], 0
    for tensor in tensors:
        starts.append(n)
        n += padded(tensor.numel())
    return starts, n


def flat_views(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """(a flat buffer of zeros, views into it with the shapes of `tensors`)."""
    starts, n = _layout(tensors)
    flat = torch.zeros(n, dtype=dtype, device=tensors[0].device)
    return flat, [flat[start : start + t.numel()].view(t.shape) for start, t in zip(starts, tensors)]


class Flat(NamedTuple):
    """All weights in flat memory, every tensor at the same place of each buffer, zeros between them."""

    master: Tensor  # fp32 [n]
    grad: Tensor  # fp32 [n]
    compute: Tensor  # compute dtype [n], the master rounded


class Weights:
    """The parameters of `model`, computing in `compute_dtype`.

    masters  fp32 parameters under the model's names; their `.grad` is what the optimizer reads.
    grad     fp32 [n], all those gradients in one flat buffer, zero between the tensors. It stays where it is: one
             reduction gives the norm, one collective joins the ranks.
    flat     all of it for kernels, which add to it and update it in one pass; None in fp32, and where they do not run.

    One step is `zero_grad`, then for each micro-batch `begin`, backward and `accumulate`, then `join`, the optimizer
    and `refresh`. All ranks hold the same; `join` makes the gradients those of all ranks. The model's parameters stay
    the same objects; in bf16 their data is replaced.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype):
        parameters = dict(model.named_parameters())
        self._parameters = list(parameters.values())
        self.grad, self._grads = flat_views(self._parameters)
        self._master = self._compute = self.flat = None
        if compute_dtype == torch.float32:
            self.masters = parameters
        else:
            self._master, masters = flat_views(self._parameters)
            self._compute, computing = flat_views(self._parameters, compute_dtype)
            self.masters = {}
            for name, master, compute in zip(parameters, masters, computing):
                parameter = parameters[name]
                master.copy_(parameter.data)
                parameter.data = compute
                self.masters[name] = nn.Parameter(master)
            self.refresh()
            if has_kernels(self.grad.device, compute_dtype):
                self.flat = Flat(self._master, self.grad, self._compute)
        for master, grad in zip(self.masters.values(), self._grads):
            master.grad = grad
        self._overwrite = False
        self._sync = None
        if parallel.world_size() > 1:
            self._sync = parallel.GradientSync(self.grad, self._parameters, _layout(self._parameters)[0], self._add)

    def zero_grad(self, always_add: bool = False) -> None:
        """Begin a step: the gradients are zero, at the same addresses.

        In bf16 the first micro-batch overwrites them instead, which saves two passes; every backward pass reaches every
        parameter. always_add: not so, because a recording that cannot tell the first from the others will be replayed.
        """
        self._overwrite = self._compute is not None and not always_add
        if not self._overwrite:
            self.grad.zero_()

    def begin(self, last: bool) -> None:
        """A micro-batch comes, the `last` one of its step or not."""
        if last and self._sync is not None:
            self._sync.begin()

    def accumulate(self) -> None:
        """Add the gradients of a backward pass to the masters' and drop them (fp32: autograd has added them)."""
        self._add(range(len(self._parameters)))
        self._overwrite = False

    @torch.no_grad()
    def _add(self, members: Iterable[int]) -> None:
        """The same for some of the parameters, unless it is done already."""
        if self._compute is None:
            return
        members = [i for i in members if self._parameters[i].grad is not None]
        totals, grads = [self._grads[i] for i in members], [self._parameters[i].grad for i in members]
        if self.flat is not None:
            from kernels.optimizer import accumulate  # needs triton

            for total, grad in zip(totals, grads):
                accumulate(total, grad, self._overwrite)
        elif members:
            add = torch._foreach_copy_ if self._overwrite else torch._foreach_add_
            add(totals, grads)
        for i in members:
            self._parameters[i].grad = None

    def join(self) -> None:
        """Make the gradients the sum over all ranks; most of it has happened during the last backward pass."""
        if self._sync is not None:
            self._sync.wait()

    def norm(self, grad: Tensor) -> Tensor:
        """The norm [] of all gradients, `grad` being this rank's buffer."""
        return torch.linalg.vector_norm(grad)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the model's parameters; call it after whatever changed the masters."""
        if self._compute is not None:
            self._compute.copy_(self._master)

    def state(self) -> dict[str, Tensor]:
        """The masters under their checkpoint names; who fills them in place calls `refresh`."""
        return {f"model.{name}": master.detach() for name, master in self.masters.items()}

    def whole_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """`optimizer_state` of the masters as a checkpoint keeps it."""
        return state
