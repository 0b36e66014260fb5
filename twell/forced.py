"""Forced firing: weights that make an untrained Transformer fire as many neurons per token as asked.

How fast a sparse model runs depends on how sparse it is; this measures the speed at a given sparsity without training
to it. A neuron fires when its pre-activation, noise plus a bias, is positive:

- coordinate 0 of the residual stream is the same for every token, and no layer writes to it: the neuron's weight for
  it is a bias, drawn from `kernels.synthetic.FiringLaw` anew in each layer;
- coordinate 1 differs by token id and moves all of a token's biases at once, so that tokens are as unequal as real
  ones;
- all other weights stay as initialised: noise of deviation 1, since the norm before the FFN gives its input rms 1.

Attention is sharpened until a token attends to few others. Averages over many would be nearly the same for all
tokens, and equal ids would then fire equal neurons. A learning rate of 0 keeps all of this as it is.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.synthetic import FiringLaw
from twell.errors import UserError
from twell.ffn import FFN
from twell.model import Transformer

BIAS, SHIFT = 0, 1  # coordinates of the residual stream
CONSTANT_SHARE = 1 / 64  # of the residual stream's square: enough for a bias, and the norm is left to the others
SHARPNESS = 8.0  # deviation of the attention scores
MOST = 0.3  # share of the neurons that can be asked for: 30 % are dead and no other fires more than every 2nd time
TOLERANCE = 0.01
ATTEMPTS = 12


@torch.no_grad()
def force_firing(
    model: Transformer,
    mean_nnz: float,
    tokens: Tensor,
    *,
    token_sigma: float = 0.6,
    masters: Mapping[str, Tensor] | None = None,
) -> list[float]:
    """Overwrite some weights of an initialised model, so that in every layer `mean_nnz` neurons fire per token.

    Args:
        model: of a ReLU kind, gated or not, in the dtype it will run in.
        mean_nnz: at most MOST of the hidden width.
        tokens: int [b, t], like those that the model will see; each layer's biases are fitted to it.
        token_sigma: log-normal deviation of a token id's expected number of firing neurons.
        masters: fp32 copies of the parameters under the same names, which get the new values, too.

    Returns the mean number on `tokens`, by layer. Raises UserError if a layer cannot be fitted.
    """
    law = FiringLaw(mean_nnz, token_sigma=token_sigma)
    generator = torch.Generator().manual_seed(len(model.blocks))
    biases = law.biases(len(model.blocks[0].ffn.w_up), generator)
    _prepare(model, law.token_shift(biases, len(model.embed.weight), generator))
    reached: list[float] = []

    def fit(ffn: FFN, arguments: tuple[Tensor, ...]) -> None:
        reached.append(_fit(ffn, arguments[0], law, seed=len(reached)))

    # A layer's input depends on all layers before it: each is fitted when one forward pass comes to it.
    hooks = [block.ffn.register_forward_pre_hook(fit) for block in model.blocks]
    try:
        with torch.compiler.set_stance("force_eager"):  # the blocks may be compiled; hooks work in none of those
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    for name, master in (masters or {}).items():
        master.copy_(model.get_parameter(name))
    return reached


def _prepare(model: Transformer, shift: Tensor) -> None:
    """The residual stream's two coordinates, and attention; shift [vocab_size], in deviations of the noise."""
    embedding = model.embed.weight  # [vocab_size, d]
    d = embedding.shape[1]
    constant = math.sqrt(CONSTANT_SHARE * d)
    embedding.copy_(F.normalize(embedding.float(), dim=1) * math.sqrt(d))  # rms 1: a layer adds little to that
    embedding[:, BIAS] = constant
    embedding[:, SHIFT] = (constant * shift).to(embedding)
    for block in model.blocks:
        sharpened = block.attn.q.weight if block.attn.q_norm is None else block.attn.q_norm.weight
        sharpened.mul_(SHARPNESS)
        block.attn.o.weight[[BIAS, SHIFT]] = 0
        block.ffn.w_down[:, [BIAS, SHIFT]] = 0
    model.norm.weight.fill_(1 / d)  # else the large embedding, as a tied head, would give absurd losses


def _fit(ffn: FFN, x: Tensor, law: FiringLaw, seed: int) -> float:
    """Set the biases of one layer, given its input x [b, t, d]; returns the mean number of firing neurons."""
    weight = ffn.w_up if ffn.w_gate is None else ffn.w_gate  # [h, d], whose sign decides
    constant = x[..., BIAS].float().mean().item()
    weight[:, SHIFT] = 1 / constant
    asked = law.mean_nnz
    for _ in range(ATTEMPTS):
        biases = replace(law, mean_nnz=asked).biases(len(weight), torch.Generator().manual_seed(seed))
        weight[:, BIAS] = (biases / constant).to(weight)
        reached = (F.linear(x, weight.to(x.dtype)) > 0).sum().item() / x[..., BIAS].numel()
        if abs(reached / law.mean_nnz - 1) < TOLERANCE:
            return reached
        asked *= law.mean_nnz / max(reached, law.mean_nnz / 4)
    raise UserError(
        f"forced sparsity: cannot make {law.mean_nnz:g} of {len(weight)} neurons fire per token (layer {seed} has "
        f"{reached:.3g}); ask for another number, of a few at least"
    )
