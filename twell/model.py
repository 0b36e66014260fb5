"""The Transformer: pre-norm RMSNorm, rotary positions, grouped-query attention, a dense or sparse FFN.

Activations are in the compute dtype, and so are the parameters in training (twell/weights.py holds their fp32 masters);
others are cast where they are used, so there is no autocast. Nothing here knows of ranks. The model reports sums over
tokens, never means: the caller, who knows the whole batch, divides. It counts the tokens whose target is not IGNORE.
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from twell.config import FFNConfig, ModelConfig
from twell.ffn import FFNResult, build_ffn
from twell.loss import IGNORE, linear_cross_entropy
from twell.sparsity import SparsityStats

EMBEDDING_STD = 0.02

# `_run` is compiled once for each kind and shape of block, and with and without gradients; one process may use many.
torch._dynamo.config.recompile_limit = 64


class ModelOutput(NamedTuple):
    """What `Transformer.forward` returns.

    loss_sum  []  fp32, cross-entropy in nats summed over counted tokens; 0 without targets.
    l1_sum    [layers]  fp32, sum over counted tokens and neurons of |a|; 0 for dense kinds.
    stats     SparsityStats of the ReLU kinds when targets are given and firing is counted, else None.
    logits    [b, t, vocab_size] in the compute dtype, -inf on padded ids; only without targets.
    """

    loss_sum: Tensor
    l1_sum: Tensor
    stats: SparsityStats | None = None
    logits: Tensor | None = None


class Linear(nn.Module):
    """A bias-free linear map whose weight [out, in] is cast to the dtype of its input."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    """A table of rows, looked up by id."""

    def __init__(self, n_rows: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rope_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """Cosine and sine of the rotary angles (arXiv 2104.09864), fp32 [2, seq_len, head_dim / 2]."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(seq_len, dtype=torch.float32)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn x [..., t, head_dim] by the angles of its positions, rope [2, t, head_dim / 2] or what broadcasts like it.

    Dimension i is paired with i + head_dim / 2, as in Llama. Computed in fp32: compiled, that costs nothing.
    """
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention: n_heads / n_kv_heads query heads share each key/value head."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads = cfg.n_heads, cfg.n_kv_heads
        self.head_dim = cfg.d_model // cfg.n_heads
        self.q = Linear(cfg.d_model, cfg.d_model)
        self.k = Linear(cfg.d_model, cfg.n_kv_heads * self.head_dim)
        self.v = Linear(cfg.d_model, cfg.n_kv_heads * self.head_dim)
        self.o = Linear(cfg.d_model, cfg.d_model)
        self.qkv_bias = nn.Parameter(torch.empty(self.qkv_width)) if cfg.qkv_bias else None
        self.q_norm = RMSNorm(self.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, cfg.norm_eps) if cfg.qk_norm else None

    @property
    def qkv_width(self) -> int:
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        """x [b, t, d] -> [b, t, d].

        rope [2, t, head_dim / 2]; mask bool [b, 1, t, t], true = may attend, None = plain causal.
        """
        b, t, d = x.shape
        # One product for the three: the weights stay separate parameters, and joining them costs little beside it.
        weight = torch.cat([self.q.weight, self.k.weight, self.v.weight]).to(x.dtype)
        bias = None if self.qkv_bias is None else self.qkv_bias.to(x.dtype)
        heads = F.linear(x, weight, bias).view(b, t, -1, self.head_dim)
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # Transposed last, so that all three lie in memory as the products before and after want them.
        rope = rope[:, :, None]
        q, k, v = (part.transpose(1, 2) for part in (rotate(q, rope), rotate(k, rope), v))  # [b, heads, t, head_dim]
        groups = self.n_heads // self.n_kv_heads
        if mask is not None and groups > 1:  # no fused GPU kernel takes a mask and shared heads at once
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            groups = 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, cfg: ModelConfig, ffn: FFNConfig):
        super().__init__()
        self.attn_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.attn = Attention(cfg)
        self.ffn_norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.ffn = build_ffn(ffn, cfg.d_model)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None,
        counted: Tensor | None,
        firing: bool = True,
    ) -> tuple[Tensor, FFNResult, Tensor]:
        """(the block's output, the FFN's result, what is between the halves).

        The last is for the compiler alone. What a function returns it keeps for backward; otherwise it would keep the
        two summands and, to save a write, read both wherever backward wants the sum: in three places.
        """
        between = self.attend(x, rope, mask)
        x, result = self.feed(between, counted, firing)
        return x, result, between.detach()

    def attend(self, x: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        """The first half."""
        return x + self.attn(self.attn_norm(x), rope, mask)

    def feed(self, x: Tensor, counted: Tensor | None, firing: bool = True) -> tuple[Tensor, FFNResult]:
        """The second half; compiled, it does not count which neurons fire if `firing` is not asked for."""
        y, l1, nnz, fired = self.ffn(self.ffn_norm(x), counted, residual=x)
        # Without y: all layers' would live until the loss, and each get a gradient of zeros, to be made and added.
        # No _replace: torch 2.11 cannot compile it.
        return y, FFNResult(None, l1, nnz, fired) if firing else FFNResult(None, l1)


class Transformer(nn.Module):
    """A decoder language model.

    Args:
        model, ffn: the shape, as in twell/config.py.
        vocab_size: rows of the embedding, padded for speed.
        n_vocab: ids that exist; ids from n_vocab to vocab_size are never scored and have no probability.
        compute_dtype: dtype of activations and matrix products.
        recompute: what backward computes again instead of keeping it: none | selective (the FFN half of each block) |
            full (each block).

    The parameters are uninitialised memory until `init_weights` or the loading of a checkpoint.
    """

    def __init__(
        self,
        model: ModelConfig,
        ffn: FFNConfig,
        vocab_size: int,
        n_vocab: int,
        compute_dtype: torch.dtype = torch.float32,
        recompute: str = "none",
    ):
        super().__init__()
        self.seq_len, self.n_vocab, self.compute_dtype = model.seq_len, n_vocab, compute_dtype
        self.head_dim, self.rope_theta = model.d_model // model.n_heads, model.rope_theta
        # A table, although each pass could make it: torch.compile would then compute the angles anew in every layer.
        # It is no state: never saved, and filled again by `init_weights` in case the model came from the meta device.
        self.register_buffer("rope", rope_table(model.seq_len, self.head_dim, self.rope_theta), persistent=False)
        self.embed = Embedding(vocab_size, model.d_model)
        self.blocks = nn.ModuleList(Block(model, ffn) for _ in range(model.n_layers))
        self.norm = RMSNorm(model.d_model, model.norm_eps)
        self.head = None if model.tied else Linear(model.d_model, vocab_size)
        self.recompute = recompute
        self.counts_firing = True  # false: no statistics, which take another pass over the activations
        self._run: Callable = _run
        self._compiled = False

    def compile_parts(self) -> None:
        """From now on run the blocks through torch.compile.

        Each block by itself, not the model as a whole: equal layers share one compilation, which then takes as long for
        40 layers as for one.
        """
        self._run = torch.compile(_run, fullgraph=True, dynamic=False)
        self._compiled = True

    def hook_blocks(self) -> None:
        """From now on call every block as a module: its hooks run, around what is compiled or recomputed inside."""
        for block in self.blocks:
            block.forward = functools.partial(self._run_block, block)
        self._run_block = lambda block, *inputs: block(*inputs)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        doc_ids: Tensor | None = None,
    ) -> ModelOutput:
        """Score `targets`, or without them give logits.

        Args:
            tokens: int [b, t], t <= seq_len.
            targets: int64 [b, t], the token after each; IGNORE where the loss does not count.
            doc_ids: int [b, t]; attention stays among tokens with the same number. None: plain causal.
        """
        rope = self.rope[:, : tokens.shape[1]]
        mask = _attention_mask(doc_ids)
        counted = None if targets is None else targets != IGNORE  # [b, t]

        x = self.embed(tokens).to(self.compute_dtype)  # [b, t, d]
        results = []
        with attention_order(x.device) if self._compiled else contextlib.nullcontext():
            for block in self.blocks:
                x, result = self._run_block(block, x, rope, mask, counted)
                results.append(result)
        x = self.norm(x)
        weight = (self.embed if self.head is None else self.head).weight.to(x.dtype)  # [vocab_size, d]

        zero = torch.zeros((), device=tokens.device)
        l1_sum = torch.stack([zero if r.l1 is None else r.l1 for r in results])
        if targets is None:
            return ModelOutput(zero, l1_sum, logits=self._logits(x, weight))
        loss_sum = linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), self.n_vocab)
        return ModelOutput(loss_sum, l1_sum, _collect_stats(results, counted))

    def _run_block(
        self, block: Block, x: Tensor, rope: Tensor, mask: Tensor | None, counted: Tensor | None
    ) -> tuple[Tensor, FFNResult]:
        """Run a block, or for `recompute` its halves, so that only their inputs are kept for backward."""
        keep_inputs = functools.partial(checkpoint, self._run, use_reentrant=False, preserve_rng_state=False)
        if self.recompute != "selective":
            run = self._run if self.recompute == "none" else keep_inputs
            x, result, _ = run(block, "forward", x, rope, mask, counted, self.counts_firing)
            return x, result
        x = self._run(block, "attend", x, rope, mask)
        return keep_inputs(block, "feed", x, counted, self.counts_firing)

    def _logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., d] -> [..., vocab_size], padded ids at -inf: they take no part in the softmax."""
        logits = F.linear(x, weight)
        vocab_size = weight.shape[0]
        if vocab_size == self.n_vocab:
            return logits
        # Not a slice: rows of vocab_size elements stay aligned, and compiled, this costs nothing.
        return logits.masked_fill(torch.arange(vocab_size, device=x.device) >= self.n_vocab, -math.inf)

    @torch.no_grad()
    def init_weights(self, seed: int, fill: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Fill all parameters from `seed`: the same values on any device, for any number of ranks.

        `fill(parameter, value)` writes one; a parameter that is divided among ranks needs another one.
        """
        self.rope.copy_(rope_table(self.seq_len, self.head_dim, self.rope_theta))
        for name, parameter in self.named_parameters():
            fill(parameter, self.initial_value(name, seed))

    def initial_value(self, name: str, seed: int) -> Tensor:
        """The fp32 CPU tensor that the parameter called `name` starts from.

        Each parameter draws from its own generator, seeded by (seed, name), so that kinds of FFN with a parameter in
        common start from the same values. Matrices are normal with deviation 1/sqrt(fan_in), which keeps the scale of
        activations at any width (at d_model 2048 it is GPT-2's 0.02); those that write to the residual stream are
        divided by sqrt(2 n_layers), so that its variance does not grow with depth; embeddings (and the untied head)
        have 0.02, so that the first logits are small; norms start at 1 and biases at 0.
        """
        shape = self.get_parameter(name).shape
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith("bias"):
            return torch.zeros(shape)
        if name in ("embed.weight", "head.weight"):
            std = EMBEDDING_STD
        else:
            std = (shape[0] if name.endswith("w_down") else shape[1]) ** -0.5
        if name.endswith(("attn.o.weight", "w_down")):
            std /= math.sqrt(2 * len(self.blocks))
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(shape, generator=generator) * std

    @property
    def n_params(self) -> int:
        """All parameters; a tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def n_params_without_embedding(self) -> int:
        """All parameters but the input embedding (which, when tied, is the head too)."""
        return self.n_params - self.embed.weight.numel()

    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward per token, at full sequences, for MFU.

        6 * (matrix parameters: blocks and head; the embedding lookup is no product), plus for attention
        6 * layers * d_model * seq_len: the 12 * layers * d_model * seq_len of PaLM (arXiv 2204.02311, appendix B),
        halved because causal attention needs half of the scores. The FFN counts in full for the sparse kinds too: their
        MFU is what a dense model would need to be as fast.
        """
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.ndim == 2)
        head = self.embed.weight.numel()
        attention = 6 * len(self.blocks) * self.embed.weight.shape[1] * self.seq_len
        return 6 * (matrices + head) + attention


def attention_order(device: torch.device) -> contextlib.AbstractContextManager:
    """While it holds, attention tries the fused kernels in the order of their speed: on Hopper and Blackwell cuDNN's.

    The compiler keeps its choice, backward included. Elsewhere torch's own order is right.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) not in ((9, 0), (10, 0)):
        return contextlib.nullcontext()
    kinds = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    return sdpa_kernel(list(kinds), set_priority=True)


def _run(block: Block, part: str, *inputs) -> Any:
    """A method of `block`. A function of its own, so that one compiled callable serves all blocks."""
    return getattr(Block, part)(block, *inputs)  # of the class: see `hook_blocks`


def _attention_mask(doc_ids: Tensor | None) -> Tensor | None:
    """bool [b, 1, t, t], true = may attend; None = plain causal, for which SDPA needs no mask."""
    if doc_ids is None:
        return None
    positions = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    causal = positions <= positions[:, None]  # [t, t]
    return (causal & (doc_ids[:, None, :] == doc_ids[:, :, None]))[:, None]


def _collect_stats(results: list[FFNResult], counted: Tensor) -> SparsityStats | None:
    """Per-layer statistics; None for kinds without firing."""
    if results[0].nnz is None:
        return None
    nnz = torch.stack([r.nnz for r in results]).unflatten(1, counted.shape)  # [layers, b, t]
    return SparsityStats(nnz, counted, torch.stack([r.fired for r in results]))
