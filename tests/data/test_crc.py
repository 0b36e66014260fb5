import zlib

import numpy as np
import pytest

from data.crc import joined_crc32


@pytest.mark.parametrize("sizes", [(0, 0), (0, 9), (9, 0), (1, 1), (7, 4096), (100_003, 65_537)])
def test_joined_is_the_checksum_of_both(sizes):
    first, second = (np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes))
    assert joined_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
