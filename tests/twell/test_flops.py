import pytest
import torch

from tests.twell.small import build
from twell.flops import dense_flops, executed_flops, peak_flops


@pytest.mark.parametrize("kind", ["sparse", "sparse_nongated"])
@pytest.mark.parametrize("backward", [False, True])
def test_all_neurons_make_it_dense(kind, backward):
    model = build(kind)
    h = model.blocks[0].ffn.w_up.shape[0]
    assert executed_flops(model, [h] * 3, backward) == dense_flops(model, backward)


def test_without_firing_neurons_the_gate_is_left():
    model = build("sparse")
    h, d = model.blocks[0].ffn.w_up.shape
    ffn = 3 * 2 * d * h * 3  # layers, forward, matrices
    without = dense_flops(model, False) - ffn
    assert executed_flops(model, [0] * 3, False) == without + ffn / 3
    assert executed_flops(model, [0] * 3, True) == 3 * without + ffn / 3  # no gradient passes through a silent gate


def test_a_neuron_costs_its_rows():
    model = build("sparse_nongated")
    d = model.blocks[0].ffn.w_up.shape[1]
    more = executed_flops(model, [5, 6, 7], True) - executed_flops(model, [5, 6, 6], True)
    assert more == 2 * d * (1 + 4)  # y; da, dx, dw_up, dw_down


def test_unknown_hardware_has_no_peak(monkeypatch):
    assert peak_flops(torch.device("cpu")) is None
    for name, flops in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Some New Card", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0)) == flops
