"""The engine: continues any number of prompts with a few rows of KV cache, and hands out tokens as they come.

    engine = Engine(model, rows=8)
    for request, token in engine.stream(prompts, max_new_tokens=100, sampling=Sampling(), seeds=range(len(prompts))):
        ...  # token None: this request has ended

Each row works on one request. Rows that are free take the next prompts, which are computed together (prefill); then all
rows take steps of one token, which on a GPU are replays of a CUDA graph. The host stays one step behind: it launches
the next step before it looks at the tokens of the last, so the device does not wait for it. The text of a request
depends on its prompt, seed and settings, not on what shares its batch (but for rounding: products of other shapes).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from twell.decoder import Decoder, KVCache
from twell.errors import UserError
from twell.model import Transformer
from twell.relu_ffn import check_impl
from twell.sampling import NOT_FINITE, Sampling, next_token, uniform_numbers

SLOTS = 256  # attention of a step reads a multiple of this; each multiple has its own CUDA graph
PREFILL_TOKENS = 32768  # padding included: what one prefill pass computes at most, unless a single prompt is longer

DIVERGED = "the model's logits are not finite: its training has diverged; use an earlier checkpoint"


class Event(NamedTuple):
    """A token of request number `request`, or None: the request has ended."""

    request: int
    token: int | None


@dataclass(eq=False)
class _Request:
    number: int
    ids: list[int]  # the prompt and what has been seen of the answer
    numbers: Random
    to_launch: int  # tokens whose computation has not been launched
    to_receive: int  # tokens that have not been seen
    position: int = 0  # slot of its row that the next step fills
    ended: bool = False


class _Flight(NamedTuple):
    """Tokens on their way to the host."""

    requests: dict[int, _Request]  # by row
    tokens: Tensor  # int64 [rows] on the host, once `landed` has happened
    landed: "torch.cuda.Event | None"


class Engine:
    """Generates with the weights that `model` has now.

    rows: sequences computed together. length: tokens that a row can hold, at most (and by default) the model's seq_len.
    A sequence that outgrows it goes on from the last half of it. impl: of the ReLU FFNs, see `twell.relu_ffn.ReluFFN`.
    graph: steps as CUDA graphs, by default on a GPU. compile: see `twell.decoder.Decoder`. Raises ValueError for a
    value out of range.
    """

    def __init__(
        self,
        model: Transformer,
        rows: int,
        length: int | None = None,
        *,
        impl: str = "auto",
        graph: bool | None = None,
        compile: bool = False,
    ):
        length = model.seq_len if length is None else length
        for name, value in (("rows", rows), ("length", length)):
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        check_impl(impl)
        self.rows, self.length = rows, min(length, model.seq_len)
        self.decoder = Decoder(model, impl, rows, compile)
        self.cache = KVCache(self.decoder, rows, self.length)
        self.device = self.decoder.device
        self.graph = self.device.type == "cuda" if graph is None else graph
        self._next_token = torch.compile(next_token, fullgraph=True, dynamic=False) if compile else next_token
        self._graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}
        # What a step reads and leaves: of rows without a request it is any valid id and slot.
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        self.uniform = torch.zeros(rows, dtype=torch.float64, device=self.device)

    def generate(self, prompts: Sequence[Sequence[int]], *args, **kwargs) -> list[list[int]]:
        """The new ids of each prompt; arguments as for `stream`."""
        answers = [[] for _ in prompts]
        for request, token in self.stream(prompts, *args, **kwargs):
            if token is not None:
                answers[request].append(token)
        return answers

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Collection[int] = (),
    ) -> Iterator[Event]:
        """Continue `prompts` (ids, at least one each; the last `length` count) and yield tokens as they come.

        A request ends after max_new_tokens or before the first token in `stop`, and draws from its own of the `seeds`.
        Tokens of one request come in order, those of several interleaved. Only one stream of an engine can run at a
        time. Raises UserError when logits are not finite.
        """
        if len(seeds) != len(prompts) or not all(prompts):
            raise ValueError(f"{len(prompts)} prompts with {len(seeds)} seeds: one each, and no prompt may be empty")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        if not all(isinstance(token, Integral) for token in stop):
            raise ValueError(f"stop={stop!r}: must hold ids of tokens")
        return self._stream(prompts, max_new_tokens, sampling, seeds, stop)

    def _stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: Collection[int],
    ) -> Iterator[Event]:
        waiting = deque(
            _Request(i, list(prompt), uniform_numbers(seed), max_new_tokens, max_new_tokens)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds))
        )
        running: dict[int, _Request] = {}
        flights: deque[_Flight] = deque()
        while waiting or running or flights:
            full = {row: request for row, request in running.items() if request.position == self.length}
            if len(flights) > 1 or (flights and (full or not (waiting or running))):
                yield from self._land(flights.popleft(), running, stop)
                continue
            if full:
                flights.append(self._prefill(full, max(1, self.length // 2), sampling))
            elif waiting and len(running) < self.rows:
                starting = self._admit(waiting, running)
                running |= starting
                flights.append(self._prefill(starting, self.length, sampling))
            else:
                flights.append(self._step(running, sampling))
            for row in [row for row, request in running.items() if request.to_launch == 0]:
                del running[row]

    def _admit(self, waiting: deque[_Request], running: dict[int, _Request]) -> dict[int, _Request]:
        """Rows for as many waiting requests as there are free rows and as one prefill pass takes."""
        starting, longest = {}, 0
        for row in range(self.rows):
            if row in running or not waiting:
                continue
            longest = max(longest, min(len(waiting[0].ids), self.length))
            if starting and longest * (len(starting) + 1) > PREFILL_TOKENS:
                break
            starting[row] = waiting.popleft()
        return starting

    def _prefill(self, requests: dict[int, _Request], window: int, sampling: Sampling) -> _Flight:
        """Compute the last `window` ids of each request into its row, and draw the next token."""
        prompts = [request.ids[-window:] for request in requests.values()]
        lengths = [len(prompt) for prompt in prompts]
        tokens = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts], device=self.device)
        rows, lengths_on_device = (torch.tensor(numbers, device=self.device) for numbers in (list(requests), lengths))
        logits = self.decoder.prefill(tokens, lengths_on_device, rows, self.cache)
        self._draw_numbers(requests, sampling)
        self.tokens[rows] = next_token(logits, self.uniform[rows], sampling)
        self.positions[rows] = lengths_on_device
        for request, length in zip(requests.values(), lengths):
            request.position = length
        return self._send(requests)

    def _step(self, requests: dict[int, _Request], sampling: Sampling) -> _Flight:
        """One more token for every row."""
        last = max(request.position for request in requests.values())
        slots = min(self.length, (last // SLOTS + 1) * SLOTS)
        self._draw_numbers(requests, sampling)
        self.stepper(slots, sampling)()
        for request in requests.values():
            request.position += 1
        return self._send(requests)

    def stepper(self, slots: int, sampling: Sampling) -> Callable[[], None]:
        """What computes one step of all rows, of which attention reads `slots` slots."""
        if self.graph:
            return self._captured_step(slots, sampling).replay
        return partial(self._compute_step, slots, sampling)

    @torch.no_grad()
    def _compute_step(self, slots: int, sampling: Sampling) -> None:
        """Everything of a step that the device does: tokens, positions and uniform -> tokens, positions."""
        # A row that has diverged, or is without a request and at its end, must not read or write elsewhere.
        positions = self.positions.clamp(max=slots - 1)
        logits = self.decoder.step(self.tokens.clamp(min=0), positions, self.cache, slots)
        self.tokens.copy_(self._next_token(logits, self.uniform, sampling))
        self.positions.add_(1).clamp_(max=self.length)

    def _captured_step(self, slots: int, sampling: Sampling) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get((slots, sampling))
        if graph is not None:
            return graph
        before = self.tokens.clone(), self.positions.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # kernels are compiled and libraries start before the capture
            for _ in range(2):
                self._compute_step(slots, sampling)
                # What the step wrote into the cache, the first replay writes again.
                self.tokens.copy_(before[0])
                self.positions.copy_(before[1])
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._compute_step(slots, sampling)
        self._graphs[slots, sampling] = graph
        return graph

    def _draw_numbers(self, requests: dict[int, _Request], sampling: Sampling) -> None:
        if sampling.temperature == 0:
            return
        numbers = [0.0] * self.rows
        for row, request in requests.items():
            numbers[row] = request.numbers.random()
        host = torch.tensor(numbers, dtype=torch.float64)
        self.uniform.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)

    def _send(self, requests: dict[int, _Request]) -> _Flight:
        """Start copying the tokens just drawn for `requests` to the host."""
        for request in requests.values():
            request.to_launch -= 1
        if self.device.type != "cuda":
            return _Flight(dict(requests), self.tokens.clone(), None)
        host = torch.empty(self.rows, dtype=torch.int64, pin_memory=True)
        host.copy_(self.tokens, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return _Flight(dict(requests), host, landed)

    def _land(self, flight: _Flight, running: dict[int, _Request], stop: Collection[int]) -> Iterator[Event]:
        """Hand out a flight's tokens; requests that end leave their rows."""
        if flight.landed is not None:
            flight.landed.synchronize()
        for (row, request), token in zip(flight.requests.items(), flight.tokens[list(flight.requests)].tolist()):
            if request.ended:  # by its last token, when this step had already been launched
                continue
            if token == NOT_FINITE:
                raise UserError(DIVERGED)
            request.to_receive -= 1
            request.ended = token in stop or request.to_receive == 0
            if token not in stop:
                request.ids.append(token)
                yield Event(request.number, token)
            if request.ended:
                if running.get(row) is request:
                    del running[row]
                yield Event(request.number, None)
