"""The sparse FFN in plain torch: the specification that every kernel is tested against, and what runs without a GPU.

Notation, here and in all of `kernels`: n tokens, d model width, h hidden width; rows are tokens.

    gated:      g = relu(x Wg^T)    u = x Wu^T    a = g * u           y = a Wd
    non-gated:                                    a = relu(x Wu^T)    y = a Wd

All weights are stored [h, d]: row j is neuron j, Wd included. Neuron j *fires* on token t when g_tj > 0 (non-gated:
a_tj > 0), judged after rounding to the dtype that the product is computed in. Where it does not fire, every gradient
through it is exactly zero, so the backward needs only the pattern P = {(t, j): j fires on t}:

    da = dy Wd^T + dL1 * sign(a)  on P (the second term on counted tokens only)
    gated:      dg = da * u    du = da * g    dx = dg Wg + du Wu    dWg = dg^T x    dWu = du^T x    dWd = a^T dy
    non-gated:                                dx = da Wu                            dWu = da^T x    dWd = a^T dy

Any device and floating dtype. Matrix products run in the dtype of the inputs, reductions to scalars at least in fp32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class FFNOutput(NamedTuple):
    """What one FFN layer returns.

    y      [..., d]  the layer's output.
    l1     []        sum over counted tokens of sum_j |a_tj|; fp32 (fp64 for fp64 inputs), differentiable.
    nnz    [n]       int32, number of neurons that fire on each token, counted or not.
    fired  [h]       int32, number of counted tokens on which each neuron fires.
    """

    y: Tensor
    l1: Tensor
    nnz: Tensor
    fired: Tensor


def with_residual(y: Tensor, residual: Tensor | None) -> Tensor:
    """residual + y, or y without a residual."""
    return y if residual is None else residual + y


class FFNGradients(NamedTuple):
    """Gradients of the inputs, each in its input's shape; `w_gate` is None for the non-gated FFN."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor


def ffn_forward(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, counted: Tensor | None = None
) -> FFNOutput:
    """Forward by dense products, differentiable by autograd.

    x [..., d]; w_gate [h, d], or None for the non-gated FFN; w_up, w_down [h, d]; counted bool [...], the tokens that
    L1 and `fired` count (None: all).
    """
    up = F.linear(x.flatten(0, -2), w_up)  # [n, h]
    if w_gate is None:
        gate = a = F.relu(up)
    else:
        gate = F.relu(F.linear(x.flatten(0, -2), w_gate))  # [n, h]
        a = gate * up
    y = a @ w_down  # [n, d]

    wide = torch.promote_types(a.dtype, torch.float32)
    l1 = a.abs().sum(-1, dtype=wide)  # [n]
    # A sum of ones in floating point: exact below 2^24, and several times faster on a CPU than counting booleans.
    fires = (gate.detach() > 0).to(gate.dtype)  # [n, h]
    nnz = fires.sum(-1, dtype=wide).int()  # [n]
    if counted is not None:
        counted = counted.flatten()  # [n]
        l1 = l1.where(counted, 0)  # not a product: an uncounted token may hold NaN
        fires = fires * counted[:, None]
    fired = fires.sum(0, dtype=wide).int()  # [h]
    return FFNOutput(y.view(*x.shape[:-1], y.shape[-1]), l1.sum(), nnz, fired)


@torch.no_grad()
def ffn_backward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    dy: Tensor,
    dl1: Tensor | float = 0.0,
    counted: Tensor | None = None,
) -> FFNGradients:
    """The backward written out on the pattern P, for gradients dy [..., d] of y and dl1 [] of l1.

    The oracle: it shares no code with autograd. Element-wise steps run at least in fp32 and are rounded to the dtype of
    `x` before each matrix product, as the kernels do.
    """
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    shape = x.shape
    x, dy = x.flatten(0, -2), dy.flatten(0, -2)  # [n, d]
    up = (x @ w_up.T).to(wide)  # [n, h]
    if w_gate is None:
        gate = a = up.relu()
    else:
        gate = (x @ w_gate.T).to(wide).relu()
        a = (gate * up).to(dtype).to(wide)

    da = (dy @ w_down.T).to(wide)  # [n, h]
    sparsity = dl1 * a.sign()
    da = da + (sparsity if counted is None else sparsity.where(counted.flatten()[:, None], 0))
    da = da.where(gate > 0, 0)

    dw_down = a.to(dtype).T @ dy
    if w_gate is None:
        du = da.to(dtype)
        return FFNGradients((du @ w_up).view(shape), None, du.T @ x, dw_down)
    dg, du = (da * up).to(dtype), (da * gate).to(dtype)
    return FFNGradients((dg @ w_gate + du @ w_up).view(shape), dg.T @ x, du.T @ x, dw_down)
