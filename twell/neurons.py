"""Dead neurons: how long each neuron has been silent, and what is done about those that never fire.

A neuron's silence is the number of counted tokens, over all ranks, in the optimizer steps since the last one in which
it fired. Within a step tokens have no order (ranks and micro-batches only slice it), so steps are what the counters
resolve, and they are equal for any number of ranks and micro-batches. A neuron is dead when its silence reaches
ffn.dead.after_tokens. The counters are kept on the device, for every ReLU kind and on every path.

Remedies (ffn.dead.remedy):
    none    count them only.
    reinit  each time after_tokens more tokens have been trained on, every dead neuron's row of w_gate (of w_up in
            the non-gated kind) becomes 0.9 row + 0.1 N(0, 0.02^2), as in arXiv 2603.23198, whose batch has as many
            tokens as its neurons may be silent. The row's optimizer moments become 0: they belong to a row that is
            no more, and the next gradients are taken at once (Adam's first update is then at most
            (1 - beta1) / sqrt(1 - beta2), about half, of the learning rate).
    warmup  prevention: neurons die while large updates of new weights meet the full penalty. It waits for the end of
            the learning rate's warm-up, and rises over as many steps again (see twell/control.py).
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from twell.config import DeadConfig
from twell.sharded import local_rows

KEPT = 0.9  # of a dead row
NOISE_STD = 0.02


class DeadNeurons:
    """The silence of all neurons of a model, and what became of the dead ones.

    On several ranks each knows the steps of all but the firings of its own share, so that a neuron's silence is the
    minimum over ranks: `merge` takes it.
    """

    def __init__(self, cfg: DeadConfig, n_layers: int, d_ff: int, device: torch.device | str):
        self.cfg = cfg
        self.silent = torch.zeros(n_layers, d_ff, dtype=torch.int64, device=device)
        self.was_dead = torch.zeros(n_layers, d_ff, dtype=torch.bool, device=device)  # at the last check
        self.revived = torch.zeros((), dtype=torch.int64, device=device)
        self.reinitialized = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, fired: Tensor, n_counted: Tensor) -> None:
        """Take in one optimizer step.

        Args:
            fired: int [layers, h], how often each neuron fired in this rank's share of it.
            n_counted: scalar on the device, counted tokens of the step over all ranks.
        """
        self.silent += n_counted.long()
        self.silent.masked_fill_(fired > 0, 0)

    def merge(self, max_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Make the silence that of all ranks, on every rank, through one in-place reduction."""
        max_over_ranks(self.silent.neg_())
        self.silent.neg_()

    def dead(self) -> Tensor:
        """bool [layers, h]; of all ranks after `merge`."""
        return self.silent >= self.cfg.after_tokens

    def due(self, tokens: int, step_tokens: int) -> bool:
        """Whether a check is due after a step of `step_tokens` tokens, `tokens` being those trained on since."""
        return tokens // self.cfg.after_tokens > (tokens - step_tokens) // self.cfg.after_tokens

    @torch.no_grad()
    def check(
        self, tensors: Mapping[str, Tensor], max_over_ranks: Callable[[Tensor], Tensor], *, seed: int, step: int
    ) -> bool:
        """Count what came to life since the last check, and reinitialise what is dead if the remedy says so.

        Returns whether weights have changed.

        Args:
            tensors: the run's own tensors under their checkpoint names: the weights that the optimizer changes, and
                its state. What is copied from these weights must be copied afterwards.
            seed, step: what the random numbers depend on, so that a resumed run draws the same.
        """
        self.merge(max_over_ranks)
        dead = self.dead()
        self.revived += (self.was_dead & ~dead).sum()
        self.was_dead.copy_(dead)
        if self.cfg.remedy != "reinit":
            return False
        n_rows = reinitialize(tensors, dead, seed=seed, step=step)
        self.reinitialized += n_rows
        return n_rows > 0

    def summary(self) -> dict[str, float]:
        """Dead shares and what became of the dead, read from the device; `merge` first."""
        share = self.dead().float().mean(1).tolist()
        result = {
            "sparsity/dead_share": sum(share) / len(share),
            "sparsity/revived": self.revived.item(),
            "sparsity/reinitialized": self.reinitialized.item(),
        }
        return result | {f"sparsity/dead_share/layer_{i:02d}": value for i, value in enumerate(share)}

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps, named; loading fills them in place. `merge` first on several ranks."""
        return {
            "sparsity.silent": self.silent,
            "sparsity.was_dead": self.was_dead,
            "sparsity.revived": self.revived,
            "sparsity.reinitialized": self.reinitialized,
        }


def reinitialize(tensors: Mapping[str, Tensor], dead: Tensor, *, seed: int, step: int) -> int:
    """Shake the dead neurons' rows in place and forget what the optimizer knew of them; returns how many there were.

    Args:
        tensors: model.blocks.<i>.ffn.<weight> [h, d], and optim.blocks.<i>.ffn.<weight>.<moment> [h, d].
        dead: bool [layers, h]; read by the host. Equal on all ranks, which must have equal devices: then they draw
            equal numbers.
    """
    rows_of_layers = [row.nonzero().squeeze(1) for row in dead.cpu()]
    for layer, rows in enumerate(rows_of_layers):
        if len(rows) == 0:
            continue
        name = f"blocks.{layer}.ffn.w_gate"
        if f"model.{name}" not in tensors:
            name = f"blocks.{layer}.ffn.w_up"
        weight, first = local_rows(tensors[f"model.{name}"])  # [h, d], or this rank's rows from `first` on
        rows = rows.to(weight.device)
        digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "little"))
        noise = torch.randn(len(rows), weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype)
        here = (rows >= first) & (rows < first + len(weight))
        rows, noise = rows[here] - first, noise[here]
        weight[rows] = KEPT * weight[rows] + (1 - KEPT) * NOISE_STD * noise
        for key, moment in tensors.items():
            if key.startswith(f"optim.{name}.") and moment.ndim == 2:
                local_rows(moment)[0][rows] = 0
    return sum(map(len, rows_of_layers))
