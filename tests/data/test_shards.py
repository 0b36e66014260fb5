import os

import numpy as np
import pytest

from data import DataError, shards
from data.shards import TokenStream, check_shards, open_shard, read_header, token_dtype, verify_shard, write_shard
from data.writer import SplitWriter

IDENTITY, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "train-00000.bin"
    write_shard(path, np.arange(1000) % 300, n_vocab=300, tokenizer=IDENTITY)
    return path


@pytest.mark.parametrize("n_vocab, dtype", [(257, "<u2"), (65536, "<u2"), (65537, "<u4"), (200000, "<u4")])
def test_ids_and_header_survive(tmp_path, n_vocab, dtype):
    ids = np.array([0, 1, n_vocab - 1, 5])
    write_shard(tmp_path / "s.bin", ids, n_vocab=n_vocab, tokenizer=IDENTITY)
    header, mapped = read_header(tmp_path / "s.bin"), open_shard(tmp_path / "s.bin")
    assert (header.n_vocab, header.n_tokens, header.tokenizer, header.dtype) == (n_vocab, 4, IDENTITY, np.dtype(dtype))
    assert isinstance(mapped, np.memmap) and mapped.dtype == token_dtype(n_vocab)
    assert mapped.tolist() == ids.tolist()
    verify_shard(tmp_path / "s.bin")


def test_empty_shard(tmp_path):
    write_shard(tmp_path / "s.bin", np.empty(0, dtype=int), n_vocab=300, tokenizer=IDENTITY)
    assert len(open_shard(tmp_path / "s.bin")) == 0
    verify_shard(tmp_path / "s.bin")
    assert len(TokenStream([])) == 0 and TokenStream([]).read(0, 3).tolist() == []


def test_stream_crosses_shards(tmp_path):
    ids = np.random.default_rng(0).integers(0, 300, 100)
    cuts = [0, 7, 7, 8, 60, 100]  # one of them empty, one of one token
    paths = [tmp_path / f"train-{i:05d}.bin" for i in range(5)]
    for path, start, stop in zip(paths, cuts, cuts[1:]):
        write_shard(path, ids[start:stop], n_vocab=300, tokenizer=IDENTITY)
    stream = TokenStream(paths)
    assert len(stream) == 100
    for start in range(100):
        for count in (1, 2, 30, 100):
            assert stream.read(start, count).tolist() == ids[start : start + count].tolist()
    assert stream.windows(np.array([50, 0]), 20).tolist() == [ids[50:70].tolist(), ids[:20].tolist()]
    assert np.concatenate(list(stream.chunks(9))).tolist() == ids.tolist()
    assert np.concatenate(list(stream.chunks(9, limit=31))).tolist() == ids[:31].tolist()


def rewrite(path, change):
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda raw: raw.__delitem__(slice(-3, None)), "truncated shard .*bytes instead of 2128 for 1000 tokens"),
        (lambda raw: raw.__delitem__(slice(50, None)), "truncated shard .*the header alone"),
        (lambda raw: raw.clear(), "not a token shard"),
        (lambda raw: raw.extend(b"xx"), "overlong shard"),
        (lambda raw: raw.__setitem__(0, 0), "not a token shard"),
        (lambda raw: raw.__setitem__(8, 9), "shard version 9; this code reads version 1"),
        (lambda raw: raw.__setitem__(24, 1), "its header fails its checksum"),
        (lambda raw: raw.__setitem__(1000, raw[1000] ^ 1), "corrupted shard .checksum"),
        (lambda raw: raw.__setitem__(129, 200), "token 0 has id 51200, outside the vocabulary of 300 ids"),
    ],
)
def test_damage_is_found(shard, change, message):
    check_shards([shard], IDENTITY)
    rewrite(shard, change)
    with pytest.raises(DataError, match=message) as caught:
        check_shards([shard], IDENTITY)
    assert str(shard) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_shard_and_other_tokenizer(shard):
    with pytest.raises(DataError, match=r"cannot read the shard .No such file"):
        check_shards([shard.with_name("gone.bin")], IDENTITY)
    with pytest.raises(DataError, match=r"made with another tokenizer .identity abab.*cdcd"):
        check_shards([shard], OTHER)


def test_an_id_outside_the_vocabulary_that_was_written_so(tmp_path):
    write_shard(tmp_path / "s.bin", np.array([1, 2, 300]), n_vocab=300, tokenizer=IDENTITY)
    with pytest.raises(DataError, match=r"token 2 has id 300"):
        verify_shard(tmp_path / "s.bin")


def test_large_sets_are_read_in_full_once_per_change(shard, monkeypatch):
    monkeypatch.setattr(shards, "SMALL_SET_BYTES", 0)
    read = []
    monkeypatch.setattr(shards, "verify_shard", lambda path: read.append(path) or verify_shard(path))
    check_shards([shard], IDENTITY)
    check_shards([shard], IDENTITY)
    assert read == [shard]
    rewrite(shard, lambda raw: raw.__setitem__(1000, raw[1000] ^ 1))
    os.utime(shard, ns=(0, 12345))
    with pytest.raises(DataError, match=r"corrupted shard"):
        check_shards([shard], IDENTITY)


@pytest.mark.parametrize("shard_tokens", [5, 16, 64, 1000])
def test_writer_cuts_shards_and_continues_after_any_sync(tmp_path, shard_tokens):
    ids = np.random.default_rng(1).integers(0, 300, 64)
    kind = {"n_vocab": 300, "tokenizer": IDENTITY, "shard_tokens": shard_tokens}
    for stop_at in range(0, 64, 16):
        folder = tmp_path / str(stop_at)
        folder.mkdir()
        first = SplitWriter(folder, "train", **kind)
        first.append(ids[:stop_at])
        state = first.sync()
        first.append(ids[::-1])  # lost: more than was synced, in this shard and later ones
        first.sync()
        first.close()
        second = SplitWriter(folder, "train", **kind, state=state)
        second.append(ids[stop_at:])
        names = second.finish()
        assert names == sorted(path.name for path in folder.iterdir())
        assert len(names) == -(-64 // shard_tokens)
        check_shards([folder / name for name in names], IDENTITY)
        assert TokenStream([folder / name for name in names]).read(0, 64).tolist() == ids.tolist()
