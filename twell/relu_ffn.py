"""A ReLU FFN at inference: computed from the neurons that fire, for few tokens and for many.

Up to FEW tokens take `decode_ffn`. More take `sparse_ffn` with a state, which learns how sparse
the layer is, predicts whether dense products would be faster, and may run out of room: `settle` tells.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.ops import IMPLS, sparse_ffn, unsupported
from kernels.reference import ffn_forward, with_residual
from twell.errors import UserError

FEW = 64  # tokens: kernels.decode.MAX_TOKENS, which only triton can import


def check_impl(impl: str) -> None:
    """Raise ValueError if `impl` names no implementation."""
    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r}: must be one of {', '.join(IMPLS)}")


class ReluFFN:
    """y = (relu(x w_gate^T) * (x w_up^T)) w_down, or with w_gate None y = relu(x w_up^T) w_down, without gradients.

    w_gate, w_up, w_down: [h, d], one row per neuron. impl: triton = the sparse kernels, or a UserError; torch = dense
    products; auto = on a GPU that is supported, sparse wherever that is faster, else torch.
    """

    def __init__(self, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, impl: str):
        self.weights = w_gate, w_up, w_down
        self.impl, self.state = impl, None
        reason = unsupported(w_up.device, w_up.dtype, w_up.shape[1])
        if impl == "triton" and reason is not None:
            raise UserError(f"impl=triton: {reason}; use impl=auto or impl=torch")
        self.sparse = impl == "triton" or (impl == "auto" and reason is None and w_up.device.type == "cuda")
        if self.sparse and impl == "auto":
            from kernels.state import FFNState  # needs triton

            self.state = FFNState(len(w_up), w_up.device)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., d] -> y [..., d], with `residual` [..., d] added. Complete only if `settle` then says so."""
        if not self.sparse:
            return with_residual(ffn_forward(x, *self.weights).y, residual)
        from kernels.decode import decode_ffn  # needs triton

        d = x.shape[-1]
        n = x.numel() // d
        if n == 0:
            return with_residual(torch.empty_like(x), residual)
        if n <= FEW:
            return with_residual(decode_ffn(x, *self.weights), residual)
        if self.state is not None:
            from kernels.dispatch import Shape

            w_gate, w_up, _ = self.weights
            self.state.shape, self.state.dtype = Shape(n, d, len(w_up), w_gate is not None, x.element_size()), x.dtype
        return sparse_ffn(x, *self.weights, residual=residual, impl=self.impl, state=self.state, stats=False).y

    def share_fired(self, rows: int) -> float | None:
        """The share of the neurons that fire on any of `rows` tokens, by what has been learnt; None before that.

        As if neurons fired independently on different tokens, which overestimates.
        """
        rate = None if self.state is None else self.state.decision.rate  # [h], the share of tokens
        return None if rate is None else (1 - (1 - rate) ** rows).mean().item()


def settle(layers: Sequence[ReluFFN]) -> bool:
    """Let layers learn from their calls; true if some results are incomplete and the calls must be repeated.

    Waits for the device, if there is anything to learn or to lose.
    """
    states = [layer.state for layer in layers if layer.state is not None and layer.state.shape is not None]
    if not states:
        return False
    from kernels.state import overflowed, update

    repeat = bool(overflowed(states))
    if repeat or any(state.decision.room is None for state in states):
        update(states)
    return repeat
