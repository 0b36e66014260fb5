"""Cross-entropy of the output head without a [tokens, vocabulary] tensor.

The logits of a few thousand tokens at a time are made, turned into their gradient, multiplied into the gradients of x
and of the head's weight, and forgotten. All of it happens in the forward pass, when those logits exist anyway; backward
only multiplies by the gradient that comes in. Products run in the dtype of x; the softmax and every sum run in fp32.
"""

import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # the target of a token that the loss does not count
CHUNK_BYTES = 1 << 29  # logits held at a time; their gradient takes as much again


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int, *, compiled: bool = False, chunk: int | None = None
) -> Tensor:
    """Cross-entropy in nats of the logits x weight^T, summed over the tokens whose target is not IGNORE: fp32 [].

    Args:
        x: [n, d].
        weight: [vocab_size, d], of the dtype of x; rows from `n_vocab` on have no probability.
        targets: int64 [n].
        compiled: run what is between the products through torch.compile.
        chunk: tokens whose logits exist at a time; None: as many as CHUNK_BYTES allow.
    """
    if chunk is None:
        chunk = _chunk_tokens(len(x), weight.shape[0] * x.element_size())
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(x, weight, targets, n_vocab, compiled, chunk)
    losses = x.new_empty(len(x), dtype=_wide(x.dtype))
    for rows in _chunks(len(x), chunk):
        losses[rows], _ = _softmax(compiled)(x[rows] @ weight.T, targets[rows], n_vocab, False)
    return losses.sum().float()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, n_vocab, compiled, chunk):
        losses = x.new_empty(len(x), dtype=_wide(x.dtype))
        dx = torch.empty_like(x)
        dw = torch.zeros_like(weight, dtype=_wide(x.dtype))
        for rows in _chunks(len(x), chunk):
            logits = x[rows] @ weight.T  # [chunk, vocab_size]
            losses[rows], dlogits = _softmax(compiled)(logits, targets[rows], n_vocab, True)
            del logits
            torch.mm(dlogits, weight, out=dx[rows])
            _add_product(dw, dlogits, x[rows])
        ctx.save_for_backward(dx, dw)
        return losses.sum().float()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dx, dw = ctx.saved_tensors
        dloss = dloss.view(1, 1)  # not a scalar: torch would round it to bf16 before multiplying
        out = torch.empty_like(dx), torch.empty_like(dw, dtype=dx.dtype)
        torch.mul(dx, dloss, out=out[0])
        torch.mul(dw, dloss, out=out[1])
        return *out, None, None, None, None


def _softmax_and_gradient(
    logits: Tensor, targets: Tensor, n_vocab: int, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses [n] of logits [n, vocab_size], and the gradient of their sum in the dtype of the logits.

    Compiled, it is one kernel that reads each row once from memory and, while it is in the cache, writes its gradient.
    """
    counted = targets != IGNORE
    picked = targets.where(counted, 0)[:, None]  # [n, 1]
    ids = torch.arange(logits.shape[1], device=logits.device)
    wide = logits.to(_wide(logits.dtype))
    if n_vocab < logits.shape[1]:  # a mask, not a slice: rows of vocab_size elements stay aligned
        wide = wide.masked_fill(ids >= n_vocab, -torch.inf)
    highest = wide.amax(1, keepdim=True)  # [n, 1]
    log_total = highest + (wide - highest).exp().sum(1, keepdim=True).log()  # not logsumexp: that takes another pass
    picked_logit = logits.gather(1, picked).to(wide.dtype)
    losses = (log_total - picked_logit).squeeze(1).where(counted, 0.0)
    if not with_gradient:
        return losses, None
    gradient = (wide - log_total).exp() - (ids == picked).to(wide.dtype)
    return losses, gradient.where(counted[:, None], 0.0).to(logits.dtype)


_compiled_softmax_and_gradient = torch.compile(_softmax_and_gradient, fullgraph=True, dynamic=False)


def _softmax(compiled: bool):
    return _compiled_softmax_and_gradient if compiled else _softmax_and_gradient


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` run in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _chunk_tokens(n: int, row_bytes: int) -> int:
    """Tokens per chunk: within CHUNK_BYTES, and if possible all chunks alike, so that one shape is compiled."""
    fewest = max(1, -(-n * row_bytes // CHUNK_BYTES))
    n_chunks = next((k for k in range(fewest, 2 * fewest) if n % k == 0), fewest)
    return max(1, -(-n // n_chunks))


def _chunks(n: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, n)) for start in range(0, n, chunk)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [m, d] += a^T b for a [n, m] and b [n, d], without rounding the product when `total` is wider."""
    if total.dtype == a.dtype:
        total.addmm_(a.T, b)
    elif _adds_in_fp32(a.device):
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:
        total += a.T @ b


@functools.cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Whether torch adds products of bf16 matrices to an fp32 one there: CUDA, and not in every version."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:  # NotImplementedError, where there is no such kernel, is one
        return False
    return bool((total == 17).all())
