"""Documents to token ids, each in the split that its text decides."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from data.shards import token_dtype
from data.sources import Block
from data.tokenizer import Tokenizer, utf8

SPLITS = ("train", "val")
HASH_RANGE = 1 << 64


def document_hash(raw: bytes) -> int:
    """A number below 2^64 that depends on the text alone: every copy of a document lands in the same split."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def validation_threshold(val_fraction: float) -> int:
    """Documents whose hash is below this are held out."""
    return round(val_fraction * HASH_RANGE)


@dataclass
class Counts:
    """What was read; the pairs are (train, val)."""

    documents: list[int] = field(default_factory=lambda: [0, 0])
    text_bytes: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    empty: int = 0  # documents without text, left out
    replaced: int = 0  # characters of broken UTF-8 that became U+FFFD
    binary: int = 0  # files left out because they hold NUL bytes
    smallest_hash: int = HASH_RANGE

    def add(self, other: "Counts") -> None:
        for name in ("documents", "text_bytes", "tokens"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name))])
        for name in ("empty", "replaced", "binary"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.smallest_hash = min(self.smallest_hash, other.smallest_hash)


@dataclass
class EncodedBlock:
    ids: list[np.ndarray]  # per split: documents, each followed by end of text; [n_tokens] in the shards' type
    counts: Counts


class Encoder:
    """Reads a block and encodes it.

    val_below: documents whose hash is below it go to the validation split; only_val: drop all others.
    """

    def __init__(self, tokenizer: Tokenizer, val_below: int, *, only_val: bool = False):
        self._tokenizer, self._val_below, self._only_val = tokenizer, val_below, only_val
        self._dtype = token_dtype(tokenizer.n_vocab)
        self._eot = np.array([tokenizer.eot], dtype=self._dtype)

    def __call__(self, block: Block) -> EncodedBlock:
        documents = block.read()
        counts = Counts(replaced=documents.replaced, binary=documents.binary)
        parts: list[list[np.ndarray]] = [[], []]
        for text in documents.texts:
            if not text:
                counts.empty += 1
                continue
            raw = utf8(text)
            if len(raw) != len(text):  # not ASCII: look for lone surrogates, which utf8() has replaced
                clean = raw.decode()
                counts.replaced += clean.count("\ufffd") - text.count("\ufffd")
                text = clean
            key = document_hash(raw)
            split = int(key < self._val_below)
            counts.smallest_hash = min(counts.smallest_hash, key)
            if self._only_val and not split:
                continue
            counts.documents[split] += 1
            counts.text_bytes[split] += len(raw)
            parts[split] += [self._tokenizer.encode_array(text), self._eot]
        ids = [np.concatenate(part, dtype=self._dtype, casting="unsafe") if part else self._eot[:0] for part in parts]
        counts.tokens = [len(split_ids) for split_ids in ids]
        return EncodedBlock(ids, counts)
