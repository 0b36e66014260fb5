import gzip
import json
import lzma
import sys

import numpy as np
import pytest

from data import DataError, jsonl
from data.jsonl import JsonlSource
from tests.data.conftest import words
from tests.data.test_sources import read_all


def compress(raw, suffix):
    if suffix == ".gz":
        return gzip.compress(raw)
    if suffix == ".xz":
        return lzma.compress(raw)
    if suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as out:
            out.write(raw)
        return bytes(sink.getvalue())
    return raw


@pytest.fixture
def write(tmp_path):
    def write(lines, suffix="", name="x"):
        path = tmp_path / f"{name}.jsonl{suffix}"
        raw = lines if isinstance(lines, bytes) else "".join(line + "\n" for line in lines).encode()
        path.write_bytes(compress(raw, suffix))
        return path

    return write


@pytest.mark.parametrize("block_bytes", [100, 1000, 1 << 20])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_every_line_is_a_document_in_order(write, suffix, block_bytes, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(0)
    texts = [words(rng, int(n)) for n in rng.integers(1, 60, 50)] + ["line\u2028separator", "", '\\ " é 😀']
    path = write([json.dumps({"id": i, "body": text}) for i, text in enumerate(texts)], suffix)
    source = JsonlSource([path, path], "body")
    assert read_all(source) == (texts * 2, 0, 0)
    assert sum(block.size for block in source.blocks()) == source.size
    assert len(list(source.blocks())) > 20 or block_bytes > 100


def test_no_final_line_end_blank_lines_and_windows_line_ends(write):
    path = write(b'{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert read_all(JsonlSource([path], "text"))[0] == ["a", "b"]


def test_broken_utf8_is_replaced_and_counted(write):
    path = write(b'{"text": "caf\xe9"}\n{"text": "ok"}\n')
    assert read_all(JsonlSource([path], "text")) == (["caf\ufffd", "ok"], 1, 0)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"body": "x", "id": 1}', "line 3: no field 'text' .data.field.; the fields are body, id"),
        ('{"text": 5}', "line 3: field 'text' holds a int, not a string"),
        ('{"text": null}', "line 3: field 'text' holds a NoneType, not a string"),
        ("[1, 2]", "line 3: a JSON list, not an object with a field 'text'"),
        ('{"text": "x"', "line 3: not JSON"),
    ],
)
def test_bad_lines_are_named(write, line, message, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 20)  # the line number counts over blocks
    path = write(['{"text": "a"}', '{"text": "b"}', line, '{"text": "c"}'])
    with pytest.raises(DataError, match=message) as caught:
        read_all(JsonlSource([path], "text"))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_truncated_or_foreign_compressed_files(write, suffix):
    rng = np.random.default_rng(0)
    path = write([json.dumps({"text": words(rng, 100)}) for _ in range(100)], suffix)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"truncated or corrupted file") as caught:
        read_all(JsonlSource([path], "text"))
    assert str(path) in str(caught.value)
    path.write_bytes(b'{"text": "not compressed at all, whatever the name says"}\n')
    with pytest.raises(DataError, match=r"truncated or corrupted file"):
        read_all(JsonlSource([path], "text"))


def test_zst_without_pyarrow_says_what_to_install(write, monkeypatch):
    path = write([json.dumps({"text": "a"})], ".zst")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"reading .zst needs pyarrow: pip install pyarrow"):
        read_all(JsonlSource([path], "text"))


def test_empty_files(write):
    with pytest.raises(DataError, match=r"all 1 files are empty"):
        JsonlSource([write(b"")], "text")
