"""Hugging Face datasets: from the Hub or a local folder, or files through a builder (hf_path=parquet with paths)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from data import DataError
from data.sources import BLOCK_BYTES, Documents, describe_files, expand_paths, files_beneath

if TYPE_CHECKING:
    from twell.config import DataConfig

_ROWS = 64  # rows read at once


def load(cfg: "DataConfig", *, streaming: bool):
    """The text column of the dataset: a `datasets.Dataset`, or an `IterableDataset` when streaming."""
    try:
        import datasets
    except ImportError as error:
        raise DataError("data.source=hf needs the package `datasets`: pip install datasets") from error
    where = f"data.hf_path={cfg.hf_path}" + (f" data.hf_name={cfg.hf_name}" if cfg.hf_name else "")
    files = [str(path) for path in expand_paths(cfg.paths)] or None
    try:
        dataset = datasets.load_dataset(
            cfg.hf_path, cfg.hf_name, data_files=files, split=cfg.hf_split, streaming=streaming
        )
        columns = dataset.column_names or list(next(iter(dataset)))
    except Exception as error:  # whatever the builder of that dataset, the Hub or the network may raise
        detail = str(error).strip().splitlines() or [""]
        raise DataError(
            f"{where} data.hf_split={cfg.hf_split}: cannot be loaded ({type(error).__name__}: {detail[0]})"
        ) from error
    if cfg.field not in columns:
        raise DataError(f"{where}: no column {cfg.field!r} (data.field); the columns are {', '.join(columns)}")
    return dataset.select_columns([cfg.field])


def texts_of(rows: dict, cfg: "DataConfig") -> list[str]:
    """The texts of a batch of rows; raises DataError if one is not a string."""
    for value in rows[cfg.field]:
        if not isinstance(value, str):
            raise DataError(
                f"data.hf_path={cfg.hf_path}: column {cfg.field!r} holds a {type(value).__name__}, not a string"
            )
    return rows[cfg.field]


@dataclass
class HFBlock:
    texts: list[str]
    size: int

    def read(self) -> Documents:
        return Documents(self.texts)


class HFSource:
    """A dataset, downloaded into the library's own cache before it is read unless it streams. Its size counts rows."""

    def __init__(self, cfg: "DataConfig"):
        self._cfg = cfg

    @cached_property  # late: naming a prepared data set needs no download
    def _dataset(self):
        return load(self._cfg, streaming=self._cfg.streaming)

    @property
    def size(self) -> int | None:
        return None if self._cfg.streaming else len(self._dataset)

    def describe(self) -> dict:
        return describe(self._cfg)

    def blocks(self) -> Iterator[HFBlock]:
        block, chars = HFBlock([], 0), 0
        for rows in self._dataset.iter(batch_size=_ROWS):
            texts = texts_of(rows, self._cfg)
            block.texts += texts
            block.size += len(texts)
            chars += sum(map(len, texts))
            if chars >= BLOCK_BYTES:
                yield block
                block, chars = HFBlock([], 0), 0
        if block.texts:
            yield block


def describe(cfg: "DataConfig") -> dict:
    """What decides the contents: of a dataset on the Hub its name alone, of local files their sizes and times too."""
    hf_path, files = cfg.hf_path, expand_paths(cfg.paths)
    if Path(hf_path).exists():
        folder = Path(hf_path).resolve()
        hf_path, files = str(folder), [*files, *files_beneath(folder)]
    return {"hf": [hf_path, cfg.hf_name, cfg.hf_split], "files": describe_files(files), "field": cfg.field}
