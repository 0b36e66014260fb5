import pytest
import torch

from kernels import hot
from tests.kernels.stages import pack, random_activation


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n_hot", [64, 128])
def test_forward_and_backward(gated, n_hot, device):
    dense = random_activation(5, 200, 0.3, device)
    counted = torch.tensor([1, 0, 1, 1, 1], dtype=torch.int8, device=device)
    packed = pack(dense, n_hot=n_hot)
    order = packed.order
    gate = dense[:, order.order[:n_hot].long()]
    u = torch.randn(5, n_hot, device=device) if gated else torch.ones_like(gate)
    l1 = torch.empty(5, device=device)
    a_hot = hot.forward(u if gated else None, packed.rows, order.rank_of, n_hot, counted, l1)
    a = gate * u
    torch.testing.assert_close(a_hot, a)
    torch.testing.assert_close(l1, a.abs().sum(1) * counted)

    da, dl1 = torch.randn(5, n_hot, device=device), torch.tensor(0.3, device=device)
    inner, hidden = hot.backward(da, dl1, packed.rows, gated, order.rank_of, n_hot, counted)
    da = (da + 0.3 * a.sign() * counted[:, None]) * (gate != 0)
    torch.testing.assert_close(hidden, a)
    torch.testing.assert_close(inner, torch.cat([da * u, da * gate], 1) if gated else da)


def test_rows_are_copied_out_and_back(device):
    matrices = [torch.randn(20, 12, device=device) for _ in range(3)]
    order = torch.randperm(20).int().to(device)
    packed = hot.gather_rows(matrices, order, 7)
    assert torch.equal(packed, torch.cat([m[order[:7].long()] for m in matrices]))
    copies = [torch.zeros_like(m) for m in matrices]
    hot.scatter_rows(packed, copies, order, 7)
    for copy, matrix in zip(copies, matrices):
        expected = torch.zeros_like(matrix)
        expected[order[:7].long()] = matrix[order[:7].long()]
        assert torch.equal(copy, expected)
