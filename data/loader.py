"""Shards to batches.

The global batch is a pure function of (seed, step): the training stream is cut into windows of seq_len + 1 tokens
(each starts on the last token of the one before, so that every token but the first is predicted once per epoch);
every epoch visits them in an order of its own, and step s takes the s-th run of `batch_sequences` windows of this
endless list. Ranks and micro-batches only slice the batch. The state of the loader is therefore its step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data import DataError
from data.permutation import permute
from data.prefetch import Prefetcher
from data.prepared import PreparedData
from data.shards import TokenStream

IGNORE = -100  # a target that the loss does not count


@dataclass
class Batch:
    tokens: torch.Tensor  # int64 [b, T]
    targets: torch.Tensor  # int64 [b, T]: the next token; IGNORE where not counted
    doc_ids: torch.Tensor | None = None  # int32 [b, T]: which document of its window a token belongs to, from 0


class BaseLoader:
    """Hands out what `_producer` makes, a step ahead of its use. `next()` gives the micro-batches of the next step.

    A producer is a function that returns the next step's sequences of this rank, as the dictionary of tensors that
    `split_windows` makes, and the state to continue from after that step.
    """

    def __init__(self, micro: int, device: str | torch.device):
        self._micro, self._device = micro, torch.device(device)
        self._prefetcher: Prefetcher | None = None
        self._waited = 0.0

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        raise NotImplementedError

    @property
    def wait_seconds(self) -> float:
        """Time that `next()` has spent waiting for data, in all."""
        return self._waited + (self._prefetcher.wait_seconds if self._prefetcher else 0.0)

    def next(self) -> list[Batch]:
        """This rank's micro-batches of the next step, on the device."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._producer(), self._device)
        try:
            tensors, self._position = self._prefetcher.get()
        except BaseException:
            self.close()  # its thread has ended, or waits for a consumer that is interrupted
            raise
        return split_micro_batches(tensors, self._micro)

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken; raises DataError if that was another stream of batches."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops the background thread; a later `next()` starts another where this one was."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._waited += self._prefetcher.wait_seconds
            self._prefetcher = None

    def _producer(self) -> Callable[[], tuple[dict[str, torch.Tensor | None], Any]]:
        """Continues from self._position."""
        raise NotImplementedError


