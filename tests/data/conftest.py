import os
from pathlib import Path

import numpy as np
import pytest

from data.prepared import PreparedData
from data.shards import write_shard
from data.tokenizer import ByteTokenizer, make_tokenizer
from twell.config import DataConfig

GPT2_FILE = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"  # what tiktoken's cache calls gpt2's merges


@pytest.fixture
def make_set(tmp_path):
    """Makes a byte-token data set from arrays of ids: one array per train shard, one validation array."""

    def make(train, val=(), folder=tmp_path / "set"):
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = ByteTokenizer()
        kind = {"n_vocab": tokenizer.n_vocab, "tokenizer": tokenizer.identity}
        shards = [folder / f"train-{i:05d}.bin" for i in range(len(train))]
        for path, tokens in zip(shards, train):
            write_shard(path, np.asarray(tokens), **kind)
        write_shard(folder / "val-00000.bin", np.asarray(val, dtype=np.int64), **kind)
        tokenizer.save(folder / "tokenizer")
        return PreparedData(folder, shards, [folder / "val-00000.bin"], tokenizer)

    return make


@pytest.fixture
def config(tmp_path):
    """A DataConfig whose prepared data go to a folder of the test's own."""

    def make(source, **values):
        return DataConfig(**{"name": "set", "source": source, "dir": str(tmp_path / "sets"), "workers": 1, **values})

    return make


@pytest.fixture
def gpt2():
    """The gpt2 encoding, where tiktoken has it offline."""
    if not (Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nowhere")) / GPT2_FILE).exists():
        pytest.skip("TIKTOKEN_CACHE_DIR does not hold the gpt2 encoding")
    return make_tokenizer("gpt2")


def words(rng, count):
    """Text of `count` made-up words, with line ends."""
    letters = rng.integers(97, 123, size=(count, 6)).astype(np.uint8)
    letters[:, 5] = np.where(np.arange(count) % 12 == 11, 10, 32)
    return letters.tobytes().decode()
