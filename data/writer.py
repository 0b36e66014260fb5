"""Writes the shards of one split by appending, in a way that can be continued after a kill."""

import os
import zlib
from pathlib import Path

import numpy as np

from data.shards import HEADER_BYTES, ShardHeader, token_dtype


class SplitWriter:
    """Appends ids to train-00000.bin, ... (or val-...), a new file every `shard_tokens` ids.

    state: what `sync` returned earlier, to continue from there; everything written after it is cut off.
    """

    def __init__(
        self, folder: Path, split: str, *, n_vocab: int, tokenizer: str, shard_tokens: int, state: dict | None = None
    ):
        self._folder, self._split, self._limit = folder, split, shard_tokens
        self._n_vocab, self._tokenizer, self._dtype = n_vocab, tokenizer, token_dtype(n_vocab)
        state = state or {"shard": 0, "tokens": 0, "checksum": 0}
        self._shard, self._tokens, self._checksum = state["shard"], state["tokens"], state["checksum"]
        for later in sorted(folder.glob(f"{split}-*.bin")):
            if later.name >= self._name(self._shard + (self._tokens > 0)):
                later.unlink()
        self._file = None
        if self._tokens:
            self._file = (folder / self._name(self._shard)).open("r+b")
            self._file.truncate(HEADER_BYTES + self._tokens * self._dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def append(self, ids: np.ndarray) -> None:
        while len(ids):
            if self._file is None:
                self._file = (self._folder / self._name(self._shard)).open("wb")
                self._file.write(bytes(HEADER_BYTES))
            piece = np.ascontiguousarray(ids[: self._limit - self._tokens], dtype=self._dtype)
            self._file.write(piece)
            self._checksum = zlib.crc32(piece, self._checksum)
            self._tokens += len(piece)
            ids = ids[len(piece) :]
            if self._tokens == self._limit:
                self._finish_shard()

    def sync(self) -> dict:
        """Puts everything on disk; returns the state to continue from."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"shard": self._shard, "tokens": self._tokens, "checksum": self._checksum}

    def finish(self) -> list[str]:
        """Completes the last shard; returns the names of all."""
        if self._file is not None:
            self._finish_shard()
        return [self._name(shard) for shard in range(self._shard)]

    def close(self) -> None:
        """Stops without completing the shard."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish_shard(self) -> None:
        header = ShardHeader(self._dtype, self._n_vocab, self._tokens, self._checksum, self._tokenizer)
        self._file.seek(0)
        self._file.write(header.pack())
        self.sync()
        self.close()
        self._shard, self._tokens, self._checksum = self._shard + 1, 0, 0

    def _name(self, shard: int) -> str:
        return f"{self._split}-{shard:05d}.bin"
