"""Accumulation and AdamW on flat memory on a GPU, against torch's own fused kernels."""

import pytest
import torch
from torch.testing import assert_close

from data.loader import Batch
from kernels import optimizer
from tests.training import train_tiny
from tests.twell.small import batch, build
from twell.adamw import FlatAdamW
from twell.config import OptimConfig
from twell.optim import build_optimizer, optimizer_state, set_lr
from twell.step import Step
from twell.weights import Weights

GPU = torch.device("cuda", 0)
CONFIG = OptimConfig(kind="adamw", lr=1e-2, weight_decay=0.3)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [1, 4099, 1_000_003, 1 << 22])
def test_gradients_add_up_exactly(n: int, dtype: torch.dtype, overwrite: bool):
    total, grad = torch.randn(n, device=GPU), torch.randn(n, device=GPU).to(dtype)
    expected = grad.float() if overwrite else total + grad.float()
    optimizer.accumulate(total, grad, overwrite)
    assert torch.equal(total, expected)


def test_offsets_pass_the_range_of_int32():
    n = (1 << 31) + 3 * 64
    total = torch.zeros(n, device=GPU)
    grad = torch.full((n,), 0.5, dtype=torch.bfloat16, device=GPU)
    optimizer.accumulate(total, grad)
    assert (total[-1 << 20 :] == 0.5).all() and (total[: 1 << 20] == 0.5).all()
    assert total.sum(dtype=torch.float64) == n / 2


@pytest.mark.parametrize("tied", [True, False])
def test_steps_are_those_of_the_fused_adamw(tied: bool):
    weights = Weights(build(tied=tied, d_model=204, d_ff=1001, n_layers=5).to(GPU), torch.bfloat16)
    (ours,) = build_optimizer(weights.masters, CONFIG, GPU, weights.flat)
    assert type(ours) is FlatAdamW
    masters = {name: torch.nn.Parameter(master.detach().clone()) for name, master in weights.masters.items()}
    (fused,) = build_optimizer(masters, CONFIG, GPU)
    assert type(fused) is torch.optim.AdamW
    for step in range(5):
        factor = torch.rand((), device=GPU) + 0.1
        for name, master in weights.masters.items():
            master.grad.normal_()
            masters[name].grad = factor * master.grad
        set_lr([ours, fused], 1 / (1 + step))
        ours.step(factor=factor)
        fused.step()
    expected = optimizer_state(masters, [fused])
    for name, tensor in optimizer_state(weights.masters, [ours]).items():
        assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    for name, master in weights.masters.items():
        assert_close(master, masters[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(weights.flat.compute, weights.flat.master.bfloat16())


def test_accumulation_is_captured():
    model = build(dtype=torch.bfloat16).to(GPU)
    weights = Weights(model, torch.bfloat16)
    grads = [torch.randn_like(p) for p in model.parameters()]

    def accumulate() -> None:
        for p, grad in zip(model.parameters(), grads):
            p.grad = grad
        weights.accumulate()

    weights.zero_grad(always_add=True)
    accumulate()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate()
    weights.zero_grad(always_add=True)
    for grad in grads:
        grad.fill_(0.5)
    for _ in range(3):
        graph.replay()
    for name, master in weights.masters.items():
        assert (master.grad == 1.5).all(), name


def test_a_step_waits_for_the_device_in_one_place_only():
    model = build(dtype=torch.bfloat16).to(GPU)
    weights = Weights(model, torch.bfloat16)
    optimizers = build_optimizer(weights.masters, CONFIG, GPU, weights.flat)
    tokens, targets = (t.to(GPU) for t in batch())
    options = {"l1_weight": torch.zeros(3, device=GPU), "batch_tokens": targets.numel(), "clip": 1.0}
    step = Step(model, weights, optimizers, overflowed=lambda: torch.zeros((), dtype=torch.bool, device=GPU), **options)
    for i in range(3):
        step.gradients([Batch(tokens, targets)] * 2)
        assert not step.finish().nonfinite
        torch.cuda.set_sync_debug_mode("error" if i else "default")
        try:
            step.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for name, p in model.named_parameters():
        assert torch.equal(p, weights.masters[name].bfloat16()), name


@pytest.mark.parametrize(
    ("kind", "dtype", "uses"), [("adamw", "bf16", True), ("adamw", "fp32", False), ("muon", "bf16", False)]
)
def test_the_trainer_uses_it_for_adamw_in_bf16(tmp_path, monkeypatch, kind: str, dtype: str, uses: bool):
    steps, step = [], FlatAdamW.step
    monkeypatch.setattr(FlatAdamW, "step", lambda self, **options: (steps.append(None), step(self, **options)))
    train_tiny(tmp_path, "name=a", "device=cuda", f"optim={kind}", f"dtype={dtype}", "steps=3", "compile=false")
    assert len(steps) == (3 if uses else 0)
