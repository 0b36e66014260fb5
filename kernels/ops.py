"""The public face of `kernels`: `sparse_ffn`, its checks, and the choice of implementation."""

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.reference import FFNOutput, ffn_forward, with_residual

if TYPE_CHECKING:
    from kernels.state import FFNState

__all__ = ["FFNOutput", "has_kernels", "sparse_ffn", "unsupported"]

IMPLS = ("auto", "triton", "torch")
MAX_WIDTH = 16384  # a row of d values lives in the registers of one program

log = logging.getLogger("twell")


def sparse_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    counted: Tensor | None = None,
    residual: Tensor | None = None,
    impl: str = "auto",
    state: "FFNState | None" = None,
    stats: bool = True,
) -> FFNOutput:
    """y = (relu(x w_gate^T) * (x w_up^T)) w_down, or with w_gate None y = relu(x w_up^T) w_down.

    x        [..., d]  any batch shape, empty included.
    w_gate   [h, d]    or None for the non-gated FFN.
    w_up     [h, d]
    w_down   [h, d]    row j belongs to neuron j: the transpose of what nn.Linear(h, d) stores.
    counted  bool [...], the tokens that the loss counts; the others add neither to `l1` nor to `fired`. None: all.
    residual [..., d]  what a Transformer block adds to y; or None. Then the kernels do, and `y` is the sum.
    impl     auto = with a `state`, on a GPU that is supported, the Triton path, which runs each pass sparse or dense,
             whichever the state predicts to be faster; else as torch. triton = always the sparse kernels, or an error.
             torch = dense products in plain torch.
    state    what this layer has learnt from earlier calls (`kernels.state`): how sparse it is, how large buffers must
             be. With it no call waits for the device; the caller updates it and looks for overflow. Without one, triton
             reads the number of non-zeros back to size its buffers.

    stats    False: only `y` of the result is of interest, and what else costs time may be left undefined. Without
             gradients only.

    Returns `FFNOutput(y, l1, nnz, fired)`. `l1` is a sum over tokens: the caller scales it by coef / (layers * tokens).
    Traceable by torch.compile(fullgraph=True). Under autocast, x and the weights are cast to the autocast dtype. Raises
    ValueError on wrong shapes or dtypes and NotImplementedError when impl="triton" cannot be honoured.

    >>> out = sparse_ffn(x, w_gate, w_up, w_down, counted=targets != -100, state=state)
    >>> loss = cross_entropy + coef / (n_layers * n_counted) * out.l1
    """
    _check_arguments(x, w_gate, w_up, w_down, counted, residual, impl)
    if state is not None and state.h != w_up.shape[0]:
        raise ValueError(f"state is of a layer with {state.h} neurons, w_up has {w_up.shape[0]}")
    if x.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w_up, w_down = x.to(dtype), w_up.to(dtype), w_down.to(dtype)
        w_gate = None if w_gate is None else w_gate.to(dtype)
    if x.dtype != w_up.dtype or x.device != w_up.device:
        raise ValueError(f"x is {x.dtype} on {x.device}, the weights {w_up.dtype} on {w_up.device}")
    if residual is not None and (residual.dtype != x.dtype or residual.device != x.device):
        raise ValueError(f"residual is {residual.dtype} on {residual.device}, but y {x.dtype} on {x.device}")
    reason = None if impl == "torch" else unsupported(x.device, x.dtype, x.shape[-1])
    if impl == "triton" and reason is not None:
        raise NotImplementedError(f"impl=triton: {reason}; use impl=auto or impl=torch")
    nothing_known = impl == "auto" and (state is None or x.device.type != "cuda")
    if impl == "torch" or reason is not None or nothing_known:
        y, l1, nnz, fired = ffn_forward(x, w_gate, w_up, w_down, counted)
        return FFNOutput(with_residual(y, residual), l1, nnz, fired)

    from kernels.autograd import apply

    save = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, w_gate, w_up, w_down, residual)
    )
    y, l1, nnz, fired, _, _ = apply(
        x.flatten(0, -2).contiguous(),
        None if w_gate is None else w_gate.contiguous(),
        w_up.contiguous(),
        w_down.contiguous(),
        None if counted is None else counted.flatten().contiguous(),
        None if residual is None else residual.flatten(0, -2).contiguous(),
        None if state is None else state.handle,
        impl == "triton",
        save,
        stats or save,
    )
    return FFNOutput(y.view(x.shape), l1, nnz, fired)


@torch.compiler.assume_constant_result
def unsupported(device: torch.device, dtype: torch.dtype, d: int) -> str | None:
    """Why the Triton path cannot run there, or None if it can. On a GPU that it cannot use, says so, once."""
    return _unsupported(device, dtype, d)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels to which the width does not matter replace torch's there: on GPUs that Triton supports."""
    return device.type == "cuda" and unsupported(device, dtype, 1) is None


@functools.cache
def _unsupported(device: torch.device, dtype: torch.dtype, d: int) -> str | None:
    if d > MAX_WIDTH:
        reason = f"d = {d} is wider than {MAX_WIDTH}"
    else:
        try:
            from kernels.launch import supported
        except ImportError:
            return "triton is not installed"
        reason = supported(device, dtype)
    if reason is not None and device.type == "cuda":
        log.warning("sparse_ffn runs dense products in torch: %s", reason)
    return reason


def _check_arguments(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, counted: Tensor | None, residual: Tensor | None,
    impl: str,
) -> None:  # fmt: skip
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLS)}")
    if x.ndim < 2:
        raise ValueError(f"x must be [..., tokens, d], got shape {tuple(x.shape)}")
    shape = (w_up.shape[0], x.shape[-1])
    for name, weight in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        if weight is not None and weight.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}; with x {tuple(x.shape)} and w_up {tuple(w_up.shape)} it must "
                f"be {shape} (h, d), w_down too: row j is neuron j"
            )
        if weight is not None and (weight.dtype, weight.device) != (w_up.dtype, w_up.device):
            raise ValueError(f"{name} is {weight.dtype} on {weight.device}, w_up {w_up.dtype} on {w_up.device}")
    if counted is not None and (counted.dtype != torch.bool or counted.shape != x.shape[:-1]):
        raise ValueError(
            f"counted must be bool of shape {tuple(x.shape[:-1])}, got {counted.dtype} {tuple(counted.shape)}"
        )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
