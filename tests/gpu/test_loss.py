"""The chunked loss on a GPU: bf16 products, fp32 sums, and no tensor of [tokens, vocabulary]."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twell.loss import _adds_in_fp32, linear_cross_entropy

GPU = torch.device("cuda", 0)
N, D, VOCAB_SIZE, N_VOCAB = 3001, 192, 5120, 5077


def case() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(GPU).manual_seed(0)
    x = torch.randn(N, D, generator=generator, device=GPU).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(VOCAB_SIZE, D, generator=generator, device=GPU)).bfloat16().requires_grad_()
    targets = torch.randint(N_VOCAB, (N,), generator=generator, device=GPU)
    targets[::7] = -100
    return x, weight, targets


def error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [1000, 1024, None])
def test_loss_and_gradients_are_those_of_exact_logits_up_to_bf16(compiled: bool, chunk: int | None):
    x, weight, targets = case()
    loss = linear_cross_entropy(x, weight, targets, N_VOCAB, compiled=compiled, chunk=chunk)
    (loss / 771).backward()
    exact_x, exact_weight = (t.detach().float().requires_grad_() for t in (x, weight))
    exact = F.cross_entropy((exact_x @ exact_weight.T)[:, :N_VOCAB], targets, ignore_index=-100, reduction="sum")
    (exact / 771).backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4)
    assert error(x.grad, exact_x.grad) < 8e-3 and error(weight.grad, exact_weight.grad) < 8e-3
    assert (weight.grad[N_VOCAB:] == 0).all()
    with torch.no_grad():
        alone = linear_cross_entropy(x, weight, targets, N_VOCAB, compiled=compiled, chunk=chunk)
    assert alone.item() == pytest.approx(loss.item(), rel=1e-6)


def test_the_weight_gradient_of_chunks_adds_up_in_fp32():
    """Else (torch before it could) every chunk's product is rounded to bf16, which also costs another pass."""
    assert _adds_in_fp32(GPU)


def test_memory_is_that_of_a_chunk():
    x, weight, targets = case()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, targets, N_VOCAB, compiled=True, chunk=256).backward()
    chunk = 2 * 256 * VOCAB_SIZE * 2  # logits and their gradient
    gradients = 3 * weight.numel() * 4 + 3 * x.numel() * 2
    assert torch.cuda.max_memory_allocated() - before < chunk + gradients + (8 << 20)
