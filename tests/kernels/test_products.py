import pytest
import torch
from torch.testing import assert_close

from kernels.products import WHOLE, over_tokens


@pytest.mark.parametrize("n", [0, 1, WHOLE - 1, WHOLE, WHOLE + 1, 3 * WHOLE, 4 * WHOLE + 17])
@pytest.mark.parametrize("into", [True, False])
def test_every_token_counts_once(n: int, into: bool):
    generator = torch.manual_seed(n)
    a, b = torch.randn(n, 7, generator=generator).double(), torch.randn(n, 5, generator=generator).double()
    out = torch.full((7, 5), torch.nan).double() if into else None
    result = over_tokens(a, b, out)
    assert_close(result, torch.einsum("nm,nd->md", a, b))
    assert out is None or result is out
