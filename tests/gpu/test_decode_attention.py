"""`decode_attention` on a GPU: the heads of real models, long rows, every dtype."""

import pytest
import torch

from kernels.decode_attention import splits_for
from tests.kernels.test_decode_attention import assert_same

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv", "head_dim"), [(32, 32, 64), (32, 8, 128), (12, 12, 64), (6, 2, 96)])
def test_heads_of_models(heads, kv, head_dim, dtype):
    positions = [0, 1, 63, 64, 65, 300, 1023, 2047]
    for splits in (1, 3, 8):
        shape = (len(positions), heads, kv, head_dim, 2048, positions)
        assert_same(*shape, splits=splits, dtype=dtype, device=DEVICE, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("n", [1, 2, 64])
def test_with_the_splits_of_an_engine(n):
    positions = torch.randint(4096, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    splits = splits_for(n, 8, 4096, DEVICE)
    assert_same(n, 32, 8, 64, 4096, positions, splits=splits, dtype=torch.bfloat16, device=DEVICE, tolerance=2e-2)
