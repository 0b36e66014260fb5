"""The optimizer step against one written out."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from data.loader import Batch
from tests.twell.small import batch, build
from twell.config import OptimConfig
from twell.loss import IGNORE
from twell.optim import build_optimizer
from twell.step import Step
from twell.weights import Weights

CPU = torch.device("cpu")
TOKENS = 4 * 17  # of the batch; not all of them count
L1_WEIGHT = 0.03


def never() -> Tensor:
    return torch.zeros((), dtype=torch.bool)


def make(dtype: torch.dtype = torch.float32, clip: float = 0.0, overflowed=never, count=None):
    """A model, its weights and its step, with a small penalty on L1."""
    model = build(dtype=dtype)
    weights = Weights(model, dtype)
    optimizers = build_optimizer(weights.masters, OptimConfig(kind="adamw", lr=1e-2), CPU, weights.flat)
    options = {
        "l1_weight": torch.full((3,), L1_WEIGHT),
        "batch_tokens": TOKENS,
        "clip": clip,
        "overflowed": overflowed,
        "count": count,
    }
    return model, weights, Step(model, weights, optimizers, **options)


def micro_batches(size: int) -> list[Batch]:
    tokens, targets = batch(b=4, masked=20)
    return [Batch(tokens[i : i + size], targets[i : i + size]) for i in range(0, 4, size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_moves_the_weights_as_written_out(size: int):
    plain = build()
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    seen = []
    model, _, step = make(clip=1.0, count=seen.append)
    for _ in range(2):
        (whole,) = micro_batches(4)
        out = plain(whole.tokens, whole.targets)
        n_counted = (whole.targets != IGNORE).sum()
        ((out.loss_sum + L1_WEIGHT * out.l1_sum.sum()) / n_counted).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        seen.clear()
        step.gradients(micro_batches(size))
        word = step.finish()
        assert not (word.nonfinite or word.overflowed or word.stop)
        step.update()
        assert_close(step.sums, torch.stack([out.loss_sum, out.l1_sum.sum(), n_counted]).double(), rtol=1e-5, atol=0)
        assert_close(step.grad_norm, norm, rtol=1e-4, atol=0)
        assert len(seen) == 4 // size and sum(stats.counted.sum() for stats in seen) == n_counted
        for (name, p), q in zip(plain.named_parameters(), model.parameters()):
            assert_close(q, p, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_start_from_zero_each_time():
    _, weights, step = make()
    step.gradients(micro_batches(2))
    first, sums = weights.grad.clone(), step.sums.clone()
    step.gradients(micro_batches(2))
    assert torch.equal(weights.grad, first) and torch.equal(step.sums, sums)


def test_bf16_trains_the_masters_and_the_model_follows():
    model, weights, step = make(torch.bfloat16)
    before = weights.masters["blocks.1.ffn.w_up"].detach().clone()
    losses = []
    for _ in range(5):
        step.gradients(micro_batches(2))
        assert not step.finish().nonfinite
        step.update()
        losses.append(step.sums[0].item())
    after = weights.masters["blocks.1.ffn.w_up"]
    assert losses == sorted(losses, reverse=True)
    assert after.dtype == torch.float32 and not torch.equal(after, before)
    assert torch.equal(model.blocks[1].ffn.w_up, after.bfloat16())


def test_kernels_take_the_same_steps(monkeypatch):
    """In fp16, which Triton's interpreter rounds to as torch does."""
    _, expected, plain = make(torch.float16, clip=0.1)
    monkeypatch.setattr("twell.weights.has_kernels", lambda device, dtype: True)
    model, weights, step = make(torch.float16, clip=0.1)
    for _ in range(3):
        for each in (plain, step):
            each.gradients(micro_batches(1))
            assert not each.finish().nonfinite
            each.update()
        assert_close(step.grad_norm, plain.grad_norm, rtol=1e-4, atol=0)
    assert expected.flat is None and weights.flat is not None
    for name, master in expected.masters.items():
        assert_close(weights.masters[name], master, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
        assert torch.equal(model.get_parameter(name), weights.masters[name].half()), name


def test_the_word_says_what_went_wrong():
    model, _, step = make(overflowed=lambda: torch.ones((), dtype=torch.bool))
    step.gradients(micro_batches(4))
    assert tuple(step.finish(stop=True)) == (False, True, True)
    with torch.no_grad():
        model.embed.weight[0, 0] = torch.nan
    step.gradients(micro_batches(4))
    assert step.finish().nonfinite


def test_what_nobody_counts_is_not_counted():
    tokens, targets = batch()
    model, _, _ = make()
    assert model(tokens, targets).stats is None
    model, _, _ = make(count=lambda stats: None)
    assert model(tokens, targets).stats is not None
