"""The public face of `kernels`: `sparse_ffn`, its checks, and the choice of implementation."""

import torch
from torch import Tensor

from kernels.reference import FFNOutput, ffn_forward

__all__ = ["FFNOutput", "sparse_ffn"]

IMPLS = ("auto", "triton", "torch")


def sparse_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    counted: Tensor | None = None,
    impl: str = "auto",
) -> FFNOutput:
    """y = (relu(x w_gate^T) * (x w_up^T)) w_down, or with w_gate None y = relu(x w_up^T) w_down.

    x        [..., d]  any batch shape, empty included.
    w_gate   [h, d]    or None for the non-gated FFN.
    w_up     [h, d]
    w_down   [h, d]    row j belongs to neuron j: the transpose of what nn.Linear(h, d) stores.
    counted  bool [...], the tokens that the loss counts; the others add neither to `l1` nor to `fired`. None: all.
    impl     auto = Triton where it is supported, else torch; triton = Triton or an error; torch = dense products.

    Returns `FFNOutput(y, l1, nnz, fired)`. `l1` is a sum over tokens: the caller scales it by coef / (layers * tokens).
    Traceable by torch.compile(fullgraph=True); never waits for the device. Raises ValueError on wrong shapes or dtypes
    and NotImplementedError when impl="triton" cannot be honoured.

    >>> out = sparse_ffn(x, w_gate, w_up, w_down, counted=targets != -100)
    >>> loss = cross_entropy + coef / (n_layers * n_counted) * out.l1
    """
    _check_arguments(x, w_gate, w_up, w_down, counted, impl)
    if impl == "triton":
        raise NotImplementedError("impl=triton: the Triton kernels are not available; use impl=auto or impl=torch")
    return ffn_forward(x, w_gate, w_up, w_down, counted)


def _check_arguments(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, counted: Tensor | None, impl: str
) -> None:
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
    if counted is not None and (counted.dtype != torch.bool or counted.shape != x.shape[:-1]):
        raise ValueError(
            f"counted must be bool of shape {tuple(x.shape[:-1])}, got {counted.dtype} {tuple(counted.shape)}"
        )
