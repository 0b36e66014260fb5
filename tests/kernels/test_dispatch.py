import pytest
import torch

from kernels import dispatch
from kernels.dispatch import Rates, Shape
from kernels.synthetic import FiringLaw

RATES = Rates()


def costs(mean: float, n_hot: int, h: int = 5632) -> float:
    rate = _rates(mean, h)
    forward, backward = dispatch.sparse_costs(Shape(16384, 2048, h, True, 2), RATES, rate, torch.tensor([n_hot]))
    return float(forward + backward)


def _rates(mean: float, h: int = 5632) -> torch.Tensor:
    biases = FiringLaw(mean).biases(h, torch.Generator().manual_seed(0))
    return torch.special.ndtr(biases).sort(descending=True).values


def test_more_non_zeros_cost_more_and_want_more_hot_neurons():
    shape = Shape(16384, 2048, 5632, True, 2)
    best = [dispatch.best_n_hot(shape, RATES, _rates(mean), backward=True) for mean in (15, 30, 60, 120, 250)]
    assert [n for n, _ in best] == sorted({n for n, _ in best})
    totals = [cost.total(True) for _, cost in best]
    assert totals == sorted(totals)
    assert costs(120, 0) > 1.5 * costs(120, best[3][0])


@pytest.mark.parametrize("gated", [True, False])
def test_dense_wins_only_when_everything_fires(gated):
    shape = Shape(16384, 2048, 5632, gated, 2)
    dense = dispatch.dense_costs(shape, RATES).total(True)
    assert dispatch.best_n_hot(shape, RATES, _rates(60), backward=True)[1].total(True) < 0.65 * dense
    assert (
        dispatch.best_n_hot(shape, RATES, torch.ones(5632, dtype=torch.float64), backward=True)[1].total(True) > dense
    )
