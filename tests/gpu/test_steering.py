"""Counting and steering on a GPU: the CPU's numbers, without waiting for the device."""

import pytest
import torch

from tests.training import compose_config
from tests.twell.test_sparsity import LAYERS, H, T, firing
from twell.config import DeadConfig
from twell.control import L1Control
from twell.neurons import DeadNeurons, reinitialize
from twell.sparsity import SparsityMeter, SparsityStats

pytestmark = pytest.mark.gpu
OVERRIDES = ("ffn.l1.target_l0=5", "ffn.l1.response_steps=4", "ffn.l1.warmup_steps=2", f"model.n_layers={LAYERS}")


def steer(device: str, per_layer: bool) -> tuple[SparsityMeter, DeadNeurons, L1Control]:
    """Six steps of two micro-batches."""
    meter = SparsityMeter(LAYERS, H, T, device)
    neurons = DeadNeurons(DeadConfig(after_tokens=30), LAYERS, H, device)
    penalty = L1Control(compose_config(*OVERRIDES, f"ffn.l1.per_layer={per_layer}"), device, horizon_steps=6)
    batches = [SparsityStats(*(t.to(device) for t in firing(seed)[2])) for seed in range(12)]
    torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
    try:
        for step in range(6):
            penalty.set_step(step)
            meter.drop()
            for stats in batches[2 * step : 2 * step + 2]:
                meter.add(stats)
            n_counted = meter.step.counted.sum().double()
            neurons.update(meter.step.fired, n_counted)
            neurons.check({}, lambda tensor: tensor, seed=1, step=step)
            penalty.observe(meter.step.l0_sum(), n_counted)
            meter.accept()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return meter, neurons, penalty


@pytest.mark.parametrize("per_layer", [False, True])
def test_counts_and_coefficients_are_those_of_the_cpu(per_layer: bool):
    for mine, on_cpu in zip(steer("cuda", per_layer), steer("cpu", per_layer)):
        seen, expected = mine.summary(), on_cpu.summary()
        for summary in (seen, expected):
            summary.pop("sparsity/l0_heatmap", None)  # of numbers that are there, too
        assert seen == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_reinit_draws_equal_numbers_twice():
    def shaken() -> torch.Tensor:
        weight = torch.ones(H, 40, device="cuda")
        dead = torch.arange(H, device="cuda")[None] % 3 == 0
        assert reinitialize({"model.blocks.0.ffn.w_gate": weight}, dead, seed=1, step=2) == 5
        return weight

    weight = shaken()
    assert torch.equal(weight, shaken())
    assert (weight != 1).any(1).nonzero().flatten().tolist() == [0, 3, 6, 9, 12]


def test_counting_can_be_captured_in_a_graph():
    meter = SparsityMeter(LAYERS, H, T, "cuda")
    stats = SparsityStats(*(t.cuda() for t in firing(0)[2]))
    meter.add(stats)  # loads what capturing must not load
    meter.drop()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        meter.add(stats)
    expected = SparsityMeter(LAYERS, H, T, "cpu")
    for seed in (1, 2):
        for static, fresh in zip(stats, firing(seed)[2]):
            static.copy_(fresh)
        graph.replay()
        expected.add(firing(seed)[2])
    assert torch.equal(meter.step.all.cpu(), expected.step.all)
