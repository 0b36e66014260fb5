import numpy as np
import pytest

from data.prepared import PreparedData
from data.shards import write_shard
from data.tokenizer import ByteTokenizer


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
