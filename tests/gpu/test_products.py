"""cuBLAS, at shapes where it splits the product, must not leave out the last tokens."""

import pytest
import torch

from kernels.products import WHOLE, over_tokens

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("n", [WHOLE + 1, 1000, 4097, 16001, 32799])
@pytest.mark.parametrize("d", [768, 2048])
def test_the_last_tokens_are_in_the_product(n: int, d: int):
    last = n % WHOLE
    b = torch.ones(n, d, dtype=torch.bfloat16, device=GPU)
    wrong = []
    for m in range(64, 1281, 32):
        a = torch.zeros(n, m, dtype=torch.bfloat16, device=GPU)
        a[-last:] = 1
        if not (over_tokens(a, b) == last).all():
            wrong.append(m)
    assert not wrong
