"""The coefficient of the L1 penalty: its schedule, its weight in each layer, and the controller that sets it.

loss = CE + coefficient * L1, with L1 the mean over layers and counted tokens of (sum over neurons of |a|); with norm
"mean" the sum over neurons is divided by d_ff. With ffn.l1.target_l0 a controller moves the coefficient until as many
neurons fire per token as wanted, and holds them there.

Why it settles. After a change of the coefficient c, log L0 goes to its new value as exp(-t / T), and that value falls
by about 1 for each 1 that log c rises (0.5 at the dense end, 1.5 at the sparse one). Such a quantity, measured as y
with slope y', will end at y + T y' if c stays. The controller compares this end, not the present, with the target:

    d(log c)/dt = clamp(GAIN (y + T y' - log target), -1, 1) / T

While L0 still falls from half of all neurons to a few, it waits; near the target it closes the error at rate GAIN / T.
T is ffn.l1.response_steps: by default a tenth of the schedule, and at most LONGEST_RESPONSE. A model as slow as that,
or faster, comes down to the target; one three times as slow passes it by a quarter before it returns.

Time t counts steps. Those of the learning rate's warm-up count as the share of the peak that they are trained with, for
they move the weights that much less. Those of its decay count fully: L0 falls in them because updates become less
noisy, and that ends with the decay. Reckoned in the little that the weights still move, the fall would look as if it
went on, and the controller would wait for it; nor would it have the time left to reach the target. The model answers
more slowly then, by 1 / (share of the peak), and the loop is less damped, but stable at any slowness: y' sees the
answer coming.

The coefficient stays between coef / range and coef * range, and never jumps: the controller's state is the coefficient
itself, so that a run resumed with another coef or range moves on from where it was.

All of it is arithmetic on device tensors, from statistics summed over ranks: no step waits for it, and every rank
computes the same coefficient.
"""

import math

import torch
from torch import Tensor

from twell.config import Config

GAIN = 2.0
LONGEST_RESPONSE, RESPONSES = 100, 10  # steps, and how many responses a shorter run holds
SMOOTHING = 0.2  # of T: over how long L0 is averaged
FLOOR = 0.05  # of the target: less is taken for this, so that a collapse does not dominate the average for long


def ramp(step: int, start: int, length: int) -> float:
    """0 up to step `start`, from there a straight line to 1 over `length` steps."""
    if step < start:
        return 0.0
    return (step - start) / length if step < start + length else 1.0


def lr_warmup_steps(cfg: Config) -> int:
    """Optimizer steps in which the learning rate rises."""
    lr = cfg.optim.schedule
    return lr.warmup if lr.unit == "steps" else -(-lr.warmup // cfg.batch.tokens)


def schedule(cfg: Config, step: int) -> float:
    """What multiplies the coefficient at optimizer step `step` (from 0).

    ffn.l1: 0 up to `start_step`, a straight line to 1 over `warmup_steps`; from `decay_step` on a straight line to
    `decay_to` over `decay_steps`. ffn.dead.remedy=warmup: not above a line from 0 at the end of the learning rate's
    warm-up to 1 after as many steps again.
    """
    l1 = cfg.ffn.l1
    share = ramp(step, l1.start_step, l1.warmup_steps)
    if cfg.ffn.dead.remedy == "warmup":
        steps = lr_warmup_steps(cfg)
        share = min(share, ramp(step, steps, steps))
    if l1.decay_step is not None:
        share *= 1 + (l1.decay_to - 1) * ramp(step, l1.decay_step, l1.decay_steps)
    return share


class L1Control:
    """The coefficients of all layers, on the device.

    weight  fp32 [layers]  what to multiply `ModelOutput.l1_sum` by, so that its sum can be added to `loss_sum`; one
                           tensor for the whole run, changed in place.
    """

    def __init__(self, cfg: Config, device: torch.device | str, horizon_steps: int):
        """horizon_steps: where the learning rate's schedule ends, by which the controller's own pace is set."""
        self.cfg, self.l1 = cfg, cfg.ffn.l1
        n_layers = cfg.model.n_layers
        self._width = n_layers * (cfg.ffn.d_ff if self.l1.norm == "mean" else 1)
        self._response = self.l1.response_steps or max(1, min(LONGEST_RESPONSE, horizon_steps // RESPONSES))
        self._share = 0.0  # the schedule at the current step
        self._pace = 0.0  # what the current step counts as
        options = {"dtype": torch.float64, "device": device}
        # Fixed factors of the layers, and the coefficient that the controller moves: a logarithm, NaN before it acts.
        self._factors = torch.tensor(list(self.l1.layer_weights) or [1.0] * n_layers, **options)  # [layers]
        self._log_coef = torch.full((n_layers,), math.nan, **options)
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
        self._pace = ramp(step + 1, 0, lr_warmup_steps(self.cfg))
        coef = self._log_live().exp() if self.controlled else self.l1.coef
        self._current = self._factors * coef * share
        self.weight.copy_(self._current / self._width)

    def _log_live(self) -> Tensor:
        """Logarithm of what the controller has arrived at, float64 [layers], from `coef` on."""
        log_coef = self._log_coef.nan_to_num(math.log(self.l1.coef))
        return log_coef if self.l1.per_layer else log_coef.mean().expand_as(log_coef)

    @torch.no_grad()
    def observe(self, l0_sum: Tensor, n_counted: Tensor) -> None:
        """Let the controller see the step that `set_step` announced.

        Args:
            l0_sum: int64 [layers], firings in the step, over all ranks.
            n_counted: scalar, counted tokens of the step, over all ranks.
        """
        l1 = self.l1
        l0 = l0_sum / n_counted.double()  # [layers]
        if not l1.per_layer:
            l0 = l0.mean().expand_as(l0)
        log_l0 = l0.clamp(min=FLOOR * l1.target_l0).log()
        smoothed = torch.where(self._log_l0.isnan(), log_l0, self._log_l0)
        difference = log_l0 - smoothed  # SMOOTHING * T times the slope
        passed = self._pace / self._response  # time since the last step, in T
        smoothed = smoothed + difference * min(1.0, passed / SMOOTHING)
        self._log_l0.copy_(smoothed)
        if self._share < 1:  # the schedule has not arrived yet: what is seen is not what the coefficient will give
            return
        error = smoothed + difference / SMOOTHING - math.log(l1.target_l0)
        before = self._log_live()
        low, high = (math.log(l1.coef) + sign * math.log(l1.range) for sign in (-1, 1))
        wanted = (before + GAIN * error * passed).clamp(low, high)
        self._log_coef.copy_(before + (wanted - before).clamp(-passed, passed))

    def summary(self) -> dict[str, float]:
        """What of METRICS begins with train/l1_, apart from train/l1 itself, at the current step."""
        coefficients = self._current.tolist()
        result = {"train/l1_coef": sum(coefficients) / len(coefficients)}
        if self.l1.per_layer or self.l1.layer_weights:
            result |= {f"train/l1_coef/layer_{i:02d}": value for i, value in enumerate(coefficients)}
        if self.controlled:
            distance = (self._log_live() - math.log(self.l1.coef)).abs()  # [layers]
            result["train/l1_at_bound"] = (distance > 0.999 * math.log(self.l1.range)).double().mean().item()
        return result

    def state(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint keeps, named; loading fills them in place."""
        return {"sparsity.log_l1_coef": self._log_coef, "sparsity.log_l0": self._log_l0}
