"""One optimizer step, as train.py and `bench step` both run it.

    gradients   zero the gradients; for each micro-batch forward, backward and accumulation
    finish      sum over ranks; the factor that averages over tokens and clips; the one host read
    update      the optimizer, with that factor, and the model's weights from the masters

Only `finish` waits for the device.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from data.loader import Batch
from twell import parallel
from twell.adamw import FlatAdamW
from twell.graphs import CudaRecorder, GraphedMicroStep
from twell.hostread import HostRead, StepWord
from twell.loss import IGNORE
from twell.model import Transformer
from twell.optim import norm_and_factor
from twell.sparsity import SparsityStats
from twell.weights import Weights


class MicroStep:
    """Forward, backward and accumulation of one micro-batch; all that happens on the device, nothing waits for it.

    `sums` and `l1_weight` are tensors that stay where they are, so that the work can be captured in a CUDA graph.
    """

    def __init__(
        self,
        model: Transformer,
        weights: Weights,
        l1_weight: Tensor,
        batch_tokens: int,
        count: Callable[[SparsityStats], None] | None,
    ):
        self._model, self._weights = model, weights
        self._l1_weight, self._batch_tokens, self._count = l1_weight, batch_tokens, count
        self.sums = torch.zeros(3, dtype=torch.float64, device=weights.grad.device)  # nats, L1, counted tokens

    def __call__(self, batch: Batch) -> None:
        out = self._model(batch.tokens, batch.targets, batch.doc_ids)
        # Divided by a constant; how many tokens counted is known, on the device, when all are done.
        ((out.loss_sum + (self._l1_weight * out.l1_sum).sum()) / self._batch_tokens).backward()
        self._weights.accumulate()
        n_counted = (batch.targets != IGNORE).sum()
        self.sums += torch.stack([out.loss_sum.detach(), out.l1_sum.detach().sum(), n_counted])
        if self._count is not None:
            self._count(out.stats)


class Step:
    """One optimizer step.

    grad_norm  fp32 [] on the device, of the latest `finish`: the global norm before clipping.
    sums       float64 [3] on the device: nats, L1 and counted tokens of the step; after `finish` over all ranks.
    """

    def __init__(
        self,
        model: Transformer,
        weights: Weights,
        optimizers: list[Optimizer],
        *,
        l1_weight: Tensor,
        batch_tokens: int,
        clip: float,
        overflowed: Callable[[], Tensor],
        count: Callable[[SparsityStats], None] | None = None,
        graph_signature: Callable[[], Hashable] | None = None,
    ):
        """
        Args:
            l1_weight: fp32 [layers], what multiplies `ModelOutput.l1_sum`; changed in place between steps.
            batch_tokens: tokens per step, over all ranks and micro-batches.
            clip: the largest gradient norm, 0 for none.
            overflowed: as `twell.routing.Routing.overflowed`.
            count: takes the statistics of each micro-batch, without waiting for the device. None: none are made.
            graph_signature: replay the micro-steps from a CUDA graph, made anew whenever this changes, as
                `twell.routing.Routing.signature` does. None: launch every kernel.
        """
        self._weights, self._optimizers = weights, optimizers
        self._batch_tokens, self._clip, self._overflowed = batch_tokens, clip, overflowed
        model.counts_firing = count is not None
        micro_step = MicroStep(model, weights, l1_weight, batch_tokens, count)
        self.sums = micro_step.sums
        device = self.sums.device
        self._micro_step: Callable[[Batch], None] = micro_step
        self._replays = graph_signature is not None
        if graph_signature is not None:
            self._micro_step = GraphedMicroStep(micro_step, graph_signature, CudaRecorder(device))
        self.grad_norm = torch.zeros((), device=device)
        self._factor = torch.ones((), device=device)  # of the gradients, in `update`
        self.host_read = HostRead(device)

    def gradients(self, batches: Sequence[Batch]) -> None:
        """Sum the gradients of this rank's micro-batches, from zero."""
        self._weights.zero_grad(always_add=self._replays)
        self.sums.zero_()
        for i, batch in enumerate(batches):
            self._weights.begin(last=i == len(batches) - 1)
            self._micro_step(batch)

    def finish(self, stop: bool = False) -> StepWord:
        """Sum the gradients over ranks, find what averages and clips them, and wait for what the host must know.

        `stop`: whether this process was asked to stop.
        """
        parallel.sum_over_ranks(self.sums)
        self._weights.join()
        per_token = (self._batch_tokens / self.sums[2]).float()
        weights = self._weights
        self.grad_norm, self._factor = norm_and_factor(weights.grad, per_token, self._clip, weights.norm)
        finite = self.sums[:2].isfinite().all() & self.grad_norm.isfinite()
        return self.host_read.read(finite, self._overflowed(), stop)

    def update(self) -> None:
        """Move the weights along the averaged and clipped gradients."""
        if isinstance(self._optimizers[0], FlatAdamW):  # which scales the gradients and refreshes the weights itself
            self._optimizers[0].step(factor=self._factor)
            return
        self._weights.grad.mul_(self._factor)
        for optimizer in self._optimizers:
            optimizer.step()
        self._weights.refresh()
