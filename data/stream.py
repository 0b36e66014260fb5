"""A Hugging Face dataset, tokenized on the fly.

Each rank reads its own share of the stream (a node's share of the files where they divide evenly, else every n-th
row), joins the training documents by the end-of-text token, and cuts the tokens into consecutive sequences in the
order in which the dataset is published. Every further epoch reads the same again.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from data import DataError, hf
from data.encode import document_hash
from data.loader import BaseLoader, check_identity, sequences_per_rank, split_windows
from data.prepared import PreparedData
from data.tokenizer import utf8

if TYPE_CHECKING:
    from twell.config import DataConfig


RETRY_AFTER = (1, 5, 15, *[30] * 20)  # seconds to wait for a stream that broke off, beyond the library's own tries


class StreamLoader(BaseLoader):
    """Training batches of one rank from a stream; arguments as for `Loader`.

    prepared: what `prepare` made of the stream: its tokenizer, its validation split, and which documents belong to
    the latter. With several ranks `state_dict` is a collective call: every rank gets the states of all.
    """

    def __init__(
        self,
        cfg: "DataConfig",
        prepared: PreparedData,
        *,
        seq_len: int,
        batch_sequences: int,
        micro: int,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        mask_documents: bool = False,
    ):
        super().__init__(micro, device)
        self._cfg, self._tokenizer, self._val_below = cfg, prepared.tokenizer, prepared.meta["val_below"]
        self._seq_len, self._rank, self._world_size = seq_len, rank, world_size
        self._per_rank = sequences_per_rank(batch_sequences, micro, world_size)
        self._eot = prepared.tokenizer.eot if mask_documents else None
        self._dataset = self._open()
        self._beginning = self._dataset.state_dict()
        # passes completed, where the dataset stands, and tokens read but not handed out
        self._position: dict[str, Any] = {"epoch": 0, "dataset": self._beginning, "left": []}
        self._identity = {"data": prepared.fingerprint, "seq_len": seq_len, "batch_sequences": batch_sequences}
        self._identity["world_size"] = world_size

    @property
    def epoch(self) -> float:
        return float(self._position["epoch"])

    def state_dict(self) -> dict[str, Any]:
        positions = [self._position]
        if self._world_size > 1:
            positions *= self._world_size
            dist.all_gather_object(positions, self._position)
        return {"positions": positions, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity)
        self.close()
        self._position = state["positions"][self._rank]

    def _open(self):
        dataset = hf.load(self._cfg, streaming=True)
        if self._world_size == 1:
            return dataset
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, self._rank, self._world_size)

    def _producer(self):
        read = self._reader(self._position)

        def produce():
            nonlocal read
            waits = iter(RETRY_AFTER)
            while True:
                try:
                    return read()
                except DataError:
                    raise
                except Exception as error:  # whatever the library, the Hub or the network may raise
                    wait = next(waits, None)
                    cause = f"data.hf_path={self._cfg.hf_path}: the stream broke off ({type(error).__name__}: {error})"
                    if wait is None:
                        raise DataError(f"{cause}, and could not be taken up again") from error
                    print(f"{cause}; trying again in {wait} s", file=sys.stderr, flush=True)
                    time.sleep(wait)
                    read = self._reader(read.position)

        return produce

    def _reader(self, position: dict[str, Any]) -> Callable[[], tuple[dict[str, torch.Tensor | None], Any]]:
        """Reads step after step from `position` on; its attribute `position` is that after the latest whole step."""
        self._dataset.load_state_dict(position["dataset"])
        epoch = position["epoch"]
        left = np.array(position["left"], dtype=np.int64)
        documents = self._documents()
        needed = self._per_rank * self._seq_len + 1

        def read():
            nonlocal epoch, left, documents
            parts, count, fresh_pass = [left], len(left), False
            while count < needed:
                ids = next(documents, None)
                if ids is None:
                    if fresh_pass:
                        raise DataError(f"data.hf_path={self._cfg.hf_path}: the stream holds no training text")
                    self._dataset.load_state_dict(self._beginning)
                    documents, epoch, fresh_pass = self._documents(), epoch + 1, True
                    continue
                parts.append(ids)
                count, fresh_pass = count + len(ids), False
            tokens = np.concatenate(parts)
            left = tokens[needed - 1 :]  # the last target is the next step's first token
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:needed], self._seq_len + 1)[:: self._seq_len]
            read.position = {"epoch": epoch, "dataset": self._dataset.state_dict(), "left": left.tolist()}
            return split_windows(windows, self._eot), read.position

        read.position = position
        return read

    def _documents(self) -> Iterator[np.ndarray]:
        """The rest of this pass: training documents with their end of text, int64 [n]."""
        for row in self._dataset:
            (text,) = hf.texts_of({self._cfg.field: [row[self._cfg.field]]}, self._cfg)
            raw = utf8(text)
            if text and document_hash(raw) >= self._val_below:
                yield np.append(self._tokenizer.encode_array(raw.decode()), self._tokenizer.eot).astype(np.int64)