class Loader(BaseLoader):
    """Training batches of one rank from shards.

    seq_len: tokens per sequence, T; batch_sequences: sequences per optimizer step over all ranks; micro: sequences per
    rank and micro-batch; mask_documents: give each batch its doc_ids, told by the end-of-text id `eot` (by default
    the tokenizer's). Raises DataError when the split has fewer tokens than one sequence needs.
    """

    def __init__(
        self,
        prepared: PreparedData,
        split: str = "train",
        *,
        seq_len: int,
        batch_sequences: int,
        micro: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        mask_documents: bool = False,
        eot: int | None = None,
    ):
        super().__init__(micro, device)
        self._stream = TokenStream(getattr(prepared, split))
        if len(self._stream) < seq_len + 1:
            raise DataError(
                f"{prepared.folder}: too little text: the {split} split has {len(self._stream)} tokens, one sequence "
                f"of model.seq_len={seq_len} needs {seq_len + 1}"
            )
        self.n_windows = (len(self._stream) - 1) // seq_len  # per epoch
        self._seq_len, self._batch, self._seed = seq_len, batch_sequences, seed
        self._per_rank = sequences_per_rank(batch_sequences, micro, world_size)
        self._first = rank * self._per_rank  # the first sequence of each batch that is this rank's
        self._eot = (prepared.tokenizer.eot if eot is None else eot) if mask_documents else None
        self._position = 0  # the step that `next()` returns
        self._identity = {"data": prepared.fingerprint, "seed": seed, "seq_len": seq_len}
        self._identity["batch_sequences"] = batch_sequences

    @property
    def epoch(self) -> float:
        return self._position * self._batch / self.n_windows

    def step_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of any step, on the CPU; a pure function of its argument."""
        return split_micro_batches(self._assemble(step), self._micro)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity)
        self.close()
        self._position = state["step"]

    def _producer(self):
        step = self._position

        def produce():
            nonlocal step
            step += 1
            return self._assemble(step - 1), step

        return produce

    def _assemble(self, step: int) -> dict[str, torch.Tensor | None]:
        """All sequences of this rank in a step: tokens, targets and doc_ids, [batch_sequences / world_size, T]."""
        first = step * self._batch + self._first
        starts = self._window_starts(np.arange(first, first + self._per_rank, dtype=np.int64))
        return split_windows(self._stream.windows(starts, self._seq_len + 1), self._eot)

    def _window_starts(self, sequences: np.ndarray) -> np.ndarray:
        """Where in the token stream the given members of the endless list of sequences start, [n]."""
        epochs, positions = np.divmod(sequences, self.n_windows)
        starts = np.empty_like(sequences)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            starts[now] = permute(positions[now], self.n_windows, key=(self._seed, int(epoch))) * self._seq_len
        return starts


def validation_batches(
    prepared: PreparedData,
    *,
    tokens: int,
    seq_len: int,
    micro: int,
    rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
    mask_documents: bool = False,
    eot: int | None = None,
) -> list[Batch]:
    """The first `tokens` predictions of the validation split (fewer if it is shorter), sliced over ranks.

    Every batch of every rank has the shape [micro, seq_len] and all ranks get equally many; sequences that the data do
    not fill are padded with targets IGNORE, so that evaluation runs one compiled shape. Raises DataError when there is
    nothing to predict.
    """
    stream = TokenStream(prepared.val)
    if len(stream) < 2:
        raise DataError(
            f"{prepared.folder}: too little text: the val split has {len(stream)} tokens; raise data.val_fraction"
        )
    count = min(tokens, len(stream) - 1)
    per_step = micro * world_size
    n_sequences = -(-count // seq_len)
    n_batches = -(-n_sequences // per_step)  # per rank
    pad = prepared.tokenizer.eot if eot is None else eot
    batches = []
    for batch in range(n_batches):
        windows = np.full((micro, seq_len + 1), pad, dtype=np.int64)
        counted = np.zeros((micro, seq_len), dtype=bool)
        for row in range(micro):
            start = (batch * per_step + rank * micro + row) * seq_len
            window = stream.read(start, min(seq_len, max(count - start, 0)) + 1) if start < count else windows[row, :0]
            windows[row, : len(window)] = window
            counted[row, : max(len(window) - 1, 0)] = True
        tensors = split_windows(windows, pad if mask_documents else None)
        tensors["targets"][~torch.from_numpy(counted)] = IGNORE
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        batches += split_micro_batches(moved, micro)
    return batches


def sequences_per_rank(batch_sequences: int, micro: int, world_size: int) -> int:
    if batch_sequences % (micro * world_size):
        raise DataError(f"{batch_sequences} sequences do not divide into {world_size} ranks x micro-batches of {micro}")
    return batch_sequences // world_size


def split_windows(windows: np.ndarray, eot: int | None) -> dict[str, torch.Tensor | None]:
    """Windows [n, T + 1] to tokens and targets [n, T], and with an `eot` to doc_ids [n, T]."""
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    doc_ids = None
    if eot is not None:
        ends = tokens == eot
        # the end-of-text token still belongs to the document that it ends
        doc_ids = torch.from_numpy(np.cumsum(ends, axis=1, dtype=np.int32) - ends.astype(np.int32))
    return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets), "doc_ids": doc_ids}


def split_micro_batches(tensors: dict[str, torch.Tensor | None], micro: int) -> list[Batch]:
    """[accumulation * micro, T] to a Batch of views per micro-batch."""
    starts = range(0, len(tensors["tokens"]), micro)
    return [
        Batch(**{name: None if tensor is None else tensor[i : i + micro] for name, tensor in tensors.items()})
        for i in starts
    ]


def check_identity(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises DataError if `state` was taken from another stream of batches than the one `identity` describes."""
    for name, value in identity.items():
        if state.get(name) != value:
            cause = ""
            if name == "data":
                cause = " (its text, data.tokenizer or data.val_fraction, or eval.tokens of a stream, has changed)"
            raise DataError(
                f"cannot continue the data stream: {name} was {state.get(name)} and is now {value}{cause}; "
                "start a new run or restore the old value"
            )
