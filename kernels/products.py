"""Products over the tokens, for weight gradients, with every token in them.

cuBLAS splits a product with a long inner dimension and a small result among several groups of programs, and some
kernels that do so leave out what is beyond the last whole block of 64: see
github.com/facebookexperimental/triton/pull/2767. Here, at 16001 tokens on an H200 with CUDA 13.0, one gradient or
another was off by as much as one token contributes. So the tokens beyond are added by a product of their own, filled up
with zeros. For the same reason the number of hot neurons, an inner dimension too, is a multiple of WHOLE.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

WHOLE = 64


def over_tokens(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a^T b, [m, d], for a [n, m] and b [n, d] and any n."""
    n = a.shape[0]
    whole, fill = n - n % WHOLE, -n % WHOLE
    out = torch.mm(a[:whole].T, b[:whole], out=out)
    if fill:
        out.addmm_(pad(a[whole:], (0, 0, 0, fill)).T, pad(b[whole:], (0, 0, 0, fill)))
    return out
