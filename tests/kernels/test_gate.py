import pytest
import torch

from kernels.gate import gate


def unpack_bits(words: torch.Tensor, h: int) -> torch.Tensor:
    bits = words.unsqueeze(-1) >> torch.arange(32, device=words.device) & 1
    return bits.flatten(1)[:, :h].bool()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("n, d, h", [(1, 8, 1), (33, 40, 31), (65, 33, 100), (40, 64, 200)])
def test_words_and_values(n, d, h, dtype, device):
    x, w = torch.randn(n, d).to(device, dtype), torch.randn(h, d).to(device, dtype)
    words, scratch = gate(x, w)
    expected = (x.double() @ w.double().T).to(dtype)
    clear = expected.abs() > 1e-2  # the sign of others may differ by rounding
    fired = unpack_bits(words, h)
    assert torch.equal(fired[clear], (expected > 0)[clear])
    torch.testing.assert_close(scratch[fired], expected[fired], rtol=2e-3, atol=2e-3)
    assert scratch[~fired].isnan().all()  # never written
    padding = unpack_bits(words, words.shape[1] * 32)[:, h:]
    assert not padding.any()


def test_nan_fires_everywhere_in_its_row_and_nowhere_else(device):
    x, w = torch.randn(5, 16, device=device), torch.randn(40, 16, device=device)
    clean, _ = gate(x, w)
    x[2, 3] = float("nan")
    words, scratch = gate(x, w)
    assert unpack_bits(words, 40)[2].all()
    assert not unpack_bits(words, 64)[2, 40:].any()
    assert scratch[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(words[others], clean[others])
