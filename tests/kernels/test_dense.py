import pytest
import torch

from kernels import dense


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n, h", [(1, 3), (130, 70), (9, 1100)])
def test_activation_and_its_gradient(gated, n, h, device):
    z, u = torch.randn(n, h, device=device), torch.randn(n, h, device=device)
    counted = (torch.rand(n) < 0.7).to(device, torch.int8)
    a = torch.empty_like(z)
    count, fired, l1 = dense.activate(z, u if gated else None, a, counted)
    expected = z.relu() * (u if gated else 1)
    torch.testing.assert_close(a, expected)
    assert torch.equal(count, (z > 0).sum(1, dtype=torch.int32))
    assert torch.equal(fired, (z[counted.bool()] > 0).sum(0, dtype=torch.int32))
    torch.testing.assert_close(l1.sum(), expected[counted.bool()].abs().sum())

    da, dl1 = torch.randn(n, h, device=device), torch.tensor(0.3, device=device)
    dz, du = da.clone(), torch.empty_like(da) if gated else None
    dense.activate_backward(z, u if gated else None, dz, du, dl1, counted)
    da = da + 0.3 * expected.sign() * counted[:, None]
    torch.testing.assert_close(dz, da * (u if gated else 1) * (z > 0))
    if gated:
        torch.testing.assert_close(du, da * z.relu())


def test_nan_is_kept(device):
    z = torch.tensor([[1.0, float("nan"), -1.0]], device=device)
    a = torch.empty_like(z)
    count, _, _ = dense.activate(z, None, a, None)
    assert a.isnan().tolist() == [[False, True, False]] and count.tolist() == [2]


def test_activation_alone(device):
    z, u = torch.randn(9, 300, device=device), torch.randn(9, 300, device=device)
    a = torch.empty_like(z)
    dense.activate(z, u, a, None, stats=False)
    torch.testing.assert_close(a, z.relu() * u)
