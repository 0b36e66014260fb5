"""Text to shards, once.

    python -m data.prepare                                             # the default: Python's standard library
    python -m data.prepare data=jsonl 'data.paths=[corpus.jsonl.xz]' data.tokenizer=gpt2
    python -m data.prepare data=openwebtext data.workers=16

train.py does this itself when the data set is not there yet. A prepared set is a folder

    datasets/NAME-TOKENIZER-FINGERPRINT/   train-00000.bin ... val-00000.bin   tokenizer/   meta.json

whose fingerprint covers the source (paths, sizes, modification times) and every setting that decides its contents.
It is built in FOLDER.partial and renamed when complete. A killed preparation continues where its journal says; bad
input removes the partial folder. Processes that ask for the same set at once wait for the one that builds it.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from data import DataError
from data.bpe import train_bpe
from data.encode import SPLITS, Counts, EncodedBlock, Encoder, validation_threshold
from data.lock import locked
from data.prepared import META, TOKENIZER, PreparedData, open_prepared, open_shard_files
from data.progress import Progress
from data.shards import stamp_shards
from data.sources import Block, Source, expand_paths, open_source
from data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from data.workers import WorkerPool
from data.writer import SplitWriter
from twell.config import Config, DataConfig, hydra_main

LAYOUT = 1  # raise it when the same source and settings would give other shards
JOURNAL = "journal.json"
JOURNAL_SECONDS = 5.0  # at most about this much work is lost to a kill


def prepare(cfg: DataConfig, *, val_tokens: int = 1 << 20, log: Callable[[str], None] = print) -> PreparedData:
    """The prepared data set that `cfg` describes, built if it is not there.

    val_tokens: for a stream (data.streaming), of which only the validation split is prepared: how many tokens of it.
    Raises DataError on input that cannot be used; nothing half-written stays then.
    """
    if cfg.source == "shards":
        return _ready_made(cfg)
    if cfg.streaming and not cfg.val_fraction:
        raise DataError(f"data.val_fraction={cfg.val_fraction} with data.streaming=true: there is nothing to prepare")
    if cfg.tokenizer == "stored":
        raise DataError(
            f"data.tokenizer=stored with data.source={cfg.source}: only ready-made shards (data=shards) have a "
            "tokenizer stored beside them; use bytes, bpe or a tiktoken encoding such as gpt2"
        )
    source = open_source(cfg)
    label = cfg.tokenizer.strip("./").replace("/", "_")  # of a folder, too
    folder = Path(cfg.dir) / f"{cfg.name}-{label}-{_fingerprint(cfg, source, val_tokens)}"
    built = None
    try:
        if not (folder / META).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(folder.name + ".lock")):
                if not (folder / META).exists():
                    built = _build(cfg, source, folder, val_tokens, log)
    except OSError as error:
        raise DataError(
            f"data.dir={cfg.dir}: cannot use {error.filename or folder} ({error.strerror}); choose a data.dir that can "
            "be written to"
        ) from error
    if built:
        log(built)
    return open_prepared(folder)


def _ready_made(cfg: DataConfig) -> PreparedData:
    if cfg.tokenizer == "bpe":
        raise DataError(
            "data.tokenizer=bpe with data.source=shards: a BPE is trained on text, and shards hold tokens; use stored, "
            "for the tokenizer that lies beside them, or name the one that they were made with"
        )
    shards = expand_paths(cfg.paths, suffixes=(".bin",))
    stored = shards[0].parent / TOKENIZER
    tokenizer = load_tokenizer(stored) if cfg.tokenizer == "stored" else make_tokenizer(cfg.tokenizer)
    return open_shard_files(shards, tokenizer)


def _fingerprint(cfg: DataConfig, source: Source, val_tokens: int) -> str:
    settings = [LAYOUT, source.describe(), cfg.tokenizer, cfg.val_fraction, cfg.shard_tokens]
    settings += [cfg.bpe_vocab_size] if cfg.tokenizer == "bpe" else []
    settings += [load_tokenizer(cfg.tokenizer).identity] if "/" in cfg.tokenizer else []
    settings += [val_tokens] if cfg.streaming else []
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]


def _build(cfg: DataConfig, source: Source, folder: Path, val_tokens: int, log: Callable[[str], None]) -> str:
    """Builds `folder` in its .partial folder and says what is there; only one process at a time may be here."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(exist_ok=True)
    start = time.monotonic()
    try:
        meta = _Preparation(cfg, source, partial, val_tokens, log).run()
    except DataError:
        shutil.rmtree(partial)
        raise
    except OSError as error:
        raise DataError(
            f"{error.filename or partial}: {error.strerror or error}; what is done so far stays in {partial}, and the "
            "same command continues from there"
        ) from error
    (partial / JOURNAL).unlink(missing_ok=True)
    _write_json(partial / META, meta)
    stamp_shards(partial, [partial / name for name in meta["train"] + meta["val"]])
    partial.rename(folder)
    return f"{_summary(meta)}, {time.monotonic() - start:.1f} s: {folder}"


