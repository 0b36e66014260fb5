"""The coefficient of the L1 penalty: schedules, layers, and the controller on models of a model and in training."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.training import compose_config, losses, train_tiny
from tests.twell.small import batch, build
from twell.checks import validate
from twell.config import ConfigError
from twell.control import L1Control

N_LAYERS = 3
SMALL = ("data=text", "data.paths=[x]", f"model.n_layers={N_LAYERS}", "optim.schedule.warmup=0")


def control(*overrides: str, horizon_steps: int = 1000) -> L1Control:
    cfg = compose_config(*SMALL, "ffn.l1.coef=0.1", "ffn.l1.warmup_steps=0", *overrides)
    return L1Control(cfg, "cpu", horizon_steps)


def coefficients(penalty: L1Control, steps: int) -> list[float]:
    """The mean over layers at steps 0 to `steps` - 1."""
    values = []
    for step in range(steps):
        penalty.set_step(step)
        values.append(penalty.summary()["train/l1_coef"])
    return values


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (["ffn.l1.warmup_steps=4"], [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (["ffn.l1.start_step=2"], [0, 0, 1, 1, 1, 1, 1, 1, 1]),
        (["ffn.l1.start_step=2", "ffn.l1.warmup_steps=2"], [0, 0, 0, 0.5, 1, 1, 1, 1, 1]),
        (["ffn.l1.decay_step=3"], [1, 1, 1, 0, 0, 0, 0, 0, 0]),
        (
            ["ffn.l1.warmup_steps=2", "ffn.l1.decay_step=3", "ffn.l1.decay_steps=4", "ffn.l1.decay_to=0.2"],
            [0, 0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        (["ffn.dead.remedy=warmup", "optim.schedule.warmup=3"], [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1]),
        (
            ["ffn.dead.remedy=warmup", "optim.schedule.warmup=600", "optim.schedule.unit=tokens", "batch.tokens=256"],
            [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1],
        ),
    ],
)
def test_schedules(overrides: list[str], expected: list[float]):
    assert coefficients(control(*overrides), 9) == pytest.approx([0.1 * share for share in expected])


@pytest.mark.parametrize(("norm", "divisor"), [("sum", 1), ("mean", 40)])
def test_weight_gives_the_documented_penalty(norm: str, divisor: int):
    """Mean over layers of (coefficient of the layer) * (mean over counted tokens of the sum, or mean, over neurons)."""
    model = build("sparse")
    tokens, targets = batch(masked=7)
    counted = targets >= 0
    sums = []
    for block in model.blocks:
        block.ffn.register_forward_pre_hook(
            lambda ffn, args: sums.append(
                ((args[0] @ ffn.w_gate.T).relu() * (args[0] @ ffn.w_up.T)).abs().sum(-1)[counted].mean()
            )
        )
    l1_sum = model(tokens, targets).l1_sum
    penalty = control("ffn.d_ff=40", f"ffn.l1.norm={norm}", "ffn.l1.layer_weights=[1,2,0.5]")
    penalty.set_step(0)
    weighted = (torch.stack(sums) * torch.tensor([0.1, 0.2, 0.05])).mean() / divisor
    assert_close((penalty.weight * l1_sum).sum() / counted.sum(), weighted)
    logged = penalty.summary()
    assert [logged[f"train/l1_coef/layer_0{i}"] for i in range(3)] == pytest.approx([0.1, 0.2, 0.05])


def follow(
    penalty: L1Control,
    steps: int,
    slowness: float,
    gain: float = 1.0,
    pace: Callable[[int], float] = lambda step: 1.0,
    needed: Tensor | None = None,
) -> Tensor:
    """L0 [steps, layers] of a model of a model, from 1000: log L0 goes to log 30 - gain * log(coefficient / needed).

    It does so with time constant `slowness` / `pace`; each step's L0 is measured with 2 % of noise.
    """
    needed = torch.full((N_LAYERS,), 0.1) if needed is None else needed
    log_l0 = torch.full((N_LAYERS,), math.log(1000.0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for step in range(steps):
        penalty.set_step(step)
        coefficient = penalty.weight.double() * N_LAYERS
        end = (math.log(30) - gain * (coefficient.clamp(min=1e-12) / needed).log()).clamp(max=math.log(1000))
        log_l0 = log_l0 + pace(step) / slowness * (end - log_l0)
        seen.append(log_l0.exp())
        noisy = seen[-1] * (0.02 * torch.randn(N_LAYERS, generator=generator)).exp()
        penalty.observe((noisy * 1e6).long(), torch.tensor(1e6))
    return torch.stack(seen)


@pytest.mark.parametrize("gain", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("slowness", "passes_by"), [(7, 0.02), (20, 0.02), (60, 0.35)])
def test_the_target_is_reached_and_held(slowness: int, passes_by: float, gain: float):
    """Models as slow as the controller expects, three times faster, and three times slower."""
    l0 = follow(control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20"), 500, slowness, gain).mean(1)
    assert l0.min() > 12 * (1 - passes_by)
    assert (l0[400:] / 12 - 1).abs().max() < 0.05


def test_it_holds_on_while_the_learning_rate_falls():
    def pace(step: int) -> float:
        return min(1, (step + 1) / 20) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 400)))

    overrides = ("ffn.l1.target_l0=12", "ffn.l1.response_steps=20", "optim.schedule.warmup=20")
    l0 = follow(control(*overrides), 400, 20, pace=pace).mean(1)
    assert l0.min() > 11 and (l0[300:] / 12 - 1).abs().max() < 0.05


def test_steps_of_the_warm_up_count_as_their_share_of_the_learning_rate():
    penalty = control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20", "optim.schedule.warmup=10")
    rises = []
    for step in range(12):
        penalty.set_step(step)
        penalty.observe(torch.full((N_LAYERS,), 100_000), torch.tensor(100.0))
        rises.append(penalty.state()["sparsity.log_l1_coef"][0].item())
    rises = torch.tensor([math.log(0.1), *rises]).diff()
    assert_close(rises, torch.tensor([min(1, (step + 1) / 10) / 20 for step in range(12)]), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("horizon_steps", "response"), [(5, 1), (400, 40), (1200, 100)])
def test_a_short_run_has_a_fast_controller(horizon_steps: int, response: int):
    penalty = control("ffn.l1.target_l0=12", horizon_steps=horizon_steps)
    penalty.set_step(0)
    penalty.observe(torch.full((N_LAYERS,), 100_000), torch.tensor(100.0))
    penalty.set_step(1)
    assert penalty.summary()["train/l1_coef"] == pytest.approx(0.1 * math.exp(1 / response))


def test_layers_have_coefficients_of_their_own_on_request():
    needed = torch.tensor([0.05, 0.1, 0.3])
    own = control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20", "ffn.l1.per_layer=true")
    l0 = follow(own, 500, 20, needed=needed)
    assert (l0[-1] / 12 - 1).abs().max() < 0.05
    logged = own.summary()
    found = torch.tensor([logged[f"train/l1_coef/layer_0{i}"] for i in range(3)])
    assert_close(found, needed * 30 / 12, rtol=0.1, atol=0.0)

    common = control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20")
    l0 = follow(common, 500, 20, needed=needed)
    assert l0[-1].mean() == pytest.approx(12, rel=0.05) and l0[-1, 0] < 8 and l0[-1, 2] > 20
    assert not any("layer" in key for key in common.summary())


def test_it_stays_within_its_bounds():
    for target, reached in ((1, 0.4), (999, 0.025)):
        penalty = control(f"ffn.l1.target_l0={target}", "ffn.l1.response_steps=5", "ffn.l1.range=4", "ffn.d_ff=1000")
        follow(penalty, 200, 20)
        logged = penalty.summary()
        assert logged["train/l1_coef"] == pytest.approx(reached) and logged["train/l1_at_bound"] == 1
    penalty = control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20")
    follow(penalty, 200, 20)
    assert penalty.summary()["train/l1_at_bound"] == 0


def test_it_waits_for_the_warm_up():
    penalty = control("ffn.l1.target_l0=12", "ffn.l1.start_step=5", "ffn.l1.warmup_steps=10")
    follow(penalty, 15, 20)
    assert coefficients(penalty, 16)[-1] == pytest.approx(0.1)  # untouched, although L0 was 1000
    follow(penalty, 30, 20)
    assert coefficients(penalty, 16)[-1] != pytest.approx(0.1, rel=0.05)


def test_a_collapse_is_survived():
    penalty = control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20")
    penalty.set_step(0)
    penalty.observe(torch.zeros(N_LAYERS, dtype=torch.int64), torch.tensor(100.0))
    penalty.set_step(1)
    assert 0.09 < penalty.summary()["train/l1_coef"] < 0.1


def test_state_continues_the_controller():
    overrides = ("ffn.l1.target_l0=12", "ffn.l1.response_steps=20")
    first = control(*overrides)
    follow(first, 40, 20)
    second = control(*overrides)
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    for penalty in (first, second):
        penalty.set_step(40)
        penalty.observe(torch.full((N_LAYERS,), 2000), torch.tensor(100.0))
        penalty.set_step(41)
    assert torch.equal(first.weight, second.weight)
    fixed = control()  # target_l0 taken back: the coefficient is that of the config again
    for name, tensor in fixed.state().items():
        tensor.copy_(first.state()[name])
    assert coefficients(fixed, 1) == pytest.approx([0.1])


@pytest.mark.parametrize("change", ["ffn.l1.coef=0.5", "ffn.l1.range=1.1", "ffn.l1.coef=0.001"])
def test_another_start_or_range_on_resume_does_not_move_the_coefficient(change: str):
    overrides = ("ffn.l1.target_l0=12", "ffn.l1.response_steps=20")
    first, second = control(*overrides), control(*overrides, change)
    follow(first, 100, 20)
    for name, tensor in second.state().items():
        tensor.copy_(first.state()[name])
    before, after = coefficients(first, 1)[0], coefficients(second, 1)[0]
    assert after == pytest.approx(before) and not 0.09 < before < 0.11
    second.observe(torch.full((N_LAYERS,), 1200), torch.tensor(100.0))
    assert coefficients(second, 1)[0] == pytest.approx(before, rel=0.06)  # towards its bounds at most exp(1 / 20)


def test_layers_share_a_coefficient_again_when_a_resumed_run_says_so():
    own = control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20", "ffn.l1.per_layer=true")
    follow(own, 100, 20, needed=torch.tensor([0.05, 0.1, 0.3]))
    common = control("ffn.l1.target_l0=12", "ffn.l1.response_steps=20")
    for name, tensor in common.state().items():
        tensor.copy_(own.state()[name])
    common.set_step(0)
    assert len(set(common.weight.tolist())) == 1
    own.set_step(0)
    assert own.weight.min() < common.weight[0] < own.weight.max()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ffn=dense_relu", "ffn.l1.target_l0=3"], "ffn.l1.target_l0=3.0 with ffn.kind=dense_relu"),
        (["ffn.l1.target_l0=0"], "ffn.l1.target_l0=0.0: must be above 0"),
        (["ffn.l1.target_l0=513"], "at most ffn.d_ff=512"),
        (["ffn.l1.target_l0=3", "ffn.l1.coef=0"], "the controller starts from coef"),
        (["ffn.l1.target_l0=3", "ffn.l1.decay_step=3"], "ffn.l1.decay_step=3 with ffn.l1.target_l0"),
        (["ffn.l1.target_l0=3", "ffn.l1.per_layer=true", "ffn.l1.layer_weights=[1,1,1]"], "is found anyway"),
        (["ffn.l1.per_layer=true"], "ffn.l1.per_layer=true needs ffn.l1.target_l0"),
        (["ffn.l1.layer_weights=[1,2]"], "must be model.n_layers=3 numbers"),
        (["ffn.l1.layer_weights=[1,2,-1]"], "none negative"),
        (["ffn.l1.response_steps=0"], "ffn.l1.response_steps=0: must be at least 1"),
        (["ffn.l1.decay_to=0.1"], "ffn.l1.decay_to=0.1 needs ffn.l1.decay_step=N"),
        (["ffn.l1.decay_steps=10"], "ffn.l1.decay_steps=10 needs ffn.l1.decay_step=N"),
        (["ffn=dense_relu", "ffn.l1.start_step=9"], "ffn.l1.start_step=9 with ffn.kind=dense_relu"),
        (["ffn=dense_silu", "ffn.l1.layer_weights=[1,2,3]"], "ffn.l1.layer_weights=[1.0, 2.0, 3.0] with ffn.kind="),
        (["ffn.l1.target_l0=3", "ffn.l1.layer_weights=[0,0,0]"], "no layer is left to steer"),
        (["ffn.dead.remedy=warmup"], "ffn.dead.remedy=warmup with optim.schedule.warmup=0"),
        (["ffn.dead.remedy=shake"], "ffn.dead.remedy=shake: allowed are none, reinit, warmup"),
        (["ffn=dense_silu", "ffn.dead.remedy=reinit"], "ffn.dead.remedy=reinit with ffn.kind=dense_silu"),
        (["ffn=dense_relu", "ffn.dead.remedy=warmup"], "ffn.dead.remedy=warmup with ffn.kind=dense_relu"),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError) as error:
        validate(compose_config(*SMALL, *overrides))
    assert message in str(error.value)


TOWARDS_8 = (
    "ffn.l1.target_l0=8",
    "ffn.l1.coef=1e-3",
    "optim.lr=1e-2",
    "checkpoint.interval=1000",
    "eval.interval=1000",
)


@pytest.mark.parametrize(("kind", "error"), [("cosine", 0.1), ("linear", 0.1), ("constant", 0.2)])
def test_training_reaches_the_target(tmp_path, kind: str, error: float):
    """At a constant learning rate the model learns its few texts by heart meanwhile, and L0 falls by itself."""
    records = train_tiny(tmp_path, "name=a", "steps=150", f"optim.schedule.kind={kind}", "log.interval=5", *TOWARDS_8)
    l0 = [r["sparsity/l0_mean"] for r in records if "sparsity/l0_mean" in r]
    assert l0[0] > 15 and sum(l0[-2:]) / 2 == pytest.approx(8, rel=error)
    used = [r["train/l1_coef"] for r in records if "train/l1_coef" in r]
    assert min(used) > 1e-4 and max(used) < 0.3 and len(set(used)) > 25


def test_a_resumed_run_continues_the_controller_exactly(tmp_path):
    common = ("ffn.l1.per_layer=true", "ffn.l1.response_steps=20", "optim.schedule.horizon=24", *TOWARDS_8)
    whole = train_tiny(tmp_path, "name=whole", "steps=24", *common)
    train_tiny(tmp_path, "name=parts", "steps=13", *common)
    parts = train_tiny(tmp_path, "name=parts", "steps=24", *common)
    assert losses(parts) == losses(whole)
    for key in ("train/l1_coef", "train/l1_coef/layer_00", "train/l1_coef/layer_01"):
        assert [r[key] for r in parts if key in r] == [r[key] for r in whole if key in r]
