"""Weights: fp32 masters for the optimizer, and what the model computes with.

In bf16 a parameter of the model is only a rounded copy: a step of the optimizer is often smaller than the distance
between two bf16 numbers and would be lost. So the optimizer, and the checkpoint, have fp32 masters; the model's
parameters are cast from them once per optimizer step instead of in every forward pass, and the gradients of all
micro-batches are added up in fp32. With fp32 compute the masters are the model's parameters themselves.
"""

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements; every tensor starts at a multiple, so that kernels may load 16 bytes at once


class Weights:
    """The parameters of `model`, computing in `compute_dtype`.

    masters  fp32 parameters under the model's names; their `.grad` is what the optimizer reads.
    grad     fp32 [n], all those gradients in one flat buffer, zero between the tensors. It stays where it is: one
             reduction gives the norm, one collective joins the ranks.

    One step is `zero_grad`, then for each micro-batch backward and `accumulate`, then the optimizer and `refresh`.
    The model's parameters stay the same objects; in bf16 their data is replaced.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype):
        parameters = dict(model.named_parameters())
        self._parameters = list(parameters.values())
        device = self._parameters[0].device
        starts, n = [], 0
        for parameter in self._parameters:
            starts.append(n)
            n += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

        def views(flat: Tensor) -> list[Tensor]:
            return [flat[start : start + p.numel()].view(p.shape) for start, p in zip(starts, self._parameters)]

        self.grad = torch.zeros(n, device=device)
        self._grads = views(self.grad)
        self._master = self._compute = None
        if compute_dtype == torch.float32:
            self.masters = parameters
        else:
            self._master = torch.zeros(n, device=device)
            self._compute = torch.zeros(n, dtype=compute_dtype, device=device)
            self.masters = {}
            for name, master, compute in zip(parameters, views(self._master), views(self._compute)):
                parameter = parameters[name]
                master.copy_(parameter.data)
                parameter.data = compute
                self.masters[name] = nn.Parameter(master)
            self.refresh()
        for master, grad in zip(self.masters.values(), self._grads):
            master.grad = grad

    def zero_grad(self) -> None:
        """Begin a step: the gradients are zero, at the same addresses."""
        self.grad.zero_()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of a backward pass to the masters' and drop them (fp32: autograd has added them)."""
        if self._compute is None:
            return
        torch._foreach_add_(self._grads, [parameter.grad for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the model's parameters; call it after whatever changed the masters."""
        if self._compute is not None:
            self._compute.copy_(self._master)

    def state(self) -> dict[str, Tensor]:
        """The masters under their checkpoint names; who fills them in place calls `refresh`."""
        return {f"model.{name}": master.detach() for name, master in self.masters.items()}
