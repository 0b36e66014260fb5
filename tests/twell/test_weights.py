"""Masters and what the model computes with."""

import pytest
import torch
from torch.testing import assert_close

from tests.twell.small import batch, build
from twell.model import Transformer
from twell.weights import Weights


def backward(model: Transformer, seed: int) -> None:
    tokens, targets = batch(seed=seed)
    model(tokens, targets).loss_sum.backward()


def test_with_fp32_compute_the_masters_are_the_parameters():
    model, plain = build(), build()
    weights = Weights(model, torch.float32)
    assert weights.masters == dict(model.named_parameters())
    for seed in (0, 1):
        backward(model, seed)
        weights.accumulate()
        backward(plain, seed)
    for p, q in zip(model.parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad)
    assert weights.grad.norm() > 0
    weights.zero_grad()
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("always_add", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_bf16_gradients_add_up_in_fp32_and_masters_keep_small_steps(monkeypatch, kernels: bool, always_add: bool):
    monkeypatch.setattr("twell.weights.has_kernels", lambda device, dtype: kernels)
    model = build(dtype=torch.bfloat16)
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    weights = Weights(model, torch.bfloat16)
    assert dict(model.named_parameters()) == parameters  # the same objects
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert weights.masters.keys() == parameters.keys()
    addresses = [master.grad.data_ptr() for master in weights.masters.values()]

    sums = {name: torch.zeros_like(p) for name, p in exact.items()}
    for master in weights.masters.values():  # of an earlier step
        master.grad.fill_(7.0)
    weights.zero_grad(always_add)
    assert not always_add or (weights.grad == 0).all()
    for seed in (0, 1, 2):
        backward(model, seed)
        for name, p in parameters.items():
            assert p.grad.dtype == torch.bfloat16
            sums[name] += p.grad.float()
        weights.accumulate()
        assert all(p.grad is None for p in model.parameters())
    for name, master in weights.masters.items():
        assert torch.equal(master, exact[name]) and torch.equal(master.grad, sums[name])
    assert weights.grad.norm() == pytest.approx(sum(s.square().sum().item() for s in sums.values()) ** 0.5, rel=1e-5)
    assert [master.grad.data_ptr() for master in weights.masters.values()] == addresses

    with torch.no_grad():
        for _ in range(64):  # each far below the spacing of bf16 numbers near 1
            weights.masters["norm.weight"] += 1e-4
    weights.refresh()
    assert_close(model.norm.weight.float(), torch.full((24,), 1.0064), rtol=2**-8, atol=0)
    assert (model.norm.weight != 1).all()


def test_state_fills_the_masters_in_place():
    model, other = build(dtype=torch.bfloat16), build(seed=2)
    weights = Weights(model, torch.bfloat16)
    state = weights.state()
    assert state.keys() == {f"model.{name}" for name, _ in other.named_parameters()}
    for name, p in other.named_parameters():
        state[f"model.{name}"].copy_(p.detach())
    weights.refresh()
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q.bfloat16())
