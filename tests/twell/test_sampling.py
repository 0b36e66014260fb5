"""Which tokens may be drawn, how often, and from which numbers."""

import pytest
import torch
from torch import Tensor

from twell.config import ConfigError
from twell.sampling import GREEDY, NOT_FINITE, Sampling, next_token, uniform_numbers

ALL = Sampling(1.0, None, None)
LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3, 0.0]]).log()


def draws(logits: Tensor, n: int = 2000, temperature: float = 1.0, top_k=None, top_p=None) -> Tensor:
    """What `n` evenly spaced numbers draw: shares are exact to 1 / n."""
    uniform = torch.arange(n, dtype=torch.float64) / n
    return next_token(logits.expand(n, -1), uniform, Sampling(temperature, top_k, top_p))


def drawn(*args, **kwargs) -> set[int]:
    return set(draws(*args, **kwargs).tolist())


def test_only_what_is_allowed_is_drawn():
    assert drawn(LOGITS) == {0, 1, 2, 3}  # -inf is never drawn
    assert drawn(LOGITS, temperature=0) == {1}
    assert drawn(LOGITS, top_k=2) == {1, 3}
    assert drawn(LOGITS, top_k=99) == {0, 1, 2, 3}
    assert drawn(LOGITS, top_p=0.65) == {1, 3}
    assert drawn(LOGITS, top_p=0.75) == {1, 3, 2}
    assert drawn(LOGITS, top_p=1e-6) == {1}
    assert drawn(LOGITS, top_k=3, top_p=0.5) == {1, 3}  # of 0.9 in all, 0.4 is less than half
    assert drawn(LOGITS, top_k=3, top_p=0.43) == {1}  # but more than 0.43


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3, 0]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7, 0]),
    ],
)
def test_shares_follow_the_probabilities(settings: dict, shares: list[float]):
    counts = torch.bincount(draws(LOGITS, n=9000, **settings), minlength=5) / 9000
    assert counts.tolist() == pytest.approx(shares, abs=5e-4)


def test_rows_draw_by_their_own_logits_and_numbers():
    logits = torch.stack([LOGITS[0], LOGITS[0].flip(0), LOGITS[0]])
    ids = next_token(logits, torch.tensor([0.05, 0.05, 0.999], dtype=torch.float64), ALL)
    assert ids.tolist() == [0, 1, 3]


@pytest.mark.parametrize("settings", [{}, {"top_k": 40}, {"top_p": 0.999}])
def test_the_largest_number_draws_something_allowed(settings: dict):
    """However the sum of many probabilities is rounded."""
    logits = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))
    logits[:, ::2] = -torch.inf
    logits[:, 40_000:] = -torch.inf
    for number in (0.0, 1 - 2**-53):
        ids = next_token(
            logits,
            torch.full((3,), number, dtype=torch.float64),
            Sampling(1.0, **{"top_k": None, "top_p": None, **settings}),
        )
        assert logits.gather(1, ids[:, None]).isfinite().all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-42, 1e-300])
def test_hardly_any_temperature_is_greedy(temperature: float):
    assert drawn(LOGITS, temperature=temperature) == {1}
    assert drawn(LOGITS - 1000, temperature=temperature, top_k=3, top_p=0.9) == {1}
    assert drawn(torch.tensor([[2.0, 5.0, 5.0]]), temperature=temperature) == {1, 2}


def test_the_highest_temperature_draws_every_token_alike():
    assert drawn(LOGITS, temperature=1e6) == {0, 1, 2, 3}


@pytest.mark.parametrize("sampling", [GREEDY, ALL, Sampling(1.0, 2, 0.9)])
@pytest.mark.parametrize("bad", [[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_logits_of_a_diverged_model_give_no_token(bad: list[float], sampling: Sampling):
    logits = torch.tensor([[0.0, 1.0], bad])
    ids = next_token(logits, torch.full((2,), 0.5, dtype=torch.float64), sampling)
    assert ids[0] == 1 and ids[1] == NOT_FINITE


def test_every_seed_has_its_numbers():
    def first(seed: int) -> list[float]:
        numbers = uniform_numbers(seed)
        return [numbers.random() for _ in range(3)]

    assert first(1) == first(1)
    assert len({tuple(first(seed)) for seed in (0, 1, -1, 2**64 - 1, -(2**63))}) == 5
    assert all(0 <= number < 1 for number in first(7))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0: must be from 0"),
        ({"temperature": float("inf")}, "temperature=inf: must be from 0"),
        ({"temperature": float("nan")}, "temperature=nan: must be from 0"),
        ({"temperature": "hot"}, "temperature=hot: must be from 0"),
        ({"top_k": 0}, "top_k=0: must be a whole number"),
        ({"top_k": 2.5}, r"top_k=2\.5: must be a whole number"),
        ({"top_p": 0.0}, "top_p=0.0: must be in"),
        ({"top_p": 1.5}, "top_p=1.5: must be in"),
        ({"top_p": "most"}, "top_p=most: must be in"),
    ],
)
def test_values_out_of_range_are_named(settings: dict, message: str):
    with pytest.raises(ConfigError, match="^" + message):
        Sampling(**settings)
