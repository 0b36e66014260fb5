"""Parameter groups, optimizers, their state, the schedule, and clipping."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.twell.small import batch, build
from twell.config import OptimConfig, ScheduleConfig
from twell.optim import Schedule, build_optimizer, norm_and_factor, optimizer_state, set_lr

CPU = torch.device("cpu")
STATE = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def train(model: nn.Module, optimizers: list, steps: int, seed: int = 0) -> float:
    for step in range(steps):
        tokens, targets = batch(seed=seed + step)
        loss = model(tokens, targets).loss_sum / targets.numel()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(kind: str):
    model = build(qk_norm=True, qkv_bias=True, tied=False)
    optimizers = build_optimizer(named(model), OptimConfig(kind=kind, lr=1e-3, weight_decay=0.3), CPU)
    names = {p: name for name, p in model.named_parameters()}
    seen = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                seen.append(names[p])
                assert (group["weight_decay"] > 0) == (p.ndim == 2), names[p]
                on_muon = isinstance(optimizer, torch.optim.Muon)
                assert on_muon == (kind == "muon" and p.ndim == 2 and names[p].startswith("blocks.")), names[p]
    assert sorted(seen) == sorted(names.values())


def test_decay_is_decoupled():
    """With zero gradients one step multiplies matrices by 1 - lr * decay and leaves the rest alone."""
    for kind, matrix_lr in (("adamw", 0.01), ("muon", 0.02)):
        model, before = build(), build()
        optimizers = build_optimizer(named(model), OptimConfig(kind=kind, lr=0.01, muon_lr=0.02, weight_decay=0.5), CPU)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for optimizer in optimizers:
            optimizer.step()
        for (name, p), q in zip(model.named_parameters(), before.parameters()):
            lr = matrix_lr if name.startswith("blocks.") else 0.01
            assert_close(p.detach(), q * (1 - lr * 0.5) if p.ndim == 2 else q, msg=lambda m, name=name: f"{name}: {m}")


def test_muon_updates_are_orthogonal_and_know_that_w_down_is_transposed():
    """One step moves a matrix with A outputs and B inputs by lr * sqrt(max(1, A / B)) times a near-orthogonal one."""
    model, before = build(), build()
    optimizers = build_optimizer(named(model), OptimConfig(kind="muon", lr=0.0, muon_lr=0.02, weight_decay=0.0), CPU)
    train(model, optimizers, steps=1)
    ffn, ffn_before = model.blocks[0].ffn, before.blocks[0].ffn
    for name, stretch in (("w_up", math.sqrt(40 / 24)), ("w_down", 1.0)):
        step = (getattr(ffn_before, name) - getattr(ffn, name)).detach() / 0.02
        singular = torch.linalg.svdvals(step)
        assert singular.mean().item() == pytest.approx(stretch, rel=0.25), name
        assert singular.max() < 1.4 * stretch and singular.min() > 0.3 * stretch, name
    assert torch.equal(model.embed.weight, before.embed.weight)  # AdamW's, at rate 0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_loss_falls(kind: str):
    model = build()
    tokens, targets = batch()
    optimizers = build_optimizer(named(model), OptimConfig(kind=kind, lr=1e-2), CPU)
    first = model(tokens, targets).loss_sum.item()
    for _ in range(20):
        model(tokens, targets).loss_sum.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model(tokens, targets).loss_sum.item() < 0.5 * first


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_is_keyed_by_parameter_and_restores_exactly(kind: str):
    cfg = OptimConfig(kind=kind, lr=1e-2)
    model, copy = build(), build()
    optimizers = build_optimizer(named(model), cfg, CPU)
    train(model, optimizers, steps=3)
    state = optimizer_state(named(model), optimizers)
    hidden = {f"optim.blocks.1.attn.q.weight.{key}" for key in STATE[kind]}
    assert {name for name in state if "blocks.1.attn.q.weight" in name} == hidden
    assert {name.rpartition(".")[2] for name in state if "norm" in name} == STATE["adamw"]

    copy.load_state_dict(model.state_dict())
    restored = build_optimizer(named(copy), cfg, CPU)
    own = optimizer_state(named(copy), restored)  # created before any step: what a checkpoint is loaded into
    assert {n: (t.shape, t.dtype) for n, t in own.items()} == {n: (t.shape, t.dtype) for n, t in state.items()}
    for name, tensor in own.items():
        tensor.copy_(state[name])
    assert train(copy, restored, 3, seed=7) == train(model, optimizers, 3, seed=7)
    for p, q in zip(model.parameters(), copy.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_created_state_is_what_a_first_step_creates(kind: str):
    cfg = OptimConfig(kind=kind, lr=1e-2)
    lazy, eager = build(), build()
    optimizers = build_optimizer(named(eager), cfg, CPU)
    optimizer_state(named(eager), optimizers)
    assert train(lazy, build_optimizer(named(lazy), cfg, CPU), 3) == train(eager, optimizers, 3)


def test_set_lr_keeps_the_ratios():
    optimizers = build_optimizer(named(build()), OptimConfig(kind="muon", lr=1e-3, muon_lr=0.02), CPU)
    set_lr(optimizers, 0.5)
    set_lr(optimizers, 0.25)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.25e-3, 0.25e-3, 0.005, 0.005 / math.sqrt(40 / 24)])


@pytest.mark.parametrize("kind", ["cosine", "wsd", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_schedule_properties(kind: str, warmup: int, unit: str):
    scale = 1000 if unit == "tokens" else 1
    cfg = ScheduleConfig(kind=kind, unit=unit, warmup=warmup * scale, decay=20 * scale, min_lr_ratio=0.1)
    schedule = Schedule(cfg, horizon=100 * scale)
    factors = [schedule.factor(step, step * 1000) for step in range(1, 301)]
    assert factors[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    settled = factors[max(warmup, 1) - 1 :]
    assert max(settled) <= 1 and min(settled) >= 0.1 - 1e-12 and min(factors) > 0
    assert settled == sorted(settled, reverse=True)
    floor = 1.0 if kind == "constant" else 0.1
    assert factors[99:] == pytest.approx([floor] * 201)


def test_schedule_values():
    def factor(kind: str, step: int, **changes) -> float:
        return Schedule(ScheduleConfig(kind=kind, warmup=20, min_lr_ratio=0.2, **changes), 100).factor(step, 0)

    assert factor("cosine", 60) == pytest.approx(0.6)
    assert factor("cosine", 40) == pytest.approx(0.2 + 0.8 * (0.5 + 0.5 * math.cos(math.pi / 4)))
    assert factor("linear", 40) == pytest.approx(0.8)
    assert [factor("wsd", step, decay=40) for step in (20, 60, 70, 100)] == pytest.approx([1, 1, 0.8, 0.2])
    assert factor("wsd", 99, decay=0) == 1 and factor("wsd", 101, decay=0) == pytest.approx(0.2)
    assert factor("cosine", 10) == 0.5


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_norm_and_factor(max_norm: float):
    grad = torch.randn(17, generator=torch.manual_seed(3))
    before = grad.clone()
    norm, factor = norm_and_factor(grad, torch.tensor(3.0), max_norm)
    expected = 3 * grad.norm()
    assert_close(norm, expected)
    assert_close(factor.item(), 3 * min(1.0, max_norm / expected.item()) if max_norm else 3.0, rtol=1e-5, atol=0)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_norm_of_gradients_that_are_not_finite_is_not(value: float):
    norm, _ = norm_and_factor(torch.tensor([1.0, value, 1.0]), torch.tensor(1.0), 1.0)
    assert not norm.isfinite()
