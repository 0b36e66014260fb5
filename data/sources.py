"""Where text comes from. A source yields blocks: a few MB of documents each, always the same ones in the same order.

Blocks are cheap to make and to send to another process; reading and decoding happen in `read`, in the process that
tokenizes. A document that is not valid UTF-8 has the broken parts replaced by U+FFFD, and they are counted.
"""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from data import DataError

if TYPE_CHECKING:  # the tokenizing processes do without torch, which the configuration imports
    from twell.config import DataConfig

BLOCK_BYTES = 4 << 20
# A text file longer than 1/256 of all text is cut into several documents, within these limits in bytes, so that the
# validation split (whole documents) can be a small share of even a single file.
SHORTEST_CUT, LONGEST_CUT = 16 << 10, 8 << 20


@dataclass
class Documents:
    texts: list[str]
    replaced: int = 0  # characters of broken UTF-8 that became U+FFFD
    binary: int = 0  # files left out because they hold NUL bytes


class Block(Protocol):
    size: int  # how much of the source it covers, in the source's unit

    def read(self) -> Documents: ...


class Source(Protocol):
    size: int | None  # extent of the whole source in a unit of its own (bytes on disk, rows); None = unknown

    def describe(self) -> dict:
        """What decides the contents; part of the fingerprint of the prepared data."""
        ...

    def blocks(self) -> Iterator[Block]: ...


def open_source(cfg: "DataConfig") -> Source:
    """The source that `cfg` names; raises DataError if its files are missing or empty."""
    if cfg.source == "stdlib":
        return stdlib_source()
    if cfg.source == "text":
        return TextSource(expand_paths(cfg.paths))
    if cfg.source == "jsonl":
        from data.jsonl import JsonlSource

        return JsonlSource(expand_paths(cfg.paths, suffixes=JsonlSource.suffixes), cfg.field)
    if cfg.source == "hf":
        from data.hf import HFSource

        return HFSource(cfg)
    raise DataError(f"data.source={cfg.source} has no text to read")


def expand_paths(paths: Iterable[str], suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Files named by files, folders (everything beneath, hidden names apart, that ends in one of `suffixes`) or globs.

    Each file once, in the order of `paths`, sorted within a folder or glob. Raises DataError for a path that is
    missing or matches nothing.
    """
    files: dict[Path, None] = {}
    for name in paths:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            found = [file for file in files_beneath(path) if file.name.endswith(suffixes)]
            wanted = f"the folder holds no {' or '.join(suffixes)} file" if any(suffixes) else "the folder is empty"
        elif path.exists():
            found, wanted = [path], ""
        elif glob.has_magic(name):
            matches = sorted(glob.glob(str(path), recursive=True))
            found, wanted = [Path(match) for match in matches if os.path.isfile(match)], "nothing matches"
        else:
            found, wanted = [], "no such file or folder"
        if not found:
            raise DataError(f"data.paths: {name}: {wanted} (relative to {os.getcwd()})")
        files.update(dict.fromkeys(found))
    return list(files)


def files_beneath(folder: Path) -> Iterator[Path]:
    """Every file in `folder` at any depth, sorted, hidden names apart."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def describe_files(files: list[Path]) -> list[list]:
    stats = [(file, file.stat()) for file in files]
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def decode(raw: bytes) -> tuple[str, int]:
    """`raw` as text, and how many pieces of it were not valid UTF-8 and became U+FFFD."""
    try:
        return raw.decode(), 0
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        return text, text.count("\ufffd") - raw.count("\ufffd".encode())


def stdlib_source() -> "TextSource":
    """The .py files of the running Python's standard library: real text that is there on every machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    files = [f for f in files_beneath(folder) if f.suffix == ".py" and installed.isdisjoint(f.parts)]
    if not files:
        raise DataError(f"data.source=stdlib: no .py files in {folder}; use data=text data.paths=[...]")
    return TextSource(files)


@dataclass
class TextBlock:
    spans: list[tuple[Path, int, int]]  # file, first byte, byte after the last: one document each
    size: int

    def read(self) -> Documents:
        documents = Documents([])
        for path, start, stop in self.spans:
            with path.open("rb") as file:
                file.seek(start)
                raw = file.read(stop - start)
            if b"\0" in raw:
                documents.binary += 1
                continue
            text, replaced = decode(raw)
            documents.texts.append(text)
            documents.replaced += replaced
        return documents


class TextSource:
    """Plain text files. A file is a document; one that is long beside the whole text is cut at line ends."""

    def __init__(self, files: list[Path]):
        self.files = files
        self._sizes = [file.stat().st_size for file in files]
        self.size = sum(self._sizes)
        if not self.size:
            raise DataError(f"data.paths: all {len(files)} files are empty ({files[0]}, ...)")
        self._longest = min(max(self.size // 256, SHORTEST_CUT), LONGEST_CUT)

    def describe(self) -> dict:
        return {"text": describe_files(self.files)}

    def blocks(self) -> Iterator[TextBlock]:
        block = TextBlock([], 0)
        for span in self._spans():
            block.spans.append(span)
            block.size += span[2] - span[1]
            if block.size >= BLOCK_BYTES:
                yield block
                block = TextBlock([], 0)
        if block.spans:
            yield block

    def _spans(self) -> Iterator[tuple[Path, int, int]]:
        for path, size in zip(self.files, self._sizes):
            if size <= self._longest:
                yield path, 0, size
                continue
            start = 0
            with path.open("rb") as file:
                while start < size:
                    pieces = -(-(size - start) // self._longest)
                    stop = size if pieces == 1 else start + _cut(file, start, -(-(size - start) // pieces))
                    yield path, start, stop
                    start = stop


def _cut(file, start: int, longest: int) -> int:
    """Where to cut the bytes from `start`, at most `longest` of them: after a blank line, a line, or a character."""
    tail = longest // 2
    file.seek(start + longest - tail)
    raw = file.read(tail + 1)  # one byte more, to see whether a character starts behind the cut
    for end in (b"\n\n", b"\n"):
        at = raw.rfind(end, 0, tail)
        if at >= 0:
            return longest - tail + at + len(end)
    stop = tail
    while stop > tail - 4 and raw[stop] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        stop -= 1
    return longest - tail + stop
