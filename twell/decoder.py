"""The Transformer at inference: the function of twell/model.py, a prompt or one token at a time, with a KV cache.

The weights are those of a model, in its compute dtype, joined where the model joins or multiplies them one by one. No
shape depends on data and nothing waits for the device in `step`, so that a CUDA graph can capture it. Sequences of a
batch start at slot 0 of their cache rows: prompts of different lengths are padded on the right, where causal attention
does not look, and each row has its own position.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import has_kernels
from twell.ffn import DenseFFN
from twell.model import Transformer, rotate
from twell.relu_ffn import FEW, ReluFFN, settle

# The share of neurons from which on a step's FFN runs dense: reading two thirds of the weights is no gain any more.
DENSE_FROM = 0.5


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
    """Keys and values, one [rows, n_kv_heads, length, head_dim] per layer."""

    def __init__(self, decoder: "Decoder", rows: int, length: int):
        s = decoder.shape
        layers, shape = range(len(decoder.layers)), (rows, s.n_kv_heads, length, s.head_dim)
        self.k, self.v = (
            [torch.zeros(shape, dtype=decoder.embedding.dtype, device=decoder.device) for _ in layers] for _ in "kv"
        )


class Decoder:
    """A model's weights as they are now, ready to continue sequences.

    model: any Transformer. impl: of its ReLU FFNs, as in `twell.relu_ffn.ReluFFN`. max_rows: of a step; more than
    `twell.relu_ffn.FEW` take dense products there. compile: torch.compile what a step computes between attentions (all
    layers share one compilation): fewer, larger kernels, after a minute of waiting.
    """

    def __init__(self, model: Transformer, impl: str, max_rows: int, compile: bool = False):
        dtype, attn, ffn = model.compute_dtype, model.blocks[0].attn, model.blocks[0].ffn
        self.device, self.n_vocab, self.rope = model.embed.weight.device, model.n_vocab, model.rope
        self.embedding = model.embed.weight.detach().to(dtype)
        self.head = self.embedding if model.head is None else model.head.weight.detach().to(dtype)
        self.norm = model.norm.weight.detach().to(dtype)
        self.layers = [_layer_weights(block, dtype) for block in model.blocks]
        activation, gated = ffn.activation if isinstance(ffn, DenseFFN) else "relu", ffn.w_gate is not None
        self.ffns = [ReluFFN(*_halves(w, gated), w.w_down, impl) for w in self.layers] if activation == "relu" else []
        sparse = bool(self.ffns) and self.ffns[0].sparse and max_rows <= FEW
        self.shape = Shape(attn.n_heads, attn.n_kv_heads, attn.head_dim, model.norm.eps, activation, gated, sparse)
        self.shapes, self._max_rows = [self.shape] * len(self.layers), max_rows
        # One kernel for rotation, the cache and attention; without it, and without a GPU, torch's.
        self.fused = impl == "triton" or has_kernels(self.device, dtype)
        of_step, of_prefill = (project, between, finish), (rotated, half_way, dense_ffn)
        if compile:
            # Every kind of FFN, number of rows and kind of prompts is compiled by itself, and counts towards a limit.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            of_step = [torch.compile(f, fullgraph=True, dynamic=False) for f in of_step]
            of_prefill = [torch.compile(f, fullgraph=True) for f in of_prefill]  # of any number of tokens
        self._project, self._between, self._finish = of_step
        self._rotated, self._half_way, self._dense_ffn = of_prefill

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
        self._choose_routes()
        x = x[torch.arange(len(x), device=x.device), lengths - 1]  # [r, d]
        return logits_of(x, self.norm, self.head, self.n_vocab, self.shape)

    def _choose_routes(self) -> None:
        """Let steps run dense in layers that are dense, once this is known. Steps captured before stay as they are."""
        shares = [ffn.share_fired(self._max_rows) for ffn in self.ffns]
        if self.shape.sparse and None not in shares:
            self.shapes = [self.shape._replace(sparse=share < DENSE_FROM) for share in shares]

    def _prefill(self, tokens: Tensor, rows: Tensor, cache: KVCache) -> Tensor:
        s, t = self.shape, tokens.shape[1]
        x = F.embedding(tokens, self.embedding)  # [r, t, d]
        for i, w in enumerate(self.layers):
            q, k, v = self._rotated(x, w, self.rope[:, :t], s)
            cache.k[i][rows, :, :t] = k
            cache.v[i][rows, :, :t] = v
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.n_heads > s.n_kv_heads)
            x, normed = self._half_way(x, y.transpose(1, 2).flatten(2), w, s)
            sparse = bool(self.ffns) and self.ffns[i].sparse
            x = self.ffns[i](normed, residual=x) if sparse else x + self._dense_ffn(normed, w, s)
        return x

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: KVCache, slots: int) -> Tensor:
        """Append one token to every row of the cache; the logits of what follows.

        tokens, positions int64 [rows] -> [rows, vocab_size]. slots: more than any position; attention reads so many.
        """
        x = F.embedding(tokens, self.embedding)[:, None]  # [rows, 1, d]
        attend = self._attention(positions, slots)
        heads = self._project(x, self.layers[0], self.shape)
        for i in range(len(self.layers) - 1):
            y = attend(heads, cache.k[i], cache.v[i])
            x, heads = self._between(x, y, self.layers[i], self.layers[i + 1], self.shapes[i])
        y = attend(heads, cache.k[-1], cache.v[-1])
        return self._finish(x, y, self.layers[-1], self.norm, self.head, self.n_vocab, self.shapes[-1])[:, 0]

    def _attention(self, positions: Tensor, slots: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """What appends heads [rows, 1, all heads, head_dim] to a layer's cache and attends: -> [rows, 1, d]."""
        if not self.fused:
            return StepAttention(positions, self.rope, slots, self.embedding.dtype, self.shape)
        from kernels.decode_attention import decode_attention, splits_for

        splits = splits_for(len(positions), self.shape.n_kv_heads, slots, self.device)

        def attend(heads: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            y = decode_attention(heads.squeeze(1).contiguous(), k_cache, v_cache, positions, self.rope, splits)
            return y.flatten(1)[:, None]

        return attend


class StepAttention:
    """The attention of one step in torch; see `Decoder.step`."""

    def __init__(self, positions: Tensor, rope: Tensor, slots: int, dtype: torch.dtype, s: Shape):
        self.rows, self.positions, self.slots, self.s = (
            torch.arange(len(positions), device=positions.device),
            positions,
            slots,
            s,
        )
        self.rope = rope[:, positions, None, None]  # [2, rows, 1, 1, head_dim / 2]
        seen = torch.arange(slots, device=positions.device) <= positions[:, None]
        mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
        self.mask = mask[:, None, None]  # [rows, 1, 1, slots]

    def __call__(self, heads: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        s = self.s
        q, k, v = heads.transpose(1, 2).split([s.n_heads, s.n_kv_heads, s.n_kv_heads], dim=1)
        k_cache[self.rows, :, self.positions] = rotate(k, self.rope)[:, :, 0]
        v_cache[self.rows, :, self.positions] = v[:, :, 0]
        # The heads that share keys become as many queries of one head: no copies of the cache.
        q = rotate(q, self.rope).view(len(q), s.n_kv_heads, -1, s.head_dim)
        keys, values = k_cache[:, :, : self.slots], v_cache[:, :, : self.slots]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask).reshape(len(q), 1, -1)


def project(x: Tensor, w: LayerWeights, s: Shape) -> Tensor:
    """Queries, keys and values [b, t, n_heads + 2 n_kv_heads, head_dim] of x [b, t, d], not rotated yet."""
    heads = F.linear(rms_norm(x, w.attn_norm, s), w.qkv, w.qkv_bias).unflatten(-1, (-1, s.head_dim))
    if w.q_norm is None:
        return heads
    q, k, v = heads.split([s.n_heads, s.n_kv_heads, s.n_kv_heads], dim=2)
    return torch.cat([rms_norm(q, w.q_norm, s), rms_norm(k, w.k_norm, s), v], dim=2)


def rotated(x: Tensor, w: LayerWeights, rope: Tensor, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [b, heads, t, head_dim] of x [b, t, d], turned by rope [2, t, head_dim / 2]."""
    q, k, v = project(x, w, s).transpose(1, 2).split([s.n_heads, s.n_kv_heads, s.n_kv_heads], dim=1)
    return rotate(q, rope), rotate(k, rope), v


def half_way(x: Tensor, y: Tensor, w: LayerWeights, s: Shape) -> tuple[Tensor, Tensor]:
    """x [b, t, d] with the heads' results y [b, t, d] added, and what the FFN then sees."""
    x = x + F.linear(y, w.o)
    return x, rms_norm(x, w.ffn_norm, s)


def after_attention(x: Tensor, y: Tensor, w: LayerWeights, s: Shape) -> Tensor:
    """The layer's output [rows, 1, d] for its input x and the heads' results y, both [rows, 1, d]."""
    x, normed = half_way(x, y, w, s)
    return x + step_ffn(normed, w, s)


def step_ffn(x: Tensor, w: LayerWeights, s: Shape) -> Tensor:
    """The FFN of a step: x [rows, 1, d] -> [rows, 1, d]."""
    if not s.sparse:
        return dense_ffn(x, w, s)
    from kernels.decode import decode_ffn

    return decode_ffn(x, *_halves(w, s.gated), w.w_down)


def between(x: Tensor, y: Tensor, w: LayerWeights, after: LayerWeights, s: Shape) -> tuple[Tensor, Tensor]:
    """From one layer's attention to the next one's: compiled in one piece, their sums and norms share kernels."""
    x = after_attention(x, y, w, s)
    return x, project(x, after, s)


def finish(x: Tensor, y: Tensor, w: LayerWeights, norm: Tensor, head: Tensor, n_vocab: int, s: Shape) -> Tensor:
    """From the last layer's attention to the logits [rows, 1, vocab_size]."""
    return logits_of(after_attention(x, y, w, s), norm, head, n_vocab, s)


def logits_of(x: Tensor, norm: Tensor, head: Tensor, n_vocab: int, s: Shape) -> Tensor:
    """x [..., d] -> [..., vocab_size], padded ids at -inf."""
    logits = F.linear(rms_norm(x, norm, s), head)
    return logits.masked_fill(torch.arange(len(head), device=x.device) >= n_vocab, -torch.inf)


def dense_ffn(x: Tensor, w: LayerWeights, s: Shape) -> Tensor:
    """The FFN by dense products: x [..., d] -> [..., d]."""
    act = F.relu if s.activation == "relu" else F.silu
    if not s.gated:
        return act(F.linear(x, w.w_in)) @ w.w_down
    gate, up = F.linear(x, w.w_in).chunk(2, dim=-1)
    return (act(gate) * up) @ w.w_down


def rms_norm(x: Tensor, weight: Tensor, s: Shape) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, s.eps)


def _halves(w: LayerWeights, gated: bool) -> tuple[Tensor | None, Tensor]:
    """w_gate and w_up, both [h, d]."""
    return w.w_in.chunk(2) if gated else (None, w.w_in)


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
