import pytest
import torch
from torch.testing import assert_close

from kernels import optimizer

LR, DECAY, BETAS, EPS = 1e-2, 0.3, (0.9, 0.95), 1e-8


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (5, 13), (3, 1100)])
def test_gradients_add_up_in_fp32(shape, dtype, overwrite, device):
    grad = torch.randn(shape, device=device).to(dtype)
    buffer = torch.full((grad.numel() + 128,), 7.0, device=device)
    total = buffer[64 : 64 + grad.numel()].view(shape)
    total.copy_(torch.randn(shape))
    expected = grad.float() if overwrite else total + grad.float()
    optimizer.accumulate(total, grad, overwrite)
    assert torch.equal(total, expected)
    assert (buffer[:64] == 7).all() and (buffer[64 + grad.numel() :] == 7).all()


def test_gradients_may_be_transposed_and_not_finite(device):
    grad = torch.randn(5, 7, device=device).T
    grad[1, 2], grad[3, 4] = torch.nan, -torch.inf
    total = torch.ones(7, 5, device=device)
    optimizer.accumulate(total, grad)
    assert_close(total, 1 + grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", [1, 63, 2500])
def test_adamw_is_torch_s(n, device):
    reference = torch.nn.Parameter(torch.randn(n, device=device))
    expected = torch.optim.AdamW([reference], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    master = reference.detach().clone()
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    compute = torch.empty_like(master, dtype=torch.float16)
    size = 10.0 ** torch.randint(-12, 4, (n,), device=device)  # of each gradient
    for t in range(1, 5):
        grad = torch.randn(n, device=device) * size
        factor = torch.rand((), device=device) + 0.1
        reference.grad = grad * factor
        expected.step()
        powers = torch.tensor([BETAS[0] ** t, BETAS[1] ** t], dtype=torch.float64, device=device)
        scalars = {"factor": factor, "corrections": 1 - powers, "lr": LR, "weight_decay": DECAY}
        optimizer.adamw(master, grad, compute, exp_avg, exp_avg_sq, betas=BETAS, eps=EPS, **scalars)
        state = expected.state[reference]
        assert_close(exp_avg / size, state["exp_avg"] / size, rtol=1e-6, atol=1e-6)
        assert_close(exp_avg_sq / size**2, state["exp_avg_sq"] / size**2, rtol=1e-6, atol=1e-6)
        assert_close(master, reference.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(compute, master.half())
