"""AdamW in one pass over flat memory."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from twell.weights import Flat, padded


class FlatAdamW(AdamW):
    """torch.optim.AdamW for parameters that lie in flat memory: the same groups, the same state, the same numbers.

    A step reads and writes everything once: it scales the gradients and rounds the new masters into what the model
    computes with, too. Parameters of one group that lie side by side are updated by one kernel. Nothing waits for the
    device. The state lies as the parameters do and stays where it is; all parameters have made equally many steps.
    """

    def __init__(self, groups: list[dict], flat: Flat, *, lr: float, betas: tuple[float, float], eps: float):
        """`groups`: of views into `flat.master`; betas and eps are those of all."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self._betas = torch.tensor(betas, dtype=torch.float64, device=flat.master.device)
        exp_avg, exp_avg_sq = torch.zeros_like(flat.master), torch.zeros_like(flat.master)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._steps = torch.zeros(len(parameters), device=flat.master.device)
        for parameter, step in zip(parameters, self._steps):
            where = slice(parameter.storage_offset(), parameter.storage_offset() + parameter.numel())
            moments = {"exp_avg": exp_avg[where].view_as(parameter), "exp_avg_sq": exp_avg_sq[where].view_as(parameter)}
            self.state[parameter] = {"step": step, **moments}
        buffers = (*flat, exp_avg, exp_avg_sq)
        self._runs = [
            [tuple(buffer[run] for buffer in buffers) for run in _runs(group["params"])] for group in self.param_groups
        ]

    @torch.no_grad()
    def step(self, *, factor: Tensor | None = None) -> None:
        """Move the masters along `factor` (fp32 [] on the device; None: 1) times their gradients, which stay."""
        from kernels.optimizer import adamw  # needs triton

        self._steps += 1
        corrections = 1 - self._betas ** self._steps[0]  # float64 [2]: 1 - beta2^t would lose its digits in fp32
        if factor is None:
            factor = torch.ones((), device=self._steps.device)
        betas, eps = self.defaults["betas"], self.defaults["eps"]
        for group, runs in zip(self.param_groups, self._runs):
            options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "betas": betas, "eps": eps}
            for run in runs:
                adamw(*run, factor=factor, corrections=corrections, **options)

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, but the state is filled in place, from zeros if the other optimizer has not stepped.

        Raises ValueError if betas or eps are not those of this optimizer: a step takes them from its constructor.
        """
        for group in state_dict["param_groups"]:
            for key in ("betas", "eps"):
                if group[key] != self.defaults[key]:
                    raise ValueError(f"{key}={group[key]} in the state: this optimizer has {self.defaults[key]}")
        own = dict(self.state)
        super().load_state_dict(state_dict)
        for parameter, tensors in own.items():
            for key, tensor in tensors.items():
                tensor.copy_(self.state[parameter].get(key, torch.zeros_like(tensor)))
            self.state[parameter] = tensors


def _runs(parameters: Iterable[nn.Parameter]) -> list[slice]:
    """Where the parameters lie in flat memory, neighbours together."""
    runs: list[slice] = []
    for start, length in sorted((parameter.storage_offset(), padded(parameter.numel())) for parameter in parameters):
        first = runs.pop().start if runs and runs[-1].stop == start else start
        runs.append(slice(first, start + length))
    return runs
