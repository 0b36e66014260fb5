"""Parameter groups, optimizers, the learning-rate schedule, and gradient clipping.

`build_optimizer` gives a list of torch optimizers (one for adamw, two for muon), to be stepped in turn; their state is
saved under the names of the parameters, so it survives any change in how the optimizers group them.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from twell.adamw import FlatAdamW
from twell.config import OptimConfig, ScheduleConfig
from twell.weights import Flat


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """AdamW's groups: matrices, embeddings included, decay; norms and biases do not.

    Decay makes a matrix forget directions that the gradient no longer confirms. A norm's weight or a bias has a single
    number per channel: pulled to 0, it loses its function. GPT-3, LLaMA and their followers divide them the same way.
    """
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.ndim >= 2 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    masters: dict[str, nn.Parameter], cfg: OptimConfig, device: torch.device, flat: Flat | None = None
) -> list[Optimizer]:
    """The optimizers of `cfg.kind` for named parameters; each group's "peak_lr" is what `set_lr` multiplies.

    adamw: one AdamW over everything. muon: torch.optim.Muon on the hidden matrices (2-D parameters of the blocks) and
    AdamW on the rest. Fused kernels on CUDA and CPU; where all masters lie in `flat`, adamw is our own single pass.
    """
    hidden, others = [], []
    for name, parameter in masters.items():
        is_hidden = cfg.kind == "muon" and name.startswith("blocks.") and parameter.ndim == 2
        (hidden if is_hidden else others).append((name, parameter))
    groups = parameter_groups((p for _, p in others), cfg.weight_decay)
    options = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
    if flat is not None and not hidden:
        adamw = FlatAdamW(groups, flat, **options)
    else:
        adamw = AdamW(groups, fused=device.type in ("cuda", "cpu"), **options)
    optimizers: list[Optimizer] = [adamw]
    if hidden:
        optimizers.append(Muon(_muon_groups(hidden, cfg), lr=cfg.muon_lr, momentum=cfg.muon_momentum))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def _muon_groups(hidden: list[tuple[str, nn.Parameter]], cfg: OptimConfig) -> list[dict]:
    """Muon's groups: w_down apart, because it is stored transposed.

    torch scales the update of an [A, B] matrix by sqrt(max(1, A / B)), A being the outputs. w_down is [h, d] with d
    outputs: its learning rate takes that factor back and its decay makes up for it (torch decays by lr * weight_decay).
    """
    upright = [p for name, p in hidden if not name.endswith("w_down")]
    groups = [{"params": upright, "lr": cfg.muon_lr, "weight_decay": cfg.weight_decay}]
    transposed = [p for name, p in hidden if name.endswith("w_down")]
    if transposed:
        n_in, n_out = transposed[0].shape
        excess = math.sqrt(max(1, n_in / n_out) / max(1, n_out / n_in))
        groups.append({"params": transposed, "lr": cfg.muon_lr / excess, "weight_decay": cfg.weight_decay * excess})
    return groups


def set_lr(optimizers: list[Optimizer], factor: float) -> None:
    """Set every group's learning rate to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]


class Schedule:
    """The learning rate as a share of its peak: warm-up from 0, then cosine, wsd, linear or constant.

    cosine    half a cosine from 1 to the floor (min_lr_ratio) between warm-up and horizon (arXiv 1608.03983)
    linear    a straight line between the same points
    wsd       1, then a straight line to the floor over the last `decay` before the horizon (arXiv 2404.06395)
    constant  1

    Beyond the horizon the rate stays where it arrived.
    """

    def __init__(self, cfg: ScheduleConfig, horizon: int):
        """`horizon` is in `cfg.unit`; the caller resolves a null `cfg.horizon`."""
        self.cfg, self.horizon = cfg, horizon

    def factor(self, step: int, tokens: int) -> float:
        """Share of the peak, in [0, 1], for the step that *ends* at `step` steps and `tokens` tokens of training.

        So the first step (step=1) already learns, the step at the end of the warm-up runs at the peak and the last one
        of the horizon at the floor.
        """
        cfg = self.cfg
        now = step if cfg.unit == "steps" else tokens
        if now < cfg.warmup:
            return now / cfg.warmup
        if cfg.kind == "constant":
            return 1.0
        start = max(cfg.warmup, self.horizon - cfg.decay) if cfg.kind == "wsd" else cfg.warmup
        progress = min(1.0, max(0, now - start) / max(1, self.horizon - start))
        share = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.kind == "cosine" else 1 - progress
        return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * share


@torch.no_grad()
def norm_and_factor(
    grad: Tensor,
    scale: Tensor,
    max_norm: float,
    norm_of: Callable[[Tensor], Tensor] = torch.linalg.vector_norm,
) -> tuple[Tensor, Tensor]:
    """What `grad` times `scale` has for a norm, and what to multiply `grad` by to scale it and clip that norm.

    `grad` is the flat fp32 buffer of gradients and stays as it is, `scale` a scalar on the device; nothing waits for
    the device. `norm_of(grad)` is the norm, in case `grad` is only a part of it all. Returns (the norm [] of the scaled
    gradients before clipping, the factor [] that makes it at most `max_norm`, 0 being no limit); non-finite gradients
    give a non-finite norm.
    """
    norm = norm_of(grad) * scale
    if max_norm > 0:
        scale = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, scale


def optimizer_state(masters: dict[str, nn.Parameter], optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """All state tensors, as optim.<parameter name>.<exp_avg | exp_avg_sq | step | momentum_buffer>.

    State that a first step would create is created here, as zeros. The tensors are the optimizers' own, so filling them
    in place (as torch.distributed.checkpoint does) restores the optimizers.
    """
    names = {parameter: name for name, parameter in masters.items()}
    tensors = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if not state:
                    state.update(_initial_state(optimizer, parameter))
                for key, tensor in state.items():
                    tensors[f"optim.{names[parameter]}.{key}"] = tensor
    return tensors


def _initial_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What the optimizer's first step would start from."""
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
