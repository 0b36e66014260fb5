"""State: what one FFN layer remembers from earlier steps, to run the next ones fast.

Nothing here changes a result by more than rounding; it decides buffer sizes, the neuron order, how many neurons are
hot, and whether the layer runs dense. A pass reads the decision from the host and leaves its own measurements on the
device (`Seen`), so no step waits for the other side. Off the step's path, once per optimizer step or rarer, the caller
does

    if overflowed(states):   # a 0-dim device tensor; fold it into a read that happens anyway
        update(states)       # larger buffers: the results of that step are incomplete, repeat it before the optimizer
    ...
    update(states)           # learn from what was seen: one host read for all layers

and may print `table(states)`. `state_dict` belongs into a checkpoint: orders and routes decide how sums are rounded.
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import dispatch
from kernels.dispatch import Costs, Shape
from kernels.launch import TILE
from kernels.order import Order, by_frequency, make_order, natural
from kernels.sparse import Room, cold_tiles
from kernels.summary import PER, Seen

HEADROOM = 1.25  # room given over room seen
MEMORY = 0.5  # weight of the firing counts of earlier updates


@dataclass(frozen=True)
class Decision:
    """How a layer runs until the next update. Rates and predictions are those it was made from."""

    version: int
    order: Order
    rate: Tensor | None = None  # fp64 [h] on the host, share of tokens on which each neuron fires, in this order
    room: tuple[int, int, int] | None = None  # entries, segments, blocks per PER tokens; None: never measured
    routes: dict[tuple, bool] = field(default_factory=dict)  # answers already given by `runs_sparse`

    def costs(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Costs, Costs]:
        """Predicted costs (sparse, dense)."""
        rates = dispatch.measured_rates(device, dtype)
        forward, backward = dispatch.sparse_costs(shape, rates, self.rate, torch.tensor([self.order.n_hot]))
        return Costs(forward.item(), backward.item()), dispatch.dense_costs(shape, rates)

    def runs_sparse(self, shape: Shape, backward: bool, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a pass over shape.n tokens, with or without a backward, is predicted to gain from sparsity."""
        if self.room is None:
            return False
        key = (shape, backward, dtype)
        if key not in self.routes:
            sparse, dense = self.costs(shape, device, dtype)
            self.routes[key] = sparse.total(backward) < dense.total(backward)
        return self.routes[key]

    def room_for(self, n: int, h: int, save: bool) -> Room:
        """Capacities for n tokens; twice as much for passes without backward, which are not repeated."""
        entries, segments, blocks = (-(-per * n // PER) * (1 if save else 2) for per in self.room)
        tiles = cold_tiles(h, self.order)
        return Room(min(entries + 256, n * h), min(segments + 16, n * tiles), min(blocks + 64, n * tiles))


class FFNState:
    """The memory of one layer with h neurons whose weights live on `device`."""

    _live: "weakref.WeakValueDictionary[int, FFNState]" = weakref.WeakValueDictionary()
    _keys = itertools.count(1)

    def __init__(self, h: int, device: torch.device | str):
        device = torch.device(device)
        self.h = h
        self.seen = Seen(
            torch.zeros(6, dtype=torch.int64, device=device), torch.zeros(h, dtype=torch.int32, device=device)
        )
        self.shape: Shape | None = None  # of the latest training pass
        self.dtype: torch.dtype | None = None
        self.fired = torch.zeros(h, dtype=torch.float64)  # firing counts, older updates weighing less
        self.tokens = 0.0
        self.decision = Decision(0, natural(h, device))
        self.decisions = {0: self.decision}  # the latest few: a backward pass uses that of its forward
        # Custom operators take tensors and numbers only, and a number would be baked into a compiled graph.
        key = next(self._keys)
        self.handle = torch.tensor([key])
        self._live[key] = self

    @classmethod
    def of(cls, handle: Tensor) -> "FFNState":
        return cls._live[int(handle)]

    def decide(self, decision: Decision) -> None:
        self.decision = decision
        self.decisions[decision.version] = decision
        for version in sorted(self.decisions)[:-4]:
            del self.decisions[version]

    def learn(self, numbers: Sequence[int], fired: Tensor) -> None:
        """Decide anew from the host copy of `seen`; `fired` int32 [h]."""
        calls, tokens, *seen_room, _ = numbers
        if calls == 0 or tokens == 0 or self.shape is None:
            return
        self.fired = MEMORY * self.fired + fired
        self.tokens = MEMORY * self.tokens + tokens
        rate = self.fired / self.tokens
        device = self.seen.numbers.device
        rates = dispatch.measured_rates(device, self.dtype)

        old = self.decision
        order = by_frequency(rate)
        n_hot, new_costs = dispatch.best_n_hot(self.shape, rates, rate[order])
        kept_rate = rate[old.order.order.cpu().long()]
        kept_costs = Costs(
            *(c.item() for c in dispatch.sparse_costs(self.shape, rates, kept_rate, torch.tensor([old.order.n_hot])))
        )
        keep = old.rate is not None and kept_costs.total(True) < (1 + dispatch.HYSTERESIS) * new_costs.total(True)
        if keep:
            room = tuple(_room(had, seen) for had, seen in zip(old.room, seen_room))
            if room == old.room:
                old.routes.clear()
                self.decide(Decision(old.version, old.order, kept_rate, room))
                return
            self.decide(Decision(old.version + 1, old.order, kept_rate, room))
            return
        ordered = rate[order]
        cold = float(ordered[n_hot:].sum())
        tile_rate = torch.nn.functional.pad(ordered[n_hot:], (0, (n_hot - self.h) % TILE)).view(-1, TILE).sum(1)
        bounds = (  # neither more segments than long rows of just over one segment, nor more blocks than entries
            seen_room[0],
            min(seen_room[1], int(2 * cold / 64 * PER) + 1) if n_hot < old.order.n_hot else seen_room[1],
            int(tile_rate.clamp(max=1).sum() * PER) + 1,
        )
        room = tuple(int(HEADROOM * b) + 1 for b in bounds)
        self.decide(Decision(old.version + 1, make_order(order.to(device), n_hot), ordered, room))

    def state_dict(self) -> dict[str, object]:
        decision = self.decision
        return {
            "fired": self.fired, "tokens": self.tokens, "order": decision.order.order.cpu(), "room": decision.room,
            "n_hot": decision.order.n_hot, "rate": decision.rate, "dtype": self.dtype,
            "shape": None if self.shape is None else tuple(self.shape),
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, object]) -> None:
        order = make_order(saved["order"].to(self.seen.numbers.device), saved["n_hot"])
        self.fired, self.tokens, self.dtype = saved["fired"], saved["tokens"], saved["dtype"]
        self.shape = None if saved["shape"] is None else Shape(*saved["shape"])
        self.decide(Decision(self.decision.version + 1, order, saved["rate"], saved["room"]))


def _room(had: int, seen: int) -> int:
    """Room for what was seen, with headroom; the room had, if it still fits and is not much too large."""
    want = int(HEADROOM * seen) + 1
    return had if seen <= had <= 2 * want else want


def overflowed(states: Sequence[FFNState]) -> Tensor:
    """Whether any layer ran out of room since the last update: bool scalar on the device."""
    return torch.stack([state.seen.numbers[5] for state in states]).any()


def update(states: Sequence[FFNState]) -> None:
    """Let every layer decide anew from what it saw since the last update. Waits for the device, once."""
    numbers = torch.stack([state.seen.numbers for state in states])
    fired = torch.cat([state.seen.fired for state in states])
    host = torch.cat([numbers.view(-1), fired.long()]).to("cpu")
    rows = host[: numbers.numel()].view(len(states), -1).tolist()
    counts = host[numbers.numel() :].split([state.h for state in states])
    for state, row, fired in zip(states, rows, counts):
        state.seen.numbers.zero_()
        state.seen.fired.zero_()
        state.learn(row, fired)


def table(states: Sequence[FFNState]) -> str:
    """One line a layer: how sparse it is, what was decided, and the prediction (ms) that decided it."""
    lines = ["layer   nnz  cold   hot  train  infer   sparse/dense fwd   sparse/dense fwd+bwd   room per 1024 tokens"]
    for i, state in enumerate(states):
        decision = state.decision
        if decision.rate is None:
            lines.append(f"{i:5d}  not measured yet: dense")
            continue
        nnz, cold = float(decision.rate.sum()), float(decision.rate[decision.order.n_hot :].sum())
        device, dtype = state.seen.numbers.device, state.dtype
        sparse, dense = decision.costs(state.shape, device, dtype)
        train, infer = (
            "sparse" if decision.runs_sparse(state.shape, b, device, dtype) else "dense" for b in (True, False)
        )
        lines.append(
            f"{i:5d} {nnz:5.0f} {cold:5.1f} {decision.order.n_hot:5d} {train:>6} {infer:>6} "
            f"{sparse.forward * 1e3:9.3f}/{dense.forward * 1e3:<8.3f} "
            f"{sparse.total(True) * 1e3:11.3f}/{dense.total(True) * 1e3:<10.3f} {decision.room}"
        )
    return "\n".join(lines)
