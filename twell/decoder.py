"""The Transformer at inference: the function of twell/model.py, a prompt or one token at a time, with a KV cache.

The weights are those of a model, in its compute dtype, joined where the model joins or multiplies them one by one. No
shape depends on data and nothing waits for the device in `step`, so that a CUDA graph can capture it. Sequences of a
batch start at slot 0 of their cache rows: prompts of different lengths are padded on the right, where causal attention
does not look, and each row has its own position.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.ffn import DenseFFN
from twell.model import Transformer, rotate
from twell.relu_ffn import FEW, ReluFFN, settle


class Shape(NamedTuple):
    """What a layer's functions must know beside its weights."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    activation: str  # relu | silu
    gated: bool
    sparse: bool  # the FFN of a step computes only the neurons that fire


class LayerWeights(NamedTuple):
    attn_norm: Tensor  # [d]
    qkv: Tensor  # [(n_heads + 2 n_kv_heads) head_dim, d]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: Tensor  # [d, d]
    ffn_norm: Tensor  # [d]
    w_in: Tensor  # [2h, d], w_gate above w_up; non-gated: w_up [h, d]
    w_down: Tensor  # [h, d]


class KVCache:
    """Keys and values, one [rows, n_kv_heads, length, head_dim] per layer each."""

    def __init__(self, decoder: "Decoder", rows: int, length: int):
        s = decoder.shape
        layers, shape = range(len(decoder.layers)), (rows, s.n_kv_heads, length, s.head_dim)
        self.k, self.v = (
            [torch.zeros(shape, dtype=decoder.embedding.dtype, device=decoder.device) for _ in layers] for _ in "kv"
        )


class Decoder:
    """A model's weights as they are now, ready to continue sequences.

    model: any Transformer. impl: of its ReLU FFNs, as in `twell.relu_ffn.ReluFFN`. max_rows: of a step; more than
    `twell.relu_ffn.FEW` take dense products there. compile: torch.compile what a step computes between
    attentions (all layers share one compilation): fewer, larger kernels, after a minute of waiting.
    """

    def __init__(self, model: Transformer, impl: str, max_rows: int, compile: bool = False):
        dtype, attn, ffn = model.compute_dtype, model.blocks[0].attn, model.blocks[0].ffn
        self.device, self.n_vocab, self.rope = model.embed.weight.device, model.n_vocab, model.rope
        self.embedding = model.embed.weight.detach().to(dtype)
        self.head = self.embedding if model.head is None else model.head.weight.detach().to(dtype)
        self.norm = model.norm.weight.detach().to(dtype)
        self.layers = [_layer_weights(block, dtype) for block in model.blocks]
        activation = ffn.activation if isinstance(ffn, DenseFFN) else "relu"
        gated = ffn.w_gate is not None
        halves = [w.w_in.chunk(2) if gated else (None, w.w_in) for w in self.layers]
        self.ffns = (
            [ReluFFN(*half, w.w_down, impl) for half, w in zip(halves, self.layers)] if activation == "relu" else []
        )
        sparse = bool(self.ffns) and self.ffns[0].sparse and max_rows <= FEW
        self.shape = Shape(
            attn.n_heads, attn.n_kv_heads, attn.head_dim, model.norm.eps, activation, gated, sparse
        )  # fmt: skip
        self._before, self._after = before_attention, after_attention
        if compile:
            self._before = torch.compile(before_attention, fullgraph=True, dynamic=False)
            self._after = torch.compile(after_attention, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, lengths: Tensor, rows: Tensor, cache: KVCache) -> Tensor:
        """Fill rows of the cache with prompts; the logits of what follows each.

        tokens int64 [r, t], padded on the right with any id; lengths int64 [r]; rows int64 [r] -> [r, vocab_size].
        Waits for the device when the sparse FFNs have something to learn or ran out of room.
        """
        while True:
            x = self._prefill(tokens, rows, cache)
            if not settle(self.ffns):
                break
        return self._logits(x[torch.arange(len(x), device=x.device), lengths - 1])

    def _prefill(self, tokens: Tensor, rows: Tensor, cache: KVCache) -> Tensor:
        s, t = self.shape, tokens.shape[1]
        x = F.embedding(tokens, self.embedding)  # [r, t, d]
        for i, w in enumerate(self.layers):
            q, k, v = queries_keys_values(x, w, self.rope[:, :t], s)
            cache.k[i][rows, :, :t] = k
            cache.v[i][rows, :, :t] = v
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.n_heads > s.n_kv_heads)
            x = x + F.linear(y.transpose(1, 2).flatten(2), w.o)
            normed = rms_norm(x, w.ffn_norm, s)
            x = x + (self.ffns[i](normed) if self.ffns and self.ffns[i].sparse else dense_ffn(normed, w, s))
        return x

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: KVCache, slots: int) -> Tensor:
        """Append one token to every row of the cache; the logits of what follows.

        tokens, positions int64 [rows] -> [rows, vocab_size]. slots: more than any position; attention reads so many.
        """
        s = self.shape
        x = F.embedding(tokens, self.embedding)[:, None]  # [rows, 1, d]
        rope = self.rope[:, positions, None, None]  # [2, rows, 1, 1, head_dim / 2]
        seen = torch.arange(slots, device=x.device) <= positions[:, None]
        mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -torch.inf)[
            :, None, None
        ]  # [rows, 1, 1, slots]
        for w, k, v in zip(self.layers, cache.k, cache.v):
            q = self._before(x, w, rope, k, v, positions, s)
            # The heads that share keys become as many queries of one head: no copies of the cache.
            q = q.view(len(x), s.n_kv_heads, -1, s.head_dim)
            y = F.scaled_dot_product_attention(q, k[:, :, :slots], v[:, :, :slots], attn_mask=mask)
            x = self._after(x, y.reshape(x.shape), w, s)
        return self._logits(x[:, 0])

    def _logits(self, x: Tensor) -> Tensor:
        """x [n, d] -> [n, vocab_size], padded ids at -inf."""
        logits = F.linear(rms_norm(x, self.norm, self.shape), self.head)
        return logits.masked_fill(torch.arange(len(self.head), device=x.device) >= self.n_vocab, -torch.inf)


