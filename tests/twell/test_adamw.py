"""Our AdamW against torch's, on the weights of small models."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon
from torch.testing import assert_close

from kernels import optimizer as optimizer_kernels
from tests.training import losses, train_tiny
from tests.twell.small import build
from twell.adamw import FlatAdamW
from twell.config import OptimConfig
from twell.optim import build_optimizer, optimizer_state, set_lr
from twell.weights import Weights

CPU = torch.device("cpu")
CONFIG = OptimConfig(kind="adamw", lr=1e-2, weight_decay=0.3)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """As on a GPU, but in Triton's interpreter."""
    monkeypatch.setattr("twell.weights.has_kernels", lambda device, dtype: True)


def make(cfg: OptimConfig = CONFIG, **changes) -> tuple[Weights, FlatAdamW]:
    # fp16, which the interpreter rounds to as torch does
    weights = Weights(build(**changes), torch.float16)
    (optimizer,) = build_optimizer(weights.masters, cfg, CPU, weights.flat)
    assert type(optimizer) is FlatAdamW
    return weights, optimizer


def twin(weights: Weights) -> tuple[dict[str, nn.Parameter], AdamW]:
    """Copies of the masters, and torch's optimizer for them."""
    masters = {name: nn.Parameter(master.detach().clone()) for name, master in weights.masters.items()}
    (optimizer,) = build_optimizer(masters, CONFIG, CPU)
    assert type(optimizer) is AdamW
    return masters, optimizer


