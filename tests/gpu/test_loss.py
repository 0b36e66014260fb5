"""The chunked loss on a GPU: bf16 products, fp32 sums, and no tensor of [tokens, vocabulary]."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cross_entropy import cross_entropy
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


@pytest.mark.parametrize("chunk", [1000, 1024, None])
def test_loss_and_gradients_are_those_of_exact_logits_up_to_bf16(chunk: int | None):
    x, weight, targets = case()
    loss = linear_cross_entropy(x, weight, targets, N_VOCAB, chunk=chunk)
    (loss / 771).backward()
    exact_x, exact_weight = (t.detach().float().requires_grad_() for t in (x, weight))
    exact = F.cross_entropy((exact_x @ exact_weight.T)[:, :N_VOCAB], targets, ignore_index=-100, reduction="sum")
    (exact / 771).backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4)
    assert error(x.grad, exact_x.grad) < 8e-3 and error(weight.grad, exact_weight.grad) < 8e-3
    assert (weight.grad[N_VOCAB:] == 0).all()
    with torch.no_grad():
        alone = linear_cross_entropy(x, weight, targets, N_VOCAB, chunk=chunk)
    assert alone.item() == pytest.approx(loss.item(), rel=1e-6)


def test_the_weight_gradient_of_chunks_adds_up_in_fp32():
    """Else (torch before it could) every chunk's product is rounded to bf16, which also costs another pass."""
    assert _adds_in_fp32(GPU)


def test_memory_is_that_of_a_chunk():
    x, weight, targets = case()
    chunk = 2000
    for _ in range(2):  # the first also allocates what libraries keep
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, targets, N_VOCAB, chunk=chunk).backward()
    logits = chunk * VOCAB_SIZE * 2  # whose gradient takes their place
    gradients = weight.numel() * (4 + 2) + 2 * x.numel() * 2
    assert torch.cuda.max_memory_allocated() - before < logits + gradients + (4 << 20)


def test_a_cuda_graph_replays_it():
    x, weight, targets = case()

    def loss_and_gradients() -> list[Tensor]:
        loss = linear_cross_entropy(x, weight, targets, N_VOCAB, chunk=1000)
        return [loss.detach(), *torch.autograd.grad(loss / 771, (x, weight))]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss_and_gradients()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        replayed = loss_and_gradients()
    targets.copy_(targets.roll(1))
    graph.replay()
    for ours, expected in zip(replayed, loss_and_gradients(), strict=True):
        assert error(ours, expected.float()) < 1e-3


def test_more_logits_than_32_bits_count():
    n, vocab_size = 43_000, 50_304
    logits = torch.zeros(n, vocab_size, dtype=torch.bfloat16, device=GPU)
    logits[-1] = torch.randn(vocab_size, device=GPU)
    targets, losses = torch.full((n,), 7, device=GPU), torch.empty(n, device=GPU)
    last = logits[-1].float().requires_grad_()
    expected = F.cross_entropy(last, targets[-1])
    expected.backward()
    cross_entropy(logits, targets, losses, vocab_size, -100, True)
    assert losses[-1].item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(losses[:-1], torch.full_like(losses[:-1], math.log(vocab_size)), rtol=1e-5, atol=0)
    assert error(logits[-1], last.grad) < 5e-3
