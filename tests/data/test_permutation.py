import numpy as np
import pytest

from data.permutation import permute


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 255, 1000, 4097, 65536, 70001])
def test_is_a_bijection(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key=(7, 0))), np.arange(n))


def test_each_key_gives_its_own_order_and_always_the_same():
    orders = [permute(np.arange(1000), 1000, key=key) for key in [(1, 0), (1, 1), (2, 0), (0, 1)]]
    for i, order in enumerate(orders):
        for other in orders[i + 1 :]:
            assert np.mean(order == other) < 0.02
    assert np.array_equal(permute(np.arange(1000), 1000, key=(1, 0)), orders[0])


def test_an_index_does_not_depend_on_its_neighbours():
    n = 10**12 + 39  # far more than could be stored
    together = permute(np.arange(n - 50, n), n, key=(3,))
    alone = [int(permute(np.array([i]), n, key=(3,))[0]) for i in range(n - 50, n)]
    assert together.tolist() == alone
    assert len(set(alone)) == 50 and all(0 <= i < n for i in alone)


def test_positions_look_uniform():
    """Means over many keys of where index 0 goes: n/2 within 5 standard errors."""
    n, keys = 1001, 2000
    where = np.array([permute(np.array([0]), n, key=(k,))[0] for k in range(keys)])
    assert abs(where.mean() - n / 2) < 5 * n / np.sqrt(12 * keys)
    assert len(np.unique(where)) > 800