def before_attention(
    x: Tensor, w: LayerWeights, rope: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, s: Shape
) -> Tensor:
    """The queries [rows, n_heads, 1, head_dim] of x [rows, 1, d]; keys and values go into the cache."""
    q, k, v = queries_keys_values(x, w, rope, s)
    rows = torch.arange(len(x), device=x.device)
    k_cache[rows, :, positions] = k[:, :, 0]
    v_cache[rows, :, positions] = v[:, :, 0]
    return q


def after_attention(x: Tensor, y: Tensor, w: LayerWeights, s: Shape) -> Tensor:
    """The layer's output [rows, 1, d] for its input x and the heads' results y, both [rows, 1, d]."""
    x = x + F.linear(y, w.o)
    normed = rms_norm(x, w.ffn_norm, s)
    if not s.sparse:
        return x + dense_ffn(normed, w, s)
    from kernels.decode import decode_ffn

    w_gate, w_up = w.w_in.chunk(2) if s.gated else (None, w.w_in)
    return x + decode_ffn(normed, w_gate, w_up, w.w_down)


def queries_keys_values(x: Tensor, w: LayerWeights, rope: Tensor, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q [b, n_heads, t, head_dim] and k, v [b, n_kv_heads, t, head_dim] of x [b, t, d], rotated."""
    heads = F.linear(rms_norm(x, w.attn_norm, s), w.qkv, w.qkv_bias).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
    q, k, v = heads.split([s.n_heads, s.n_kv_heads, s.n_kv_heads], dim=1)
    if w.q_norm is not None:
        q, k = rms_norm(q, w.q_norm, s), rms_norm(k, w.k_norm, s)
    return rotate(q, rope), rotate(k, rope), v


def dense_ffn(x: Tensor, w: LayerWeights, s: Shape) -> Tensor:
    """The FFN by dense products: x [..., d] -> [..., d]."""
    act = F.relu if s.activation == "relu" else F.silu
    if not s.gated:
        return act(F.linear(x, w.w_in)) @ w.w_down
    gate, up = F.linear(x, w.w_in).chunk(2, dim=-1)
    return (act(gate) * up) @ w.w_down


def rms_norm(x: Tensor, weight: Tensor, s: Shape) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, s.eps)


def _layer_weights(block: torch.nn.Module, dtype: torch.dtype) -> LayerWeights:
    attn, ffn = block.attn, block.ffn

    def joined(*tensors: Tensor | None) -> Tensor | None:
        present = [t.detach().to(dtype) for t in tensors if t is not None]
        return torch.cat(present) if len(present) > 1 else next(iter(present), None)

    return LayerWeights(
        attn_norm=joined(block.attn_norm.weight),
        qkv=joined(attn.q.weight, attn.k.weight, attn.v.weight),
        qkv_bias=joined(attn.qkv_bias),
        q_norm=joined(attn.q_norm and attn.q_norm.weight),
        k_norm=joined(attn.k_norm and attn.k_norm.weight),
        o=joined(attn.o.weight),
        ffn_norm=joined(block.ffn_norm.weight),
        w_in=joined(ffn.w_gate, ffn.w_up),
        w_down=joined(ffn.w_down),
    )
