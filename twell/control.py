"""The coefficient of the L1 penalty: its schedule, its weight in each layer, and the controller that sets it.

loss = CE + coefficient * L1, with L1 the mean over layers and counted tokens of (sum over neurons of |a|); with norm
"mean" the sum over neurons is divided by d_ff. With ffn.l1.target_l0 a controller moves the coefficient until as many
neurons fire per token as wanted, and holds them there.

Why it settles. After a change of the coefficient c, log L0 goes to its new value as exp(-t / T), and that value falls
by about 1 for each 1 that log c rises (0.5 at the dense end, 1.5 at the sparse one). Such a quantity, measured as y
with slope y', will end at y + T y' if c stays. The controller compares this end, not the present, with the target:

    d(log c)/dt = clamp(GAIN (y + T y' - log target), -1, 1) / T

While L0 still falls from half of all neurons to a few, it waits; near the target it closes the error at rate GAIN / T.
T is ffn.l1.response_steps. If the model is as slow as that, or faster, L0 comes down to the target without passing it;
a model three times as slow passes it by a quarter before it returns. Time counts in steps at the peak learning rate: a
step at a tenth of it moves the weights, and the clock, a tenth as far. The bounds are coef / range and coef * range.

All of it is arithmetic on device tensors, from statistics summed over ranks: no step waits for it, and every rank
computes the same coefficient.
"""

import math

import torch
from torch import Tensor

from twell.config import Config

GAIN = 2.0
SMOOTHING = 0.2  # of T: over how long L0 is averaged
FLOOR = 0.05  # of the target: less is taken for this, so that a collapse does not dominate the average for long


def ramp(step: int, start: int, length: int) -> float:
    """0 up to step `start`, from there a straight line to 1 over `length` steps."""
    if step < start:
        return 0.0
    return (step - start) / length if step < start + length else 1.0


def schedule(cfg: Config, step: int) -> float:
    """What multiplies the coefficient at optimizer step `step` (from 0).

    ffn.l1: 0 up to `start_step`, a straight line to 1 over `warmup_steps`; from `decay_step` on a straight line to
    `decay_to` over `decay_steps`. ffn.dead.remedy=warmup: not above a line from 0 at the end of the learning rate's
    warm-up to 1 after as many steps again.
    """
    l1 = cfg.ffn.l1
    share = ramp(step, l1.start_step, l1.warmup_steps)
    if cfg.ffn.dead.remedy == "warmup":
        lr = cfg.optim.schedule
        steps = lr.warmup if lr.unit == "steps" else -(-lr.warmup // cfg.batch.tokens)
        share = min(share, ramp(step, steps, steps))
    if l1.decay_step is not None:
        share *= 1 + (l1.decay_to - 1) * ramp(step, l1.decay_step, l1.decay_steps)
    return share


class L1Control:
    """The coefficients of all layers, on the device.

    weight  fp32 [layers]  what to multiply `ModelOutput.l1_sum` by, so that its sum can be added to `loss_sum`; one
                           tensor for the whole run, changed in place.
    """

    def __init__(self, cfg: Config, device: torch.device | str):
        self.cfg, self.l1 = cfg, cfg.ffn.l1
        n_layers = cfg.model.n_layers
        self._width = n_layers * (cfg.ffn.d_ff if self.l1.norm == "mean" else 1)
        self._share = 0.0  # the schedule at the current step
        options = {"dtype": torch.float64, "device": device}
        layer_weights = list(self.l1.layer_weights) or [1.0] * n_layers
        self._base = self.l1.coef * torch.tensor(layer_weights, **options)  # [layers]
        self._correction = torch.zeros(n_layers, **options)  # the controller's, a logarithm
        self._log_l0 = torch.full((n_layers,), math.nan, **options)  # smoothed; NaN before the first step
        self._current = torch.zeros(n_layers, **options)  # coefficients of the current step
        self.weight = torch.zeros(n_layers, dtype=torch.float32, device=device)

    @property
    def controlled(self) -> bool:
        """Whether `observe` is to be called after every step."""
        return self.l1.target_l0 is not None

    def set_step(self, step: int) -> None:
        """Fill `weight` for optimizer step `step` (from 0); does nothing while a fixed coefficient stays as it is."""
        share = schedule(self.cfg, step)
        if share == self._share and not self.controlled:
            return
        self._share = share
        self._current = self._base * self._share
        if self.controlled:
            self._current *= self._correction.exp()
        self.weight.copy_(self._current / self._width)

    @torch.no_grad()
    def observe(self, l0_sum: Tensor, n_counted: Tensor, pace: float) -> None:
        """Let the controller see a step.

        Args:
            l0_sum: int64 [layers], firings in the step, over all ranks.
            n_counted: scalar, counted tokens of the step, over all ranks.
            pace: the step's learning rate as a share of its peak.
        """
        l1 = self.l1
        target = math.log(l1.target_l0)
        l0 = l0_sum / n_counted.double()  # [layers]
        if not l1.per_layer:
            l0 = l0.mean().expand_as(l0)
        log_l0 = l0.clamp(min=FLOOR * l1.target_l0).log()
        smoothed = torch.where(self._log_l0.isnan(), log_l0, self._log_l0)
        difference = log_l0 - smoothed  # SMOOTHING * T times the slope
        smoothed = smoothed + difference * min(1.0, pace / (SMOOTHING * l1.response_steps))
        self._log_l0.copy_(smoothed)
        if self._share < 1:  # the schedule has not arrived yet: what is seen is not what the coefficient will give
            return
        end = smoothed + difference / SMOOTHING
        self._correction += (GAIN * (end - target)).clamp(-1, 1) * (pace / l1.response_steps)
        self._correction.clamp_(-math.log(l1.range), math.log(l1.range))

    def summary(self) -> dict[str, float]:
        """The current step's train/l1_coef, the mean over layers, and each layer's where they differ."""
        coefficients = self._current.tolist()
        result = {"train/l1_coef": sum(coefficients) / len(coefficients)}
        if self.l1.per_layer or self.l1.layer_weights:
            result |= {f"train/l1_coef/layer_{i:02d}": value for i, value in enumerate(coefficients)}
        return result

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps, named; loading fills them in place."""
        return {"sparsity.l1_correction": self._correction, "sparsity.log_l0": self._log_l0}
