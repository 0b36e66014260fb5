"""What counting reaches: reference losses for the validation windows that the model is scored on.

Counts come from the training split (its first MAX_TOKENS tokens, if it is longer).
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from data.loader import Batch
from data.prepared import PreparedData
from data.shards import TokenStream

MAX_TOKENS = 1 << 27  # 20 s of counting
_CHUNK = 1 << 24
_ORDER = 3


def reference_losses(prepared: PreparedData, batches: Iterable[Batch]) -> dict[str, float | None]:
    """val/unigram_loss (nats per token) and val/order3_bits_per_byte (byte tokens only, else None).

    batches: the validation batches, of all ranks. Both are None without a training split to count (a stream).
    """
    losses: dict[str, float | None] = {"val/unigram_loss": None, "val/order3_bits_per_byte": None}
    batches = list(batches)
    train = TokenStream(prepared.train)
    if len(train):
        losses["val/unigram_loss"] = unigram_nats(train, batches, prepared.tokenizer.n_vocab)
        if prepared.tokenizer.name == "bytes":
            losses["val/order3_bits_per_byte"] = order3_bits_per_byte(train, batches, prepared.tokenizer.token_bytes())
    return losses


def unigram_nats(train: TokenStream, batches: Iterable[Batch], n_vocab: int) -> float:
    """Cross-entropy of the counted targets under the training tokens' frequencies plus one, in nats per token."""
    counts = np.ones(n_vocab, dtype=np.int64)
    for chunk in train.chunks(_CHUNK, MAX_TOKENS):
        counts += np.bincount(chunk, minlength=n_vocab)
    log_p = np.log(counts) - math.log(counts.sum())
    targets = torch.cat([batch.targets[batch.targets >= 0].cpu() for batch in batches]).numpy()
    return float(-log_p[targets].mean())


def order3_bits_per_byte(train: TokenStream, batches: Iterable[Batch], token_bytes: np.ndarray) -> float:
    """Bits per byte of the counted targets under counts with up to three tokens of context.

    Interpolated Witten-Bell smoothing (Witten & Bell 1991; Chen & Goodman 1998, section 2.6): with c(ctx) tokens seen
    after a context, t(ctx) of them distinct,

        p(w | ctx) = (c(ctx, w) + t(ctx) p(w | shorter ctx)) / (c(ctx) + t(ctx)),

    down to the uniform distribution below order 0. Like the model, the table sees only the window: a window's first
    targets have shorter contexts.
    """
    base = len(token_bytes)
    context, targets, available = _contexts(batches)  # [n, 3], [n], [n]
    keys, counts = _count_ngrams(train, base)  # of order 3: four tokens in one number
    tables = [(keys, counts)]
    for order in range(_ORDER, 0, -1):  # leaving out the oldest token gives the next lower order
        tables.insert(0, _merge(tables[0][0] % base**order, tables[0][1]))
    p = np.full(len(targets), 1.0 / base)
    for order, (keys, counts) in enumerate(tables):
        ctx = np.zeros(len(targets), dtype=np.int64)
        for i in range(_ORDER - order, _ORDER):
            ctx = ctx * base + context[:, i]
        seen = _lookup(keys, counts, ctx * base + targets)
        contexts, first = np.unique(keys // base, return_index=True)
        total = _lookup(contexts, np.add.reduceat(counts, first), ctx)
        distinct = _lookup(contexts, np.diff(first, append=len(keys)), ctx)
        use = (total > 0) & (available >= order)
        p[use] = (seen[use] + distinct[use] * p[use]) / (total[use] + distinct[use])
    return float(-np.log2(p).sum() / token_bytes[targets].sum())


def _contexts(batches: Iterable[Batch]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each counted target: the three tokens before it, oldest first (0 where the window has none); the target;
    how many of the three there are."""
    contexts, targets, available = [], [], []
    for batch in batches:
        tokens, wanted = batch.tokens.cpu().numpy(), batch.targets.cpu().numpy()  # [b, T]
        rows, columns = np.nonzero(wanted >= 0)
        padded = np.pad(tokens, ((0, 0), (_ORDER - 1, 0)))
        contexts.append(np.stack([padded[rows, columns + i] for i in range(_ORDER)], axis=1))
        targets.append(wanted[rows, columns])
        available.append(columns + 1)
    return np.concatenate(contexts), np.concatenate(targets), np.concatenate(available)


def _count_ngrams(train: TokenStream, base: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct runs of four tokens, each packed into one number, and how often each occurs."""
    keys, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for packed in _packed_ngrams(train, base):
        new, new_counts = np.unique(packed, return_counts=True)
        keys, counts = _merge(np.concatenate([keys, new]), np.concatenate([counts, new_counts]))
    return keys, counts


def _packed_ngrams(train: TokenStream, base: int) -> Iterator[np.ndarray]:
    before = np.full(_ORDER, base - 1, dtype=np.int64)  # as if an end of text came first
    for chunk in train.chunks(_CHUNK, MAX_TOKENS):
        ids = np.concatenate([before, chunk])
        packed = ids[: len(chunk)].copy()
        for i in range(1, _ORDER + 1):
            packed *= base
            packed += ids[i : i + len(chunk)]
        before = ids[-_ORDER:]
        yield packed


def _merge(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct keys with the sums of their counts."""
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.add.reduceat(counts, first)


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 if it is not there; `keys` are sorted."""
    at = np.searchsorted(keys, wanted)
    at[at == len(keys)] = 0
    return np.where(keys[at] == wanted, values[at], 0)