def step_both(
    weights: Weights, optimizer: FlatAdamW, masters: dict[str, nn.Parameter], other: AdamW, seed: int
) -> None:
    """One step of each along equal gradients, at another rate each time."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.rand((), generator=generator) + 0.1
    for name, master in weights.masters.items():
        master.grad.copy_(torch.randn(master.shape, generator=generator))
        masters[name].grad = factor * master.grad
    set_lr([optimizer, other], 1 / (1 + seed))
    optimizer.step(factor=factor)
    other.step()


def assert_equal_state(weights: Weights, optimizer: FlatAdamW, masters: dict[str, nn.Parameter], other: AdamW) -> None:
    ours, theirs = optimizer_state(weights.masters, [optimizer]), optimizer_state(masters, [other])
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_close(ours[name], tensor, rtol=2e-6, atol=2e-7, msg=lambda m, name=name: f"{name}: {m}")
    for name, master in masters.items():
        assert_close(weights.masters[name], master, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("changes", [{"tied": True}, {"tied": False, "qkv_bias": True, "qk_norm": True}])
def test_steps_are_torch_s_and_leave_the_model_rounded(changes):
    weights, optimizer = make(**changes)
    assert any(master.numel() % 64 for master in weights.masters.values())
    masters, other = twin(weights)
    for seed in range(4):
        step_both(weights, optimizer, masters, other, seed)
    assert_equal_state(weights, optimizer, masters, other)
    assert torch.equal(weights.flat.compute, weights.flat.master.half())


def test_without_a_factor_the_gradients_count_as_they_are():
    weights, optimizer = make()
    masters, other = twin(weights)
    for name, master in weights.masters.items():
        masters[name].grad = master.grad.fill_(0.25).clone()
    optimizer.step()
    other.step()
    assert_equal_state(weights, optimizer, masters, other)
    assert all((master.grad == 0.25).all() for master in weights.masters.values())


def test_neighbours_of_a_group_are_updated_together(monkeypatch):
    weights, optimizer = make(qkv_bias=True)
    seen = torch.zeros_like(weights.flat.master)
    launches = []

    def count(master, *_, weight_decay, **__):
        seen[master.storage_offset() : master.storage_offset() + len(master)] += 1 + (weight_decay > 0)
        launches.append(len(master))

    monkeypatch.setattr(optimizer_kernels, "adamw", count)
    optimizer.step()
    assert len(launches) < len(weights.masters)
    for name, master in weights.masters.items():
        start = master.storage_offset()
        assert (seen[start : start + master.numel()] == 1 + (master.ndim == 2)).all(), name


def test_states_are_interchangeable_as_checkpoints_are():
    weights, optimizer = make()
    masters, other = twin(weights)
    for seed in range(3):
        step_both(weights, optimizer, masters, other, seed)
    # theirs into ours, filled in place
    new_weights, new = make(seed=5)
    for name, tensor in optimizer_state(new_weights.masters, [new]).items():
        tensor.copy_(optimizer_state(masters, [other])[name])
    for name, master in new_weights.masters.items():
        master.data.copy_(masters[name])
    # ours into theirs
    new_masters, new_other = twin(weights)
    for name, tensor in optimizer_state(new_masters, [new_other]).items():
        tensor.copy_(optimizer_state(weights.masters, [optimizer])[name])
    for seed in (3, 4):
        step_both(new_weights, new, new_masters, new_other, seed)
        step_both(weights, optimizer, masters, other, seed)
    assert_equal_state(new_weights, new, new_masters, new_other)
    assert_equal_state(new_weights, new, masters, other)


def test_states_are_interchangeable_as_torch_has_it():
    weights, optimizer = make()
    masters, other = twin(weights)
    step_both(weights, optimizer, masters, other, 0)
    new_masters, new_other = twin(weights)
    new_other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    new_weights, new = make()
    for name, master in new_weights.masters.items():
        master.data.copy_(masters[name])
    new.load_state_dict(copy.deepcopy(other.state_dict()))
    step_both(new_weights, new, new_masters, new_other, 1)
    step_both(weights, optimizer, masters, other, 1)
    assert_equal_state(new_weights, new, new_masters, new_other)
    assert_equal_state(new_weights, new, masters, other)


def test_the_state_of_an_optimizer_before_its_first_step_is_zeros_and_other_betas_are_refused():
    weights, optimizer = make()
    masters, other = twin(weights)
    before = copy.deepcopy(other.state_dict())
    step_both(weights, optimizer, masters, other, 0)
    optimizer.load_state_dict(before)
    assert all((tensor == 0).all() for tensors in optimizer.state.values() for tensor in tensors.values())
    before["param_groups"][0]["betas"] = (0.5, 0.5)
    with pytest.raises(ValueError, match=r"betas=\(0.5, 0.5\) in the state: this optimizer has"):
        optimizer.load_state_dict(before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_where_it_is(value: float):
    weights, optimizer = make()
    weights.grad.zero_()
    weights.masters["blocks.1.ffn.w_up"].grad[3, 2] = value
    optimizer.step()
    for name, master in weights.masters.items():
        where = (~master.isfinite()).nonzero().tolist()
        assert where == ([[3, 2]] if name == "blocks.1.ffn.w_up" else []), name


def test_only_adamw_on_flat_weights_is_ours():
    weights, _ = make()
    muon = OptimConfig(kind="muon", lr=1e-2, muon_lr=0.02)
    kinds = [type(optimizer) for optimizer in build_optimizer(weights.masters, muon, CPU, weights.flat)]
    assert kinds == [AdamW, Muon]
    assert Weights(build(), torch.float32).flat is None


def test_no_flat_weights_where_kernels_do_not_run(monkeypatch):
    monkeypatch.undo()
    weights = Weights(build(), torch.bfloat16)
    assert weights.flat is None
    assert type(build_optimizer(weights.masters, CONFIG, CPU, weights.flat)[0]) is AdamW


@pytest.mark.slow
def test_runs_go_on_with_either_optimizer(tmp_path, monkeypatch):
    common = ("dtype=bf16", "optim.lr=1e-2", "optim.schedule.horizon=6")
    steps, step = [], FlatAdamW.step
    monkeypatch.setattr(FlatAdamW, "step", lambda self, **options: (steps.append(None), step(self, **options)))
    seen = {}
    for first in (False, True):
        name, n_steps = f"name={first}", []
        for until, kernels in ((3, first), (6, not first)):
            monkeypatch.setattr("twell.weights.has_kernels", lambda device, dtype, kernels=kernels: kernels)
            steps.clear()
            seen[first] = losses(train_tiny(tmp_path, name, f"steps={until}", *common))
            n_steps.append(len(steps))
        assert n_steps == ([3, 0] if first else [0, 3])
    assert seen[True] == pytest.approx(seen[False], rel=1e-2)  # the interpreter truncates to bf16
    assert seen[True][6] < seen[True][1]
