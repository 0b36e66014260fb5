"""JSON lines, plain or compressed."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data import DataError
from data.sources import BLOCK_BYTES, Documents, decode, describe_files


@dataclass
class JsonlBlock:
    path: Path
    first_line: int  # number of the first line, from 1
    raw: bytes  # whole lines
    field: str
    size: int

    def read(self) -> Documents:
        text, replaced = decode(self.raw)
        lines = enumerate(text.split("\n"), self.first_line)
        return Documents([self._parse(line, number) for number, line in lines if line and not line.isspace()], replaced)

    def _parse(self, line: str, number: int) -> str:
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: a JSON {type(row).__name__}, not an object with a field {self.field!r}")
        if self.field not in row:
            raise DataError(f"{where}: no field {self.field!r} (data.field); the fields are {', '.join(sorted(row))}")
        if not isinstance(row[self.field], str):
            raise DataError(f"{where}: field {self.field!r} holds a {type(row[self.field]).__name__}, not a string")
        return row[self.field]


class JsonlSource:
    """One JSON object a line, the text in `field`; every line is a document."""

    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")

    def __init__(self, files: list[Path], field: str):
        self.files, self._field = files, field
        self.size = sum(file.stat().st_size for file in files)
        if not self.size:
            raise DataError(f"data.paths: all {len(files)} files are empty ({files[0]}, ...)")

    def describe(self) -> dict:
        return {"jsonl": describe_files(self.files), "field": self._field}

    def blocks(self) -> Iterator[JsonlBlock]:
        for path in self.files:
            line, consumed = 1, 0
            with path.open("rb") as file:
                for raw in _whole_lines(path, file):
                    size, consumed = file.tell() - consumed, file.tell()
                    yield JsonlBlock(path, line, raw, self._field, size)
                    line += raw.count(b"\n")


def _whole_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The decompressed contents of `file` in pieces of about BLOCK_BYTES that end with a line."""
    rest = bytearray()
    lines = _decompressed(path, file)
    try:
        while chunk := lines.read(BLOCK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if end:
                yield bytes(rest) + chunk[:end]
                rest.clear()
            rest += chunk[end:]
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: truncated or corrupted file ({error})") from error
    if rest:
        yield bytes(rest)


def _decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix == ".xz":
        return lzma.LZMAFile(file)
    if path.suffix == ".zst":
        try:
            import pyarrow
        except ImportError as error:
            raise DataError(f"{path}: reading .zst needs pyarrow: pip install pyarrow") from error
        return pyarrow.CompressedInputStream(file, "zstd")
    return file
