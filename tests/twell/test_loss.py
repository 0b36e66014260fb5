"""The chunked cross-entropy against torch's, on sizes that divide nothing."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from kernels.launch import supported
from twell.loss import CHUNK_BYTES, IGNORE, _chunk_tokens, linear_cross_entropy

N, D, VOCAB_SIZE, N_VOCAB = 23, 9, 40, 37


def case(dtype: torch.dtype = torch.float32, ignored: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.manual_seed(0)
    x = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB_SIZE, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(N_VOCAB, (N,), generator=generator)
    targets[torch.randperm(N, generator=generator)[:ignored]] = IGNORE
    return x, weight, targets


def plain(x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int) -> Tensor:
    return F.cross_entropy((x @ weight.T).float()[:, :n_vocab], targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 8, N - 1, N, 100, None])
@pytest.mark.parametrize("n_vocab", [N_VOCAB, VOCAB_SIZE])
@pytest.mark.parametrize("ignored", [0, 5, N])
def test_loss_and_gradients_equal_those_of_plain_cross_entropy(chunk: int | None, n_vocab: int, ignored: int):
    ours, theirs = case(ignored=ignored), case(ignored=ignored)
    loss, expected = linear_cross_entropy(*ours, n_vocab, chunk=chunk), plain(*theirs, n_vocab)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    (3 * loss).backward()
    (3 * expected).backward()
    for a, b in zip(ours[:2], theirs[:2]):
        assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)
    assert (ours[1].grad[n_vocab:] == 0).all()
    with torch.no_grad():
        assert_close(linear_cross_entropy(*ours, n_vocab, chunk=chunk), loss, rtol=1e-6, atol=0)


def test_gradients_by_finite_differences():
    x, weight, targets = (t.double() if t.is_floating_point() else t for t in case())
    for t in (x, weight):
        t.retain_grad()
    linear_cross_entropy(x, weight, targets, N_VOCAB, chunk=6).backward()
    for t, index in ((x, (3, 2)), (weight, (5, 4))):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                t[index] += sign * 1e-4
                logits = (x @ weight.T)[:, :N_VOCAB]
                losses.append(F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum"))
                t[index] -= sign * 1e-4
        assert_close(t.grad[index], (losses[0] - losses[1]) / 2e-4, rtol=1e-5, atol=1e-7)


def test_bf16_products_with_fp32_sums():
    ours, theirs = case(torch.bfloat16), case(torch.bfloat16)
    loss, expected = linear_cross_entropy(*ours, N_VOCAB, chunk=6), plain(*theirs, N_VOCAB)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, rtol=1e-4, atol=0)
    scale = 1 / 771  # no bf16 number: the gradients must be multiplied by it, not by what it rounds to
    (loss * scale).backward()
    (expected * scale).backward()
    for a, b in zip(ours[:2], theirs[:2]):
        assert a.grad.dtype == torch.bfloat16
        assert (a.grad - b.grad).float().norm() < 4e-3 * b.grad.float().norm()


def test_large_logits_do_not_overflow():
    x, weight, targets = case(ignored=0)
    loss = linear_cross_entropy(1e4 * x, weight, targets, N_VOCAB, chunk=6)
    loss.backward()
    assert_close(loss, plain(1e4 * x, weight, targets, N_VOCAB))
    assert x.grad.isfinite().all()


def test_a_gradient_that_is_not_finite_is_passed_on():
    x, weight, targets = case()
    (linear_cross_entropy(x, weight, targets, N_VOCAB) * torch.nan).backward()
    assert x.grad.isnan().all() and weight.grad.isnan().all()


def test_chunks_are_equal_where_the_tokens_divide():
    row = 50304 * 2
    for n in (32768, 16384):
        chunk = _chunk_tokens(n, row)
        assert n % chunk == 0 and CHUNK_BYTES // 2 < chunk * row <= CHUNK_BYTES
    assert _chunk_tokens(10_007, row) * row <= CHUNK_BYTES + row  # a prime: the last chunk is smaller
    assert _chunk_tokens(5, row) == 5 and _chunk_tokens(3, 2 * CHUNK_BYTES) == 1


@pytest.mark.skipif(supported(torch.device("cpu"), torch.float32) is not None, reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [8, None])
def test_the_kernel_agrees(dtype: torch.dtype, chunk: int | None, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = case(dtype), case(dtype)
    run = functools.partial(linear_cross_entropy, n_vocab=N_VOCAB, chunk=chunk)
    expected = run(*theirs)
    (expected / 771).backward()
    monkeypatch.setattr("twell.loss.has_kernels", lambda device, dtype: True)
    loss = run(*ours)
    (loss / 771).backward()
    assert_close(loss, expected)
    for a, b in zip(ours[:2], theirs[:2]):
        assert a.grad.dtype == dtype
        assert (a.grad - b.grad).float().norm() < (2e-2 if dtype == torch.bfloat16 else 1e-6) * b.grad.float().norm()
    with torch.no_grad():
        assert_close(run(*ours), loss)
