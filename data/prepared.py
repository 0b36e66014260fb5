"""A prepared data set: a folder with train and val shards and the tokenizer that made them."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from data import DataError
from data.crc import joined_crc32
from data.shards import check_shards, read_header
from data.tokenizer import Tokenizer, load_tokenizer

META = "meta.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class PreparedData:
    """train and val: shards in stream order (train is empty for a stream that is tokenized on the fly);
    meta: what `prepare` counted (documents, bytes, replaced characters, ...), empty for ready-made shards."""

    folder: Path
    train: list[Path]
    val: list[Path]
    tokenizer: Tokenizer
    meta: dict = field(default_factory=dict)

    @property
    def train_tokens(self) -> int:
        return sum(read_header(path).n_tokens for path in self.train)

    @property
    def val_tokens(self) -> int:
        return sum(read_header(path).n_tokens for path in self.val)

    @property
    def fingerprint(self) -> str:
        """Identifies the token streams themselves: equal for equal contents, however they are cut into shards."""
        digest = hashlib.sha256(self.tokenizer.identity.encode())
        for split, paths in (("train", self.train), ("val", self.val)):
            n_tokens, checksum = 0, 0
            for header in map(read_header, paths):
                n_tokens += header.n_tokens
                checksum = joined_crc32(checksum, header.checksum, header.n_tokens * header.dtype.itemsize)
            digest.update(f"{split} {n_tokens} {checksum};".encode())
        return digest.hexdigest()[:16]


def open_prepared(folder: str | Path) -> PreparedData:
    """Opens and checks a folder that `prepare` wrote; raises DataError if anything in it is missing or damaged."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / META).read_text())
        train, val = ([folder / name for name in meta[split]] for split in ("train", "val"))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: not a prepared data set, or damaged ({META}: {error}); delete it") from error
    tokenizer = load_tokenizer(folder / TOKENIZER)
    check_shards(train + val, tokenizer.identity)
    return PreparedData(folder, train, val, tokenizer, meta)


def open_shard_files(paths: list[Path], tokenizer: Tokenizer) -> PreparedData:
    """A data set from ready-made shards; their names say which split they belong to (train-*.bin, val-*.bin)."""
    train, val = ([path for path in paths if path.name.startswith(split)] for split in ("train", "val"))
    for split, found in (("train", train), ("val", val)):
        if not found:
            raise DataError(f"data.paths: no {split}-*.bin among the {len(paths)} shards in {paths[0].parent}")
    check_shards(train + val, tokenizer.identity)
    return PreparedData(train[0].parent, train, val, tokenizer)
