"""The feed-forward layers: dense (gated SiLU, gated ReLU) and sparse (gated and non-gated ReLU).

Every kind keeps its weights as w_gate, w_up, w_down, all [h, d] with one row per neuron, so checkpoints of dense_relu
and sparse are interchangeable: they are the same function, computed differently.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.ops import sparse_ffn
from kernels.reference import with_residual
from twell.config import FFNConfig

if TYPE_CHECKING:
    from kernels.state import FFNState


class FFNResult(NamedTuple):
    """What an FFN layer returns; what its kind does not have is None.

    y      [..., d]  the layer's output, residual included; a block passes on the rest.
    l1     []        fp32, sum over counted tokens and neurons of |a|, differentiable (sparse kinds).
    nnz    [n]       int32, neurons that fire on each token, counted or not (ReLU kinds).
    fired  [h]       int32, counted tokens on which each neuron fires (ReLU kinds).
    """

    y: Tensor | None
    l1: Tensor | None = None
    nnz: Tensor | None = None
    fired: Tensor | None = None


class FFN(nn.Module):
    """The weights that all kinds share; uninitialised until `Transformer.init_weights`."""

    def __init__(self, d_model: int, d_ff: int, gated: bool):
        super().__init__()
        self.w_gate = nn.Parameter(torch.empty(d_ff, d_model)) if gated else None
        self.w_up = nn.Parameter(torch.empty(d_ff, d_model))
        self.w_down = nn.Parameter(torch.empty(d_ff, d_model))

    def weights(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor, Tensor]:
        """(w_gate, w_up, w_down) in the dtype of the activations."""
        w_gate = None if self.w_gate is None else self.w_gate.to(dtype)
        return w_gate, self.w_up.to(dtype), self.w_down.to(dtype)


class DenseFFN(FFN):
    """y = (act(x w_gate^T) * (x w_up^T)) w_down, act = SiLU or ReLU."""

    def __init__(self, d_model: int, d_ff: int, activation: str):
        super().__init__(d_model, d_ff, gated=True)
        self.activation = activation

    def forward(self, x: Tensor, counted: Tensor | None, residual: Tensor | None = None) -> FFNResult:
        """x, residual [b, t, d]; counted bool [b, t], the tokens that `fired` counts (None: no statistics)."""
        w_gate, w_up, w_down = self.weights(x.dtype)
        gate = F.linear(x, w_gate)  # [b, t, h]
        gate = F.relu(gate) if self.activation == "relu" else F.silu(gate)
        y = with_residual((gate * F.linear(x, w_up)) @ w_down, residual)
        if self.activation == "silu" or counted is None:
            return FFNResult(y)
        fires = (gate.detach() > 0).flatten(0, 1)  # [n, h]
        fired = (fires & counted.flatten()[:, None]).sum(0, dtype=torch.int32)
        return FFNResult(y, nnz=fires.sum(1, dtype=torch.int32), fired=fired)


class SparseFFN(FFN):
    """The ReLU FFN through `kernels.ops.sparse_ffn`, which computes only the neurons that fire."""

    def __init__(self, d_model: int, d_ff: int, gated: bool, impl: str):
        super().__init__(d_model, d_ff, gated)
        self.impl = impl
        self.state: FFNState | None = None  # what the kernels remember from step to step; see twell/routing.py

    def forward(self, x: Tensor, counted: Tensor | None, residual: Tensor | None = None) -> FFNResult:
        """x, residual [b, t, d]; counted bool [b, t], the tokens that `l1` and `fired` count (None: all)."""
        options = {"counted": counted, "residual": residual, "impl": self.impl, "state": self.state}
        return FFNResult(*sparse_ffn(x, *self.weights(x.dtype), **options))


def build_ffn(cfg: FFNConfig, d_model: int) -> FFN:
    """The layer that `cfg.kind` names."""
    if cfg.kind in ("dense_silu", "dense_relu"):
        return DenseFFN(d_model, cfg.d_ff, activation=cfg.kind.removeprefix("dense_"))
    if cfg.kind in ("sparse", "sparse_nongated"):
        return SparseFFN(d_model, cfg.d_ff, gated=cfg.kind == "sparse", impl=cfg.impl)
    raise ValueError(f"ffn.kind={cfg.kind}: must be one of dense_silu, dense_relu, sparse, sparse_nongated")
