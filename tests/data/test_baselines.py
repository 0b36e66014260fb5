import dataclasses
import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from data import baselines
from data.baselines import order3_bits_per_byte, reference_losses, unigram_nats
from data.loader import validation_batches
from data.shards import TokenStream


@pytest.fixture
def prepared(make_set):
    rng = np.random.default_rng(0)
    letters = rng.choice([97, 98, 99, 256], p=[0.5, 0.3, 0.15, 0.05], size=1500)
    return make_set([letters[:400], letters[400:1200]], val=np.append(letters[1200:], 120))


def windows(prepared, tokens=200, seq_len=11):
    return validation_batches(prepared, tokens=tokens, seq_len=seq_len, micro=4)


def counted_targets(batches):
    return [int(t) for batch in batches for t in batch.targets.flatten() if t >= 0]


def test_unigram_is_the_cross_entropy_of_the_targets(prepared):
    batches, train = windows(prepared), TokenStream(prepared.train)
    counts = Counter(train.read(0, len(train)).tolist())
    targets = counted_targets(batches)
    expected = -sum(math.log((counts[t] + 1) / (1200 + 257)) for t in targets) / len(targets)
    assert unigram_nats(train, batches, 257) == pytest.approx(expected, rel=1e-12)


def witten_bell(train, vocabulary):
    """By the recursive definition, over plain dictionaries."""
    followers = [defaultdict(Counter) for _ in range(4)]
    padded = [256] * 3 + train
    for i in range(3, len(padded)):
        for order in range(4):
            followers[order][tuple(padded[i - order : i])][padded[i]] += 1

    def p(word, context):
        if context is None:
            return 1 / vocabulary
        seen = followers[len(context)][context]
        lower = p(word, context[1:] if context else None)
        total, distinct = sum(seen.values()), len(seen)
        return (seen[word] + distinct * lower) / (total + distinct) if total else lower

    return p


@pytest.mark.parametrize("chunk", [1 << 24, 97, 1])
def test_order3_follows_the_definition(prepared, chunk, monkeypatch):
    monkeypatch.setattr(baselines, "_CHUNK", chunk)
    batches, train = windows(prepared), TokenStream(prepared.train)
    p = witten_bell(train.read(0, len(train)).tolist(), 257)
    assert sum(p(w, (97, 98, 97)) for w in range(257)) == pytest.approx(1)
    bits, size = 0.0, 0
    for batch in batches:
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist()):
            for i, target in enumerate(targets):
                if target >= 0:
                    bits -= math.log2(p(target, tuple(tokens[max(0, i - 2) : i + 1])))
                    size += target < 256
    found = order3_bits_per_byte(train, batches, prepared.tokenizer.token_bytes())
    assert found == pytest.approx(bits / size, rel=1e-12)


def test_more_context_helps_where_there_is_structure(make_set):
    prepared = make_set([list(b"the cat sat on the mat. " * 200)], val=list(b"the cat sat on the mat. " * 20))
    losses = reference_losses(prepared, validation_batches(prepared, tokens=400, seq_len=50, micro=8))
    assert losses["val/order3_bits_per_byte"] < 0.5 < losses["val/unigram_loss"] / math.log(2)


def test_order3_is_for_bytes_and_neither_is_for_streams(prepared):
    streamed = dataclasses.replace(prepared, train=[])
    none = {"val/unigram_loss": None, "val/order3_bits_per_byte": None}
    assert reference_losses(streamed, windows(prepared)) == none
    other = dataclasses.replace(prepared, tokenizer=SimpleNamespace(name="gpt2", n_vocab=257))
    losses = reference_losses(other, windows(prepared))
    assert losses["val/unigram_loss"] > 0 and losses["val/order3_bits_per_byte"] is None


def test_only_the_first_tokens_are_counted_of_very_long_splits(prepared, monkeypatch):
    monkeypatch.setattr(baselines, "MAX_TOKENS", 400)
    train = TokenStream(prepared.train)
    first = TokenStream(prepared.train[:1])
    batches, sizes = windows(prepared), prepared.tokenizer.token_bytes()
    assert unigram_nats(train, batches, 257) == unigram_nats(first, batches, 257)
    assert order3_bits_per_byte(train, batches, sizes) == order3_bits_per_byte(first, batches, sizes)
