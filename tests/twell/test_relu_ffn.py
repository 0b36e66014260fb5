"""The FFN at inference, for few tokens and for many."""

import pytest
import torch

from kernels.decode import MAX_TOKENS
from kernels.reference import ffn_forward
from tests.kernels.ffn_cases import make_case
from twell.relu_ffn import FEW, ReluFFN, settle


def test_few_is_what_the_kernel_takes():
    assert FEW == MAX_TOKENS


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
@pytest.mark.parametrize("n", [0, 3, 5])
def test_results_are_the_references(n, impl, gated, monkeypatch):
    monkeypatch.setattr("twell.relu_ffn.FEW", 4)
    case = make_case(n, 24, 40, "50 %", gated=gated)
    layer = ReluFFN(*case.tensors[1:], impl)
    assert layer.sparse == (impl == "triton")  # without a GPU, auto is torch
    torch.testing.assert_close(layer(case.x), ffn_forward(*case.tensors).y, rtol=1e-4, atol=1e-5)
    assert not settle([layer])


class Told:
    """A layer's state as `settle` sees it, without a GPU to learn on."""

    shape = "known"

    def __init__(self, room: object = None, rate: torch.Tensor | None = None):
        self.decision = type("Decision", (), {"room": room, "rate": rate})


@pytest.mark.parametrize(
    ("room", "full", "repeats", "updates"),
    [(None, False, False, 1), ("some", False, False, 0), ("some", True, True, 1)],
)
def test_learns_from_the_first_call_and_from_overflow(room, full, repeats, updates, monkeypatch):
    updated = []
    monkeypatch.setattr("kernels.state.overflowed", lambda states: torch.tensor(full))
    monkeypatch.setattr("kernels.state.update", updated.append)
    case = make_case(1, 24, 40, "1 %")
    layers = [ReluFFN(*case.tensors[1:], "torch") for _ in range(2)]
    assert not settle(layers) and not updated
    layers[1].state = Told(room)
    assert settle(layers) is repeats
    assert updated == [[layers[1].state]] * updates


def test_share_of_neurons_that_fire_on_any_row():
    layer = ReluFFN(*make_case(1, 24, 40, "1 %").tensors[1:], "torch")
    assert layer.share_fired(3) is None
    layer.state = Told()
    assert layer.share_fired(3) is None
    layer.state = Told(rate=torch.tensor([0.0, 0.5, 1.0, 0.1], dtype=torch.float64))
    assert layer.share_fired(1) == pytest.approx(1.6 / 4)
    assert layer.share_fired(2) == pytest.approx((0.75 + 1 + 0.19) / 4)
