"""Losses and gradients against torch's, for rows shorter and longer than a block."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from kernels import cross_entropy as kernel

IGNORED = -100
BLOCK = kernel._LOSS["BLOCK"]
SIZES = [(1, 1), (37, 40), (50, 50), (BLOCK, BLOCK), (BLOCK + 3, BLOCK + 3), (BLOCK - 5, BLOCK + 9), (2 * BLOCK, 20001)]


def case(n_vocab: int, vocab_size: int, device: torch.device, n: int = 5) -> tuple[Tensor, Tensor]:
    """Logits [n, vocab_size], with what nobody may see from n_vocab on, and targets [n], one of them ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, vocab_size, generator=generator)
    logits[:, n_vocab:] = torch.nan
    targets = torch.randint(n_vocab, (n,), generator=generator)
    targets[0], targets[1], targets[2] = n_vocab - 1, IGNORED, 0
    return logits.to(device), targets.to(device)


def run(logits: Tensor, targets: Tensor, n_vocab: int, gradient: bool = True) -> tuple[Tensor, Tensor]:
    """(losses, what has become of the logits)."""
    losses, logits = torch.full((len(logits),), torch.nan, device=logits.device), logits.clone()
    kernel.cross_entropy(logits, targets, losses, n_vocab, IGNORED, gradient)
    return losses, logits


def expected(logits: Tensor, targets: Tensor, n_vocab: int) -> tuple[Tensor, Tensor]:
    """The same by torch, in fp64."""
    exact = logits[:, :n_vocab].double().requires_grad_()
    losses = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    losses.sum().backward()
    return losses.detach().float(), F.pad(exact.grad, (0, logits.shape[1] - n_vocab)).float()


@pytest.mark.parametrize(("n_vocab", "vocab_size"), SIZES)
def test_losses_and_gradients(n_vocab: int, vocab_size: int, device: torch.device):
    logits, targets = case(n_vocab, vocab_size, device)
    losses, gradient = run(logits, targets, n_vocab)
    assert_close((losses, gradient), expected(logits, targets, n_vocab), rtol=1e-5, atol=1e-6)
    assert losses[1] == 0 and (gradient[1] == 0).all() and (gradient[:, n_vocab:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, device: torch.device):
    logits, targets = case(BLOCK + 3, BLOCK + 8, device)
    logits = logits.to(dtype)
    losses, gradient = run(logits, targets, BLOCK + 3)
    assert gradient.dtype == dtype
    exact_losses, exact_gradient = expected(logits, targets, BLOCK + 3)
    assert_close(losses, exact_losses, rtol=1e-5, atol=1e-6)
    assert_close(gradient.float(), exact_gradient, rtol=1e-2, atol=1e-7)


def test_losses_alone_leave_the_logits(device: torch.device):
    logits, targets = case(BLOCK + 3, BLOCK + 8, device)
    losses, after = run(logits, targets, BLOCK + 3, gradient=False)
    assert torch.equal(losses, run(logits, targets, BLOCK + 3)[0])
    assert_close(after, logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_do_not_overflow(size: float, device: torch.device):
    logits, targets = case(37, 40, device)
    losses, gradient = run(size * logits, targets, 37)
    exact_losses, exact_gradient = expected(size * logits, targets, 37)
    assert_close(losses, exact_losses, rtol=1e-6, atol=size * 1e-6)
    assert_close(gradient, exact_gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_its_row_alone(value: float, device: torch.device):
    logits, targets = case(BLOCK + 30, BLOCK + 40, device)
    logits[1:3, 5] = value  # row 1 is ignored
    losses, gradient = run(logits, targets, BLOCK + 30)
    assert losses.isfinite().tolist() == [True, True, False, True, True]
    assert gradient.isfinite().all(1).tolist() == [True, True, False, True, True]


def test_logits_of_minus_infinity_have_no_probability(device: torch.device):
    logits, targets = case(37, 40, device)
    logits[:, 1:20] = -torch.inf
    targets[3:] = 30
    assert_close(run(logits, targets, 37), expected(logits, targets, 37), rtol=1e-5, atol=1e-6)
    logits[3, :37] = -torch.inf
    assert run(logits, targets, 37)[0].isnan().tolist() == [False, False, False, True, False]


def test_nothing_counted(device: torch.device):
    logits, targets = case(37, 40, device)
    losses, gradient = run(logits, torch.full_like(targets, IGNORED), 37)
    assert (losses == 0).all() and (gradient == 0).all()
    assert run(logits[:0], targets[:0], 37)[0].shape == (0,)


def test_a_target_that_is_no_id_gives_nan(device: torch.device):
    logits, targets = case(37, 40, device)
    targets[:] = torch.tensor([37, 1 << 32, 10_000, -1, 36])
    assert run(logits, targets, 37)[0].isnan().tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("shape", [(), (3, 5), (7, 1201), (0, 4)])
@pytest.mark.parametrize(("source", "dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
def test_scaled(shape: tuple[int, ...], source: torch.dtype, dtype: torch.dtype, device: torch.device):
    t = torch.randn(shape, device=device).to(source)
    factor = torch.tensor(1 / 771, device=device)  # no bf16 number
    result = kernel.scaled(t, factor, dtype)
    assert (result.shape, result.dtype) == (t.shape, dtype)
    exact = t.float() / 771
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-3  # the interpreter truncates
    assert_close(result.float(), exact, rtol=tolerance, atol=1e-7)
