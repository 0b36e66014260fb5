import pytest
import torch

from kernels.reference import ffn_forward
from kernels.synthetic import FiringLaw, MaskProblem, Problem


def counts(law: FiringLaw, **kwargs):
    problem = Problem(law, 64, 700, dtype=torch.float32, **kwargs)
    x, _ = problem.batch(2000, 0)
    out = ffn_forward(x, *problem.weights)
    return out.nnz.float(), out.fired / len(x)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("mean", [7, 70])
def test_rates_follow_the_law(gated, mean):
    nnz, rate = counts(FiringLaw(mean, dead=0.3), gated=gated)
    assert nnz.mean() == pytest.approx(mean, rel=0.15)
    assert 0.2 < (rate == 0).float().mean() < 0.6  # the dead, and some that are merely rare
    assert rate.max() < 0.56  # capped at one half
    assert rate.max() > 5 * rate.mean()  # and far from equal
    assert not torch.equal(rate, rate.sort(descending=True).values)  # shuffled


def test_spread_over_tokens_is_log_normal():
    equal, _ = counts(FiringLaw(70))
    spread, _ = counts(FiringLaw(70, token_sigma=0.6))
    assert spread.mean() == pytest.approx(70, rel=0.2)
    assert equal.clamp(min=1).log().std() < 0.4
    assert spread.clamp(min=1).log().std() == pytest.approx(0.65, abs=0.12)  # 0.6, and the noise of counting


def test_every_neuron_on_every_token():
    nnz, _ = counts(FiringLaw(700))
    assert (nnz == 700).all()


def test_batches_differ_and_repeat():
    problem, again = (Problem(FiringLaw(5), 16, 64, seed=3) for _ in range(2))
    assert torch.equal(problem.batch(9, 1)[0], again.batch(9, 1)[0])
    assert not torch.equal(problem.batch(9, 1)[0], problem.batch(9, 2)[0])
    assert not torch.equal(problem.weights.up, Problem(FiringLaw(5), 16, 64, seed=4).weights.up)


def test_a_mask_is_met_exactly():
    mask = torch.rand(60, 40, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 0.3, 40)
    mask[7] = True  # a heavy token
    problem = MaskProblem(mask, 24)
    assert problem.mismatches == 0
    x, dy = problem.batch(45, 1)  # more than the half that holds it
    out = ffn_forward(x, *problem.weights)
    assert torch.equal(out.nnz, mask[30:].sum(1).int()[torch.arange(45) % 30])
    assert dy.shape == x.shape
    heavy = [bool((ffn_forward(problem.batch(30, number)[0], *problem.weights).nnz == 40).any()) for number in range(4)]
    assert heavy == [True, False, True, False]  # the halves do not share tokens


def test_a_mask_beyond_reach_is_reported():
    mask = torch.rand(60, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    assert MaskProblem(mask, 3).mismatches > 0
