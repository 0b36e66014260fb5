"""Shards: files of token ids behind a small header, memory-mapped, and the token stream that several of them form.

    bytes 0..127   header (little-endian; see `_HEADER`), zero-padded
    bytes 128..    token ids, uint16 or uint32

Shards of one split are named train-00000.bin, train-00001.bin, ... and val-00000.bin, ...; their concatenation in
that order is the split's token stream.
"""

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import DataError

MAGIC = b"TWELLTOK"
VERSION = 1
HEADER_BYTES = 128
# magic, version, bytes per id, n_vocab, n_tokens, CRC-32 of the ids, SHA-256 of the tokenizer; then its own CRC-32
_HEADER = struct.Struct("<8sIIQQI32s")

SMALL_SET_BYTES = 256 << 20  # sets up to this size are checked in full at every start (0.2 s)
_CHUNK = 1 << 24  # ids per step of a full scan
_STAMPS = "verified.json"


@dataclass(frozen=True)
class ShardHeader:
    dtype: np.dtype
    n_vocab: int
    n_tokens: int
    checksum: int  # CRC-32 of the ids' bytes
    tokenizer: str  # the tokenizer's identity

    def pack(self) -> bytes:
        numbers = (VERSION, self.dtype.itemsize, self.n_vocab, self.n_tokens, self.checksum)
        fields = _HEADER.pack(MAGIC, *numbers, bytes.fromhex(self.tokenizer))
        return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(HEADER_BYTES, b"\0")


def token_dtype(n_vocab: int) -> np.dtype:
    """Smallest of uint16 and uint32 that holds ids below `n_vocab`."""
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")


def write_shard(path: str | Path, tokens: np.ndarray, *, n_vocab: int, tokenizer: str) -> None:
    """Writes one whole shard. (`data.writer` writes those that do not fit in memory.)"""
    ids = np.ascontiguousarray(tokens, dtype=token_dtype(n_vocab))
    header = ShardHeader(ids.dtype, n_vocab, ids.size, zlib.crc32(ids), tokenizer)
    Path(path).write_bytes(header.pack() + ids.tobytes())


def read_header(path: str | Path) -> ShardHeader:
    """Header of a shard whose size agrees with it; raises DataError otherwise."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot read the shard ({error.strerror})") from error
    if raw[:8] != MAGIC:
        raise DataError(f"{path}: not a token shard (it does not start with {MAGIC.decode()})")
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path}: truncated shard ({size} bytes, the header alone has {HEADER_BYTES})")
    _, version, width, n_vocab, n_tokens, checksum, tokenizer = _HEADER.unpack_from(raw)
    (header_checksum,) = struct.unpack_from("<I", raw, _HEADER.size)
    if version != VERSION:
        raise DataError(f"{path}: shard version {version}; this code reads version {VERSION}")
    if zlib.crc32(raw[: _HEADER.size]) != header_checksum or width not in (2, 4):
        raise DataError(f"{path}: corrupted shard (its header fails its checksum)")
    expected = HEADER_BYTES + n_tokens * width
    if size != expected:
        state = "truncated" if size < expected else "overlong"
        raise DataError(f"{path}: {state} shard ({size} bytes instead of {expected} for {n_tokens} tokens)")
    return ShardHeader(np.dtype(f"<u{width}"), n_vocab, n_tokens, checksum, tokenizer.hex())


def open_shard(path: str | Path) -> np.ndarray:
    """The ids of a shard, memory-mapped read-only, [n_tokens]."""
    header = read_header(path)
    if header.n_tokens == 0:
        return np.empty(0, header.dtype)  # nothing to map
    return np.memmap(path, header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.n_tokens,))


def verify_shard(path: str | Path) -> None:
    """Reads the whole shard; raises DataError if the checksum is wrong or an id is outside the vocabulary."""
    header, ids = read_header(path), open_shard(path)
    checksum = 0
    for start in range(0, len(ids), _CHUNK):
        chunk = np.asarray(ids[start : start + _CHUNK])
        checksum = zlib.crc32(chunk, checksum)
        if chunk.max() >= header.n_vocab:
            at = int(np.argmax(chunk >= header.n_vocab))
            raise DataError(
                f"{path}: token {start + at} has id {chunk[at]}, outside the vocabulary of {header.n_vocab} ids"
            )
    if checksum != header.checksum:
        raise DataError(f"{path}: corrupted shard (checksum {checksum:08x} instead of {header.checksum:08x})")


def check_shards(paths: list[Path], tokenizer: str) -> None:
    """Raises DataError unless every shard is whole and was made with the tokenizer of that identity.

    Headers and sizes are checked always. Contents are read in full when the set is small or has not been checked
    since it last changed: a stamp file beside the shards holds size and modification time of each checked one.
    """
    for path in paths:
        made_with = read_header(path).tokenizer
        if made_with != tokenizer:
            raise DataError(
                f"{path}: made with another tokenizer (identity {made_with[:12]}, the configured one is "
                f"{tokenizer[:12]}); prepare the data again or choose the tokenizer it was made with"
            )
    small = sum(path.stat().st_size for path in paths) <= SMALL_SET_BYTES
    for folder in sorted({path.parent for path in paths}):
        stamps = _read_stamps(folder)
        stale = [path for path in paths if path.parent == folder and (small or stamps.get(path.name) != _stamp(path))]
        for path in stale:
            verify_shard(path)
        if not small and stale:
            stamp_shards(folder, stale)


def stamp_shards(folder: Path, checked: list[Path]) -> None:
    """Records shards of `folder` as checked; if it cannot be written, that costs the check at the next start."""
    stamps = _read_stamps(folder) | {path.name: _stamp(path) for path in checked}
    temporary = folder / f".{_STAMPS}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(stamps, indent=1) + "\n")
        temporary.replace(folder / _STAMPS)
    except OSError:
        temporary.unlink(missing_ok=True)


def _read_stamps(folder: Path) -> dict[str, list[int]]:
    try:
        return dict(json.loads((folder / _STAMPS).read_text()))
    except (OSError, ValueError):
        return {}


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


class TokenStream:
    """The concatenation of shards, read window by window without ever loading them.

    Pages that have been read count as shared memory of the process until the kernel wants them back.
    """

    def __init__(self, paths: list[Path]):
        self._shards = [open_shard(path) for path in paths]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start+count-1 as int64, [count]; shorter at the end of the stream."""
        stop = min(start + count, len(self))
        out = np.empty(max(stop - start, 0), dtype=np.int64)
        shard = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < len(out):
            ids = self._shards[shard]
            offset = start + filled - (int(self._ends[shard]) - len(ids))
            piece = ids[offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return out

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """One window of `length` tokens from each start; int64, [len(starts), length]. All must lie inside."""
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts):
            row[:] = self.read(int(start), length)
        return out

    def chunks(self, size: int = _CHUNK, limit: int | None = None):
        """The stream in order, in arrays of at most `size` tokens, up to `limit` tokens in all."""
        stop = len(self) if limit is None else min(limit, len(self))
        for start in range(0, stop, size):
            yield self.read(start, min(size, stop - start))