class _Preparation:
    """One build of one data set. `run` may be called again after a kill, on the same folder."""

    def __init__(self, cfg: DataConfig, source: Source, folder: Path, val_tokens: int, log: Callable[[str], None]):
        self.cfg, self.source, self.folder, self.val_tokens, self.log = cfg, source, folder, val_tokens, log

    def run(self) -> dict:
        """Writes tokenizer and shards; returns the contents of meta.json."""
        val_below = self._journal().get("val_below", validation_threshold(self.cfg.val_fraction))
        tokenizer = self._tokenizer(val_below)
        counts, names = self._write_splits(tokenizer, val_below)
        if self.cfg.val_fraction and not counts.documents[1] and counts.smallest_hash + 1 != val_below:
            # so few documents that none was chosen: hold out the one, with its copies, that comes first by hash
            val_below = counts.smallest_hash + 1
            (self.folder / JOURNAL).unlink(missing_ok=True)
            counts, names = self._write_splits(tokenizer, val_below)
        self._check(counts)
        return {
            **names,
            "val_below": val_below,
            **asdict(counts),
            "tokenizer": tokenizer.name,
            "n_vocab": tokenizer.n_vocab,
        }

    def _check(self, counts: Counts) -> None:
        total = sum(counts.documents)
        where = f"data.source={self.cfg.source}"
        if not total:
            left_out = f" ({counts.empty} documents without text, {counts.binary} binary files)"
            raise DataError(f"{where}: no text found{left_out if counts.empty + counts.binary else ''}")
        if not self.cfg.streaming and not counts.documents[0]:
            raise DataError(
                f"{where}: too little text: {total} document{'s' * (total > 1)}, all in the validation split; "
                f"give more documents or set data.val_fraction (now {self.cfg.val_fraction}) lower"
            )

    def _tokenizer(self, val_below: int) -> Tokenizer:
        folder = self.folder / TOKENIZER
        if not folder.exists():
            if self.cfg.tokenizer == "bpe":
                self.log(f"training a BPE of {self.cfg.bpe_vocab_size} ids")
                tokenizer = train_bpe(self.source.blocks(), self.cfg.bpe_vocab_size, val_below)
            else:
                tokenizer = make_tokenizer(self.cfg.tokenizer)
            temporary = self.folder / "tokenizer.partial"
            tokenizer.save(temporary)
            temporary.rename(folder)
        return load_tokenizer(folder)

    def _write_splits(self, tokenizer: Tokenizer, val_below: int) -> tuple[Counts, dict[str, list[str]]]:
        """One pass over the source, or the rest of one; returns what was counted and the shards of each split."""
        journal = self._journal()
        counts = Counts(**journal["counts"]) if journal else Counts()
        kind = {"n_vocab": tokenizer.n_vocab, "tokenizer": tokenizer.identity, "shard_tokens": self.cfg.shard_tokens}
        writers = [SplitWriter(self.folder, split, **kind, state=journal.get(split)) for split in SPLITS]
        blocks_done, size_done = journal.get("blocks", 0), journal.get("size", 0)
        if journal:
            self.log(f"continuing after {sum(counts.documents)} documents in {self.folder}")
        bytes_before, synced = sum(counts.text_bytes), time.monotonic()
        progress = Progress(f"tokenizing {self.cfg.name}", self.source.size, self.log)
        progress.skip(size_done)
        with closing(progress):
            for block, encoded in self._encoded(tokenizer, val_below, blocks_done):
                for writer, ids in zip(writers, encoded.ids):
                    writer.append(ids)
                counts.add(encoded.counts)
                blocks_done, size_done = blocks_done + 1, size_done + block.size
                if time.monotonic() - synced >= JOURNAL_SECONDS:
                    state = {split: writer.sync() for split, writer in zip(SPLITS, writers)}
                    state |= {"blocks": blocks_done, "size": size_done, "val_below": val_below}
                    _write_json(self.folder / JOURNAL, state | {"counts": asdict(counts)})
                    synced = time.monotonic()
                progress.update(size_done, sum(counts.text_bytes) - bytes_before, sum(counts.tokens))
                if self.cfg.streaming and counts.tokens[1] > self.val_tokens:
                    break
        return counts, {split: writer.finish() for split, writer in zip(SPLITS, writers)}

    def _encoded(self, tokenizer: Tokenizer, val_below: int, skip: int) -> Iterator[tuple[Block, EncodedBlock]]:
        """The source's blocks, encoded, without the first `skip` of them."""
        blocks = self.source.blocks()
        for _ in range(skip):
            next(blocks)
        workers = self.cfg.workers or _available_cores()
        if workers == 1:
            encode = Encoder(tokenizer, val_below, only_val=self.cfg.streaming)
            for block in blocks:
                yield block, encode(block)
        else:
            with WorkerPool(workers, self.folder / TOKENIZER, val_below, only_val=self.cfg.streaming) as pool:
                yield from pool.map(blocks)

    def _journal(self) -> dict:
        try:
            return json.loads((self.folder / JOURNAL).read_text())
        except FileNotFoundError:
            return {}


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: heeds taskset and batch systems
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _write_json(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _summary(meta: dict) -> str:
    parts = [
        f"{documents:,} {split} documents ({tokens / 1e6:.2f}M tokens)"
        for split, documents, tokens in zip(SPLITS, meta["documents"], meta["tokens"])
        if documents
    ]
    left_out = {"empty": "empty documents left out", "binary": "binary files left out"}
    parts += [f"{meta[key]} {words}" for key, words in left_out.items() if meta[key]]
    if meta["replaced"]:
        parts.append(f"{meta['replaced']} pieces of broken UTF-8 replaced")
    return "prepared " + ", ".join(parts)


@hydra_main
def main(cfg: Config) -> None:
    from twell.checks import validate  # imports torch, which preparing does without

    validate(cfg)
    prepare(cfg.data, val_tokens=cfg.eval.tokens)


if __name__ == "__main__":
    main()
