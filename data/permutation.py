"""A pseudo-random permutation of range(n) that is computed, not stored: O(1) memory whatever n is."""

import numpy as np

_ROUNDS = 6


def permute(indices: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Where each index goes under the permutation of range(n) that `key` selects; int64, the shape of `indices`.

    A Feistel network permutes the next power of four; results that fall outside range(n) go through it again
    until they are inside (cycle walking, fewer than 4 passes on average), which keeps it a bijection of range(n).
    """
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)  # bits in each half
    round_keys = [_mix(np.uint64(r + 1), key) for r in range(_ROUNDS)]
    out = np.asarray(indices, dtype=np.uint64)
    todo = np.ones(out.shape, dtype=bool)
    out = out.copy()
    while todo.any():
        out[todo] = _feistel(out[todo], half, round_keys)
        todo &= out >= np.uint64(n)
    return out.astype(np.int64)


def _feistel(x: np.ndarray, half: int, round_keys: list[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for round_key in round_keys:
        left, right = right, left ^ (_splitmix(right + round_key) & mask)
    return left << shift | right


def _mix(x: np.uint64, key: tuple[int, ...]) -> np.uint64:
    state = np.array([x], dtype=np.uint64)
    for part in key:
        state = _splitmix(state ^ np.uint64(part % (1 << 64)))
    return state[0]


def _splitmix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
