"""Decode attention: rotary angles, the cache's next slot and attention for one new token per row, in one kernel.

    qkv [n, n_heads + 2 n_kv_heads, head_dim], positions [n]  ->  y [n, n_heads, head_dim]; keys and values are appended

One program per (row, key/value head, split of the row's slots); query heads that share keys work together. Only slots
that hold something are read, and each row has its own number of them. With one split the program writes y itself; else
partial sums with their maxima and weights, which another kernel joins in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot import AotCase
from kernels.gate import precision
from kernels.launch import INTERPRETED, POINTER, multiprocessors

FEWEST = 256  # slots that a split is worth


@triton.jit
def _rotate(at, cos, sin, mask, HALF: tl.constexpr):
    """Both halves of the heads at `at`, turned, in their own dtype. fp32 inside, as in the model."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = at.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def decode_attention_kernel(
    qkv, k_cache, v_cache, positions, rope, y, partial, weight, n, slots, angles, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """HP, GP: half the width of a head, and the heads of a group, padded to powers of two from 16."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    G: tl.constexpr = HEADS // KV
    HD: tl.constexpr = 2 * HALF
    row, head, split = tl.program_id(0) // KV, tl.program_id(0) % KV, tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    g, c = tl.arange(0, GP), tl.arange(0, HP)
    in_head = c < HALF
    of_group = (g < G)[:, None] & in_head[None, :]

    cos = tl.load(rope + position * HALF + c, mask=in_head, other=0.0)
    sin = tl.load(rope + (angles + position) * HALF + c, mask=in_head, other=0.0)
    token = qkv + row * ((HEADS + 2 * KV) * HD)
    q = token + (head * G + g)[:, None] * HD + c[None, :]
    q1, q2 = _rotate(q, cos[None, :], sin[None, :], of_group, HALF)  # [GP, HP]
    k1, k2 = _rotate(token + (HEADS + head) * HD + c, cos, sin, in_head, HALF)  # [HP]
    v = token + (HEADS + KV + head) * HD + c
    v1, v2 = tl.load(v, mask=in_head, other=0.0), tl.load(v + HALF, mask=in_head, other=0.0)

    # The new token is the first split's: its key and value come from here, not out of the cache.
    is_first = split == 0
    cache = (row * KV + head).to(tl.int64) * slots * HD + c
    own = cache + position.to(tl.int64) * HD
    mask = c < tl.where(is_first, HALF, 0)
    tl.store(k_cache + own, k1, mask=mask)
    tl.store(k_cache + own + HALF, k2, mask=mask)
    tl.store(v_cache + own, v1, mask=mask)
    tl.store(v_cache + own + HALF, v2, mask=mask)
    if INTERPRETED:  # whose bf16 is wrong
        q1, q2 = q1.to(tl.float32), q2.to(tl.float32)
    products = q1.to(tl.float32) * k1.to(tl.float32)[None, :] + q2.to(tl.float32) * k2.to(tl.float32)[None, :]
    highest = tl.where(is_first, tl.sum(products, 1) * scale, float("-inf"))  # [GP]
    total = tl.where(is_first, 1.0, 0.0) + tl.zeros((GP,), tl.float32)
    acc1 = total[:, None] * v1.to(tl.float32)[None, :]
    acc2 = total[:, None] * v2.to(tl.float32)[None, :]

    per_split = (position + SPLITS - 1) // SPLITS
    end = tl.minimum(position, (split + 1) * per_split)
    for first in tl.range(split * per_split, end, BN, num_stages=STAGES):
        j = first + tl.arange(0, BN)
        live = j < end
        at = cache[None, :] + j[:, None].to(tl.int64) * HD  # [BN, HP]
        in_slot = live[:, None] & in_head[None, :]
        ka, kb = tl.load(k_cache + at, mask=in_slot, other=0.0), tl.load(k_cache + at + HALF, mask=in_slot, other=0.0)
        va, vb = tl.load(v_cache + at, mask=in_slot, other=0.0), tl.load(v_cache + at + HALF, mask=in_slot, other=0.0)
        if INTERPRETED:
            ka, kb, va, vb = ka.to(tl.float32), kb.to(tl.float32), va.to(tl.float32), vb.to(tl.float32)
        score = tl.dot(q1, ka.T, input_precision=PRECISION)
        score = tl.dot(q2, kb.T, score, input_precision=PRECISION) * scale  # [GP, BN]
        score = tl.where(live[None, :], score, float("-inf"))
        above = tl.maximum(highest, tl.max(score, 1))
        p = tl.exp(score - above[:, None])
        keep = tl.exp(highest - above)
        highest = above
        total = total * keep + tl.sum(p, 1)
        p = p.to(va.dtype)
        acc1 = tl.dot(p, va, acc1 * keep[:, None], input_precision=PRECISION)
        acc2 = tl.dot(p, vb, acc2 * keep[:, None], input_precision=PRECISION)

    heads = row * HEADS + head * G + g
    if SPLITS == 1:
        at = y + heads[:, None] * HD + c[None, :]
        tl.store(at, (acc1 / total[:, None]).to(dtype), mask=of_group)
        tl.store(at + HALF, (acc2 / total[:, None]).to(dtype), mask=of_group)
    else:
        heads += split * n * HEADS
        at = partial + heads[:, None].to(tl.int64) * HD + c[None, :]
        tl.store(at, acc1, mask=of_group)
        tl.store(at + HALF, acc2, mask=of_group)
        tl.store(weight + 2 * heads, highest, mask=g < G)
        tl.store(weight + 2 * heads + 1, total, mask=g < G)


@triton.jit
def decode_attention_join_kernel(
    partial, weight, y, n_heads, HD: tl.constexpr, HDP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr
):
    """y of one head of one row, of n_heads in all, from its splits; a split without slots weighs nothing."""
    head = tl.program_id(0)
    s, c = tl.arange(0, SP), tl.arange(0, HDP)
    at = s * n_heads + head
    highest = tl.load(weight + 2 * at, mask=s < SPLITS, other=float("-inf"))
    total = tl.load(weight + 2 * at + 1, mask=s < SPLITS, other=0.0)
    share = tl.exp(highest - tl.max(highest, 0))
    mask = (s < SPLITS)[:, None] & (c < HD)[None, :]
    acc = tl.load(partial + at[:, None].to(tl.int64) * HD + c[None, :], mask=mask, other=0.0)
    result = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(y + head * HD + c, result.to(y.dtype.element_ty), mask=c < HD)


def splits_for(n: int, n_kv_heads: int, slots: int, device: torch.device) -> int:
    """Splits that occupy the device, if rows hold up to `slots` slots: not more than they are worth."""
    return max(1, min(2 * multiprocessors(device) // (n * n_kv_heads), slots // FEWEST))


def decode_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, rope: Tensor, splits: int
) -> Tensor:
    """Append one token to every row of the cache and attend to all that the row then holds; [n, n_heads, head_dim].

    qkv        [n, n_heads + 2 n_kv_heads, head_dim]  before rotation; contiguous, like all others
    k_cache    [n, n_kv_heads, slots, head_dim]       and v_cache; slot positions[i] of row i is written
    positions  int64 [n]                              below `slots` and below the number of angles
    rope       fp32 [2, angles, head_dim / 2]         cosines and sines
    splits     programs among which a row's slots are divided, see `splits_for`
    """
    n, width, head_dim = qkv.shape
    _, kv, slots, _ = k_cache.shape
    heads, half = width - 2 * kv, head_dim // 2
    y = torch.empty(n, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    partial, weight = y, y
    if splits > 1:
        partial = torch.empty(splits, n, heads, head_dim, dtype=torch.float32, device=qkv.device)
        weight = torch.empty(splits, n, heads, 2, dtype=torch.float32, device=qkv.device)
    decode_attention_kernel[(n * kv, splits)](
        qkv, k_cache, v_cache, positions, rope, y, partial, weight, n, slots, rope.shape[1], head_dim**-0.5,
        HEADS=heads, KV=kv, HALF=half, HP=_padded(half), GP=_padded(heads // kv), BN=_slots(qkv.dtype), SPLITS=splits,
        STAGES=2, PRECISION=precision(qkv.dtype), num_warps=4,
    )  # fmt: skip
    if splits > 1:
        decode_attention_join_kernel[(n * heads,)](
            partial, weight, y, n * heads, HD=head_dim, HDP=triton.next_power_of_2(head_dim), SPLITS=splits,
            SP=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    return y


def _slots(dtype: torch.dtype) -> int:
    """Slots of one step of the kernel."""
    return 32 if dtype == torch.float32 else 64


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def aot_cases(arch: int) -> list[AotCase]:
    cases = []
    for dtype, heads, kv, head_dim, splits in (
        (torch.bfloat16, 32, 32, 64, 1), (torch.bfloat16, 32, 8, 128, 8), (torch.float16, 12, 12, 64, 2),
        (torch.float32, 32, 8, 128, 2),
    ):  # fmt: skip
        half = head_dim // 2
        attention = {
            "HEADS": heads, "KV": kv, "HALF": half, "HP": _padded(half), "GP": _padded(heads // kv),
            "BN": _slots(dtype), "SPLITS": splits, "STAGES": 2, "PRECISION": precision(dtype),
        }  # fmt: skip
        join = {"HD": head_dim, "HDP": head_dim, "SPLITS": splits, "SP": splits}
        kernels = [(decode_attention_kernel, attention, 4)]
        kernels += [(decode_attention_join_kernel, join, 1)] if splits > 1 else []
        for kernel, values, warps in kernels:
            sums = "*fp32" if splits > 1 else POINTER[dtype]
            types = {"positions": "*i64", "rope": "*fp32", "partial": sums, "weight": sums, "scale": "fp32"}
            types |= dict.fromkeys(("n", "slots", "angles", "n_heads"), "i32") | dict.fromkeys(values, "constexpr")
            signature = {name: types.get(name, POINTER[dtype]) for name in kernel.arg_names}
            aligned = tuple(name for name, type in signature.items() if type.startswith("*"))
            name = f"{kernel.__name__} {POINTER[dtype][1:]} head_dim={head_dim} splits={splits}"
            cases.append(AotCase(name, kernel, signature, values, warps, 2, aligned))
    return cases
