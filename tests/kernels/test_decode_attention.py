"""One new token per row against torch's attention over the whole row."""

import pytest
import torch
import torch.nn.functional as F

from kernels.decode_attention import decode_attention, splits_for
from twell.model import rope_table, rotate


def problem(n, heads, kv, head_dim, slots, positions, dtype, device):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    positions = torch.tensor(positions, device=device)
    qkv, k_cache, v_cache = (
        make(n, heads + 2 * kv, head_dim),
        make(n, kv, slots, head_dim),
        make(n, kv, slots, head_dim),
    )
    unused = (torch.arange(slots, device=device) >= positions[:, None])[:, None, :, None]
    for cache in (k_cache, v_cache):
        cache.masked_fill_(unused, torch.nan)  # nobody may look there
    return qkv, k_cache, v_cache, positions, rope_table(slots + 3, head_dim, 100.0).to(device)


def expected(qkv, k_cache, v_cache, positions, rope):
    """(y, k_cache, v_cache) by torch, row by row."""
    kv, ys = k_cache.shape[1], []
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    for i, position in enumerate(positions.tolist()):
        q, k, v = qkv[i][None, :, None].split([qkv.shape[1] - 2 * kv, kv, kv], dim=1)  # [1, heads, 1, head_dim]
        angles = rope[:, position : position + 1]
        k_cache[i, :, position], v_cache[i, :, position] = rotate(k, angles)[0, :, 0], v[0, :, 0]
        keys, values = k_cache[i : i + 1, :, : position + 1], v_cache[i : i + 1, :, : position + 1]
        ys.append(F.scaled_dot_product_attention(rotate(q, angles), keys, values, enable_gqa=True)[0, :, 0])
    return torch.stack(ys), k_cache, v_cache


def assert_same(*shape, splits, dtype=torch.float32, device, tolerance=1e-5):
    inputs = problem(*shape, dtype, device)
    y, k_cache, v_cache = expected(*inputs)
    result = decode_attention(*inputs, splits)
    torch.testing.assert_close(result, y, rtol=tolerance, atol=tolerance)
    assert torch.equal(inputs[2].nan_to_num(), v_cache.nan_to_num())
    torch.testing.assert_close(inputs[1], k_cache, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize(("heads", "kv", "head_dim"), [(6, 2, 4), (4, 4, 32), (3, 1, 48)])
def test_every_length_of_rows(heads, kv, head_dim, splits, device):
    assert_same(5, heads, kv, head_dim, 140, [0, 1, 63, 64, 139], splits=splits, device=device)


@pytest.mark.parametrize("splits", [1, 3])
def test_half_precision(splits, device):
    shape = (2, 4, 2, 16, 80, [79, 12])
    assert_same(*shape, splits=splits, dtype=torch.float16, device=device, tolerance=3e-3)


def test_large_scores_do_not_overflow(device):
    inputs = problem(1, 2, 2, 16, 70, [69], torch.float32, device)
    inputs[0].mul_(100)
    inputs[1].mul_(100)
    y = expected(*inputs)[0]
    torch.testing.assert_close(decode_attention(*inputs, 2), y, rtol=1e-4, atol=1e-4)


def test_splits_occupy_the_device_but_are_worth_it(monkeypatch):
    monkeypatch.setattr("kernels.decode_attention.multiprocessors", lambda _: 132)
    device = torch.device("cpu")
    assert [splits_for(1, 32, slots, device) for slots in (17, 256, 1024, 8192)] == [1, 1, 4, 8]
    assert [splits_for(n, 8, 8192, device) for n in (1, 16, 64)] == [32, 2, 1]
