"""The stages together, with hot neurons, which layers as small as a test's would not choose by themselves."""

import pytest
import torch

from kernels import sparse
from kernels.order import make_order
from kernels.reference import ffn_backward, ffn_forward
from kernels.sparse import Room
from tests.kernels.ffn_cases import make_case


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n_hot", [64, 128, 140])
def test_hot_and_cold_neurons_together(n_hot, gated, device):
    n, d, h = 7, 24, 140
    case = make_case(n, d, h, "50 %", gated=gated, device=device, masked=True)
    permutation = torch.randperm(h, generator=torch.Generator().manual_seed(0)).to(device)
    order = make_order(permutation, n_hot)
    tiles = sparse.cold_tiles(h, order)
    weights = case.tensors[1:]
    counted, dl1 = case.counted.view(torch.int8), torch.tensor(0.1, device=device)
    room = Room(n * h, n * tiles, n * tiles)
    out = sparse.forward(case.x, *weights, counted, order, room, None, True)
    gradients = sparse.backward(case.dy, dl1, case.x, *weights, counted, order, n * tiles, None, out.rows)
    with_residual = sparse.forward(case.x, *weights, counted, order, room, None, True, residual=case.dy)

    expected = ffn_forward(case.x, *weights, case.counted)
    torch.testing.assert_close(out.y, expected.y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(with_residual.y, out.y + case.dy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.l1, expected.l1, rtol=1e-4, atol=1e-4)
    assert torch.equal(out.rows.count, expected.nnz) and torch.equal(out.fired, expected.fired)
    for gradient, wanted in zip(gradients, ffn_backward(case.x, *weights, case.dy, dl1, case.counted)):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


def test_buffers_are_measured_when_no_room_is_given(device):
    n, d, h = 3, 8, 100
    case = make_case(n, d, h, "all", device=device)  # more than the first guess of 64 entries a token
    out = sparse.forward(*case.tensors, None, make_order(torch.arange(h, device=device), 0), None, None, False)
    torch.testing.assert_close(out.y, ffn_forward(*case.tensors).y, rtol=1e-4, atol=1e-4)
    assert out.shape.entries >= n * h
