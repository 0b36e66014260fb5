"""`twell.sparsify`: Hugging Face models with ReLU-gated MLPs compute only the neurons that fire.

    model = AutoModelForCausalLM.from_pretrained(DIR, dtype=torch.bfloat16).cuda()
    twell.sparsify(model)
    model.generate(...)

Anything with Llama's MLP will do: three bias-free nn.Linear called gate_proj, up_proj and down_proj, and a ReLU between
them. transformers itself is not needed here.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.reference import ffn_forward
from twell import relu_ffn
from twell.errors import UserError
from twell.relu_ffn import ReluFFN, check_impl, settle

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
RELUS = (F.relu, torch.relu)


class UnsupportedModelError(UserError):
    """A model whose MLPs are not what `sparsify` replaces; the message names the module and says why."""


class SparseMLP(nn.Module):
    """down_proj(relu(gate_proj(x)) * up_proj(x)), under the same parameter names.

    Where gradients are wanted, and for more than a few tokens inside torch.compile, the products are dense: the sparse
    ones have no gradients here, and with many tokens the host must see whether their buffers were large enough.
    """

    def __init__(self, mlp: nn.Module, impl: str):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (getattr(mlp, name) for name in PROJECTIONS)
        # Neurons are the columns of this matrix, and must lie in memory one after the other.
        self.down_proj.weight.data = self.down_proj.weight.data.T.contiguous().T
        self._impl, self._ffn, self._made_for = impl, None, None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., d]"""
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight.T
        many = x.numel() // x.shape[-1] > relu_ffn.FEW
        wants_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
        if wants_gradients or (many and torch.compiler.is_compiling()):
            return ffn_forward(x, *weights).y
        ffn = self._ffn_for(x)
        ffn.weights = weights  # which may have moved, or been loaded anew
        # A model spread over several GPUs leaves the first one current, where Triton would launch.
        with nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(x):
            y = ffn(x)
            while many and settle([ffn]):
                y = ffn(x)
        return y

    def _ffn_for(self, x: Tensor) -> ReluFFN:
        """What has been learnt on this device in this dtype; anew when they change."""
        if self._made_for != (x.device, x.dtype):
            self._made_for = x.device, x.dtype
            self._ffn = ReluFFN(self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight.T, self._impl)
        return self._ffn


def sparsify(model: nn.Module, impl: str = "auto") -> nn.Module:
    """Replace every gated ReLU MLP of `model` by a `SparseMLP`, in place; returns the model.

    The results are the same but for rounding. Parameters keep their names, shapes and values, so that saving the model
    or loading a state dict goes on as before. impl: see `twell.relu_ffn.ReluFFN`.
    Raises UnsupportedModelError, and changes nothing, if there is no such MLP or one that differs from it.
    """
    check_impl(impl)
    found = {name: module for name, module in model.named_modules() if all(hasattr(module, p) for p in PROJECTIONS)}
    found = {name: module for name, module in found.items() if not isinstance(module, SparseMLP)}
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__}: has no MLP with {', '.join(PROJECTIONS)}; sparsify replaces those of Llama's kind"
        )
    for name, mlp in found.items():
        reason = _why_not(mlp)
        if reason is not None:
            raise UnsupportedModelError(
                f"{name} ({type(mlp).__name__}): {reason}; sparsify needs Llama's MLP with a ReLU"
            )
    for name, mlp in found.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, SparseMLP(mlp, impl).train(mlp.training))
    return model


@torch.no_grad()
def _why_not(mlp: nn.Module) -> str | None:
    """What makes `mlp` something else than a bias-free gated ReLU MLP; None if nothing does."""
    act = getattr(mlp, "act_fn", None)
    if not (isinstance(act, nn.ReLU) or act in RELUS):
        return f"its activation is {getattr(act, '__name__', type(act).__name__)}, not ReLU"
    for name in PROJECTIONS:
        linear = getattr(mlp, name)
        if type(linear) is not nn.Linear:
            return f"{name} is a {type(linear).__name__}, not a plain Linear"
        if linear.bias is not None:
            return f"{name} has a bias"
        if linear.weight.is_meta:
            return f"{name} has no values yet"
    gate, up, down = (getattr(mlp, name).weight for name in PROJECTIONS)
    if not gate.shape == up.shape == down.shape[::-1]:
        return f"its weights have the shapes {', '.join(str(tuple(w.shape)) for w in (gate, up, down))}"
    x = torch.randn(3, gate.shape[1], generator=torch.Generator().manual_seed(0)).to(gate)
    y, expected = mlp(x), ffn_forward(x, gate, up, down.T).y
    if (y - expected).norm() > 0.02 * expected.norm():
        return "it computes something else than down_proj(relu(gate_proj(x)) * up_proj(x))"
    return None
