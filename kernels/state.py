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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import dispatch
from kernels.compact import SPLIT
from kernels.dispatch import Costs, Shape
from kernels.launch import TILE
from kernels.order import Order, by_frequency, make_order, natural
from kernels.sparse import Room, cold_tiles
from kernels.summary import PER, Seen

HEADROOM = 1.25  # room given over room seen
MEMORY = 0.5  # weight of the firing counts of earlier updates


@dataclass(frozen=True)
class Decision:
    """How a layer runs until the next update. Rates and predictions are those it was made from.

    Passes with a backward (train) and without (infer) share the permutation but not the number of hot neurons.
    """

    version: int
    train: Order
    infer: Order
    rate: Tensor | None = None  # fp64 [h] on the host, share of tokens on which each neuron fires, in this order
    room: tuple[int, int, int, int] | None = None  # per PER tokens, as in `Seen`; None: never measured
    routes: dict[tuple, bool] = field(default_factory=dict)  # answers already given by `runs_sparse`

    def order(self, backward: bool) -> Order:
        return self.train if backward else self.infer

    def costs(self, shape: Shape, backward: bool, device: torch.device, dtype: torch.dtype) -> tuple[Costs, Costs]:
        """Predicted costs (sparse, dense)."""
        rates = dispatch.measured_rates(device, dtype)
        n_hot = torch.tensor([self.order(backward).n_hot])
        sparse = dispatch.sparse_costs(shape, rates, self.rate, n_hot)
        return Costs(*(cost.item() for cost in sparse)), dispatch.dense_costs(shape, rates)

    def runs_sparse(self, shape: Shape, backward: bool, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a pass over shape.n tokens, with or without a backward, is predicted to gain from sparsity."""
        if self.room is None:
            return False
        key = (shape, backward, dtype)
        if key not in self.routes:
            sparse, dense = self.costs(shape, backward, device, dtype)
            self.routes[key] = sparse.total(backward) < dense.total(backward)
        return self.routes[key]

    def room_for(self, n: int, h: int, backward: bool) -> Room:
        """Capacities for n tokens. Twice as much for passes without backward, whose callers rarely repeat them."""
        entries, segments, blocks, all_segments = (-(-per * n // PER) for per in self.room)
        if not backward:
            entries, segments = 2 * entries, all_segments
        tiles = cold_tiles(h, self.order(backward))
        return Room(
            min(_rounded(entries + 192, 64), n * h),
            min(_rounded(segments, 16), n * tiles),
            min(_rounded(blocks, 64), n * tiles),
        )


def _rounded(room: int, to: int) -> int:
    """To a multiple: Triton compiles a kernel anew for sizes that are not divisible by 16."""
    return -(-room // to) * to


class FFNState:
    """The memory of one layer with h neurons whose weights live on `device`."""

    _live: "weakref.WeakValueDictionary[int, FFNState]" = weakref.WeakValueDictionary()
    _keys = itertools.count(1)

    def __init__(self, h: int, device: torch.device | str):
        device = torch.device(device)
        self.h = h
        self.seen = Seen(
            torch.zeros(7, dtype=torch.int64, device=device), torch.zeros(h, dtype=torch.int32, device=device)
        )
        self.shape: Shape | None = None  # of the latest training pass
        self.dtype: torch.dtype | None = None
        self.fired = torch.zeros(h, dtype=torch.float64)  # firing counts, older updates weighing less
        self.tokens = 0.0
        order = natural(h, device)
        self.decision = Decision(0, order, order)
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
        calls, tokens, *room_seen, _ = numbers
        if calls == 0 or tokens == 0 or self.shape is None:
            return
        self.fired = MEMORY * self.fired + fired
        self.tokens = MEMORY * self.tokens + tokens
        rate = self.fired / self.tokens
        rates = dispatch.measured_rates(self.seen.numbers.device, self.dtype)

        old = self.decision
        permutation = by_frequency(rate)
        n_hot, costs = dispatch.best_n_hot(self.shape, rates, rate[permutation], backward=True)
        if old.rate is not None:
            kept = replace(old, rate=rate[old.train.order.cpu().long()], routes={})
            kept_costs, _ = kept.costs(self.shape, True, self.seen.numbers.device, self.dtype)
            if kept_costs.total(True) < (1 + dispatch.HYSTERESIS) * costs.total(True):
                room = tuple(_room(had, seen) for had, seen in zip(old.room, room_seen))
                self.decide(replace(kept, version=old.version + 1, room=room))
                return
        rate = rate[permutation]
        n_hot_infer, _ = dispatch.best_n_hot(self.shape, rates, rate, backward=False)
        permutation = permutation.to(self.seen.numbers.device)
        room = _room_in_new_order(room_seen, rate[n_hot:])
        self.decide(
            Decision(old.version + 1, make_order(permutation, n_hot), make_order(permutation, n_hot_infer), rate, room)
        )

    def state_dict(self) -> dict[str, object]:
        decision = self.decision
        return {
            "fired": self.fired, "tokens": self.tokens, "order": decision.train.order.cpu(), "rate": decision.rate,
            "n_hot": (decision.train.n_hot, decision.infer.n_hot), "room": decision.room, "dtype": self.dtype,
            "shape": None if self.shape is None else tuple(self.shape),
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, object]) -> None:
        permutation = saved["order"].to(self.seen.numbers.device)
        self.fired, self.tokens, self.dtype = saved["fired"], saved["tokens"], saved["dtype"]
        self.shape = None if saved["shape"] is None else Shape(*saved["shape"])
        train, infer = (make_order(permutation, n_hot) for n_hot in saved["n_hot"])
        self.decide(Decision(self.decision.version + 1, train, infer, saved["rate"], saved["room"]))


def _room_in_new_order(seen: Sequence[int], cold_rate: Tensor) -> tuple[int, ...]:
    """Room for an order that has not run yet: upper bounds take the place of what only that order could measure."""
    entries, _, _, all_segments = seen
    # A long row has at most 2 / SPLIT segments per cold entry; a tile is touched at most as often as its neurons fire.
    segments = min(all_segments, int(2 / SPLIT * float(cold_rate.sum()) * PER))
    tile_rate = pad(cold_rate, (0, -len(cold_rate) % TILE)).view(-1, TILE).sum(1).clamp(max=1)
    blocks = int(float(tile_rate.sum()) * PER)
    return tuple(int(HEADROOM * need) + 1 for need in (entries, segments, blocks, all_segments))


def _room(had: int, seen: int) -> int:
    """Room for what was seen, with headroom; the room had, if it still fits and is not much too large."""
    want = int(HEADROOM * seen) + 1
    return had if seen <= had <= 2 * want else want


def overflowed(states: Sequence[FFNState]) -> Tensor:
    """Whether any layer ran out of room since the last update: bool scalar on the device."""
    return torch.stack([state.seen.numbers[6] for state in states]).any()


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
    lines = [
        "layer   nnz   hot  cold  train   ms sparse/dense     hot  infer   ms sparse/dense    room per 1024 tokens"
    ]
    for i, state in enumerate(states):
        decision = state.decision
        if decision.rate is None:
            lines.append(f"{i:5d}  not measured yet: dense")
            continue
        line = f"{i:5d} {float(decision.rate.sum()):5.0f}"
        for backward in (True, False):
            n_hot = decision.order(backward).n_hot
            arguments = (state.shape, backward, state.seen.numbers.device, state.dtype)
            sparse, dense = (cost.total(backward) * 1e3 for cost in decision.costs(*arguments))
            route = "sparse" if decision.runs_sparse(*arguments) else "dense"
            cold = f" {float(decision.rate[n_hot:].sum()):5.1f}" if backward else ""
            line += f" {n_hot:5d}{cold} {route:>6} {sparse:8.3f}/{dense:<8.3f}"
        lines.append(f"{line} {decision.room}")
    return "\n".join(lines)
