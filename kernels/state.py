"""State: what one FFN layer remembers from earlier steps, to run the next ones fast.

Nothing here changes a result by more than rounding; it decides buffer sizes, the neuron order, how many neurons are
hot, and whether the layer runs dense. A pass reads the decision from the host and leaves its own measurements on the
device (`Seen`), so no step waits for the other side. Off the step's path, once per optimizer step or rarer, the caller
does

    while overflowed(states):  # a 0-dim device tensor; fold it into a read that happens anyway
        update(states)         # larger buffers: the results of that step are incomplete, repeat it before the optimizer
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
from kernels.order import TILE, Order, by_coactivation, by_frequency, make_order, natural, unpack_words
from kernels.products import WHOLE
from kernels.room import HEADROOM, PER, Needs, Room, RoomMemory, room_for
from kernels.sparse import cold_tiles
from kernels.summary import Seen

SAMPLE = 4096  # tokens from which co-activation is learnt, once for each order
SLOTS = 16  # of a TwELL tile, until one runs over
MEMORY = 0.5  # weight of the firing counts of earlier updates


@dataclass(frozen=True)
class Decision:
    """How a layer runs until the next update. Rates and predictions are those it was made from.

    Passes with a backward (train) and without (infer) share the permutation but not the number of hot neurons.
    """

    version: int
    train: Order
    infer: Order
    slots: int = 0  # 32-bit slots of a TwELL tile, 0: the gate product packs a TileBitmap
    ordered: int = 0  # version that made the orders
    rate: Tensor | None = None  # fp64 [h] on the host, share of tokens on which each neuron fires, in this order
    room: Needs | None = None  # per PER tokens; None: never measured
    grouped: bool = False  # cold neurons by co-activation rather than by frequency
    routes: dict[tuple, bool] = field(default_factory=dict)  # answers already given by `runs_sparse`
    rooms: dict[tuple, Room] = field(default_factory=dict)  # and by `room_for`

    def order(self, backward: bool) -> Order:
        return self.train if backward else self.infer

    def costs(self, shape: Shape, backward: bool, device: torch.device, dtype: torch.dtype) -> tuple[Costs, Costs]:
        """Predicted costs (sparse, dense); the model takes the cold neurons as ordered by frequency."""
        rates = dispatch.measured_rates(device, dtype)
        n_hot = self.order(backward).n_hot
        rate = torch.cat([self.rate[:n_hot], self.rate[n_hot:].sort(descending=True).values])
        sparse = dispatch.sparse_costs(shape, rates, rate, torch.tensor([n_hot]))
        return Costs(*(cost.item() for cost in sparse)), dispatch.dense_costs(shape, rates)

    def runs_sparse(
        self, shape: Shape, backward: bool, device: torch.device, dtype: torch.dtype, captured: bool = False
    ) -> bool:
        """Whether a pass over shape.n tokens, with or without a backward, clearly gains from sparsity, as predicted.

        captured: it runs in a CUDA graph, so that the host's time to launch it does not count.
        """
        if self.room is None:
            return False
        key = (shape, backward, dtype, captured)
        if key not in self.routes:
            sparse, dense = (cost.total(backward) for cost in self.costs(shape, backward, device, dtype))
            if not captured:
                rates = dispatch.measured_rates(device, dtype)
                n_hot = self.order(backward).n_hot
                sparse = max(sparse, dispatch.host_costs(rates, n_hot).total(backward))
                dense = max(dense, dispatch.host_costs(rates, None).total(backward))
            self.routes[key] = (1 + dispatch.HYSTERESIS) * sparse < dense
        return self.routes[key]

    def room_for(self, n: int, h: int, backward: bool) -> Room:
        """Capacities of a pass over n tokens."""
        room = self.rooms.get((n, backward))
        if room is None:
            tiles = cold_tiles(h, self.order(backward))
            room = room_for(self.room, n, h, tiles, backward, self.infer.n_hot == self.train.n_hot)
            self.rooms[n, backward] = room
        return room


class FFNState:
    """The memory of one layer with h neurons whose weights live on `device`.

    packing: how the gate product leaves its result, "bitmap" (`TileBitmap`; faster wherever both were measured) or
    "twell" (`TwELL`; 16-bit dtypes, and its tiles can run over, which is one more overflow).
    """

    _live: "weakref.WeakValueDictionary[int, FFNState]" = weakref.WeakValueDictionary()
    _keys = itertools.count(1)

    def __init__(self, h: int, device: torch.device | str, packing: str = "bitmap"):
        if packing not in ("bitmap", "twell"):
            raise ValueError(f"packing={packing!r}: must be bitmap or twell")
        device = torch.device(device)
        self.h = h
        self.seen = Seen(
            torch.zeros(8, dtype=torch.int64, device=device), torch.zeros(h, dtype=torch.int32, device=device)
        )
        self.captured = False  # set it before passes that a CUDA graph is to capture, and before their warm-up
        self.forced = False  # set it if all passes run the sparse stages, whatever is predicted
        self.shape: Shape | None = None  # of the latest training pass, or of the first without
        self.dtype: torch.dtype | None = None
        self.fired = torch.zeros(h, dtype=torch.float64)  # firing counts, older updates weighing less
        self.tokens = 0.0
        self.room = RoomMemory()
        self.sample: Tensor | None = (
            None  # int32 [SAMPLE, words], which neurons fired on some tokens since the last update
        )
        order = natural(h, device)
        self.decision = Decision(0, order, order, slots=SLOTS if packing == "twell" else 0)
        self.decisions = {0: self.decision}  # the latest few: a backward pass uses that of its forward
        # Custom operators take tensors and numbers only, and a number would be baked into a compiled graph.
        key = next(self._keys)
        self.handle = torch.tensor([key])
        self._live[key] = self

    @classmethod
    def of(cls, handle: Tensor) -> "FFNState":
        return cls._live[int(handle)]

    def runs_sparse(self, backward: bool = True) -> bool:
        """Whether a pass of the latest shape would run the sparse stages, by force or by choice."""
        if self.forced:
            return True
        return self.shape is not None and self.decision.runs_sparse(
            self.shape, backward, self.seen.numbers.device, self.dtype, self.captured
        )

    def decide(self, decision: Decision) -> None:
        self.decision = decision
        self.decisions[decision.version] = decision
        for version in sorted(self.decisions)[:-4]:
            del self.decisions[version]

    @property
    def wants_sample(self) -> bool:
        """Whether co-activation is still to be learnt; TwELL has no words to learn it from."""
        return not self.decision.grouped and self.sample is None and self.decision.slots == 0

    def new_sample(self, n: int) -> Tensor | None:
        """Where a pass over n tokens is to leave its occupancy words, if they are wanted and not there yet."""
        if not self.wants_sample:
            return None
        self.sample = torch.empty(min(n, SAMPLE), -(-self.h // 32), dtype=torch.int32, device=self.seen.numbers.device)
        return self.sample

    def learn(self, numbers: Sequence[int], fired: Tensor) -> None:
        """Decide anew from the host copy of `seen`; `fired` int32 [h]."""
        calls, tokens, *needs, overflow, in_a_tile = numbers
        slots = max(self.decision.slots, _more_slots(in_a_tile)) if self.decision.slots else 0
        if calls == 0 or tokens == 0 or self.shape is None:
            if overflow:  # of passes without statistics: there is nothing to learn but that they need more room
                old, room = self.decision, self.room.learn(needs)
                self.decide(replace(old, version=old.version + 1, room=room, slots=slots, routes={}, rooms={}))
            return
        self.fired = MEMORY * self.fired + fired
        self.tokens = MEMORY * self.tokens + tokens
        rate = self.fired / self.tokens
        rates = dispatch.measured_rates(self.seen.numbers.device, self.dtype)

        old, sample, device = self.decision, self.sample, self.seen.numbers.device
        self.sample = None
        permutation = by_frequency(rate)
        n_hot, costs = dispatch.best_n_hot(self.shape, rates, rate[permutation], backward=True)
        if old.rate is not None and (old.grouped or sample is None):
            kept = replace(old, rate=rate[old.train.order.cpu().long()], routes={}, rooms={})
            kept_costs, _ = kept.costs(self.shape, True, device, self.dtype)
            if kept_costs.total(True) < (1 + dispatch.HYSTERESIS) * costs.total(True):
                room = self.room.learn(needs)
                self.decide(replace(kept, version=old.version + 1, room=room, slots=slots))
                return
        gathers_only, hot_too = (
            dispatch.sparse_costs(self.shape, rates, rate[permutation], torch.tensor([k]))[0].item() for k in (0, n_hot)
        )
        if sample is not None:
            cold = permutation[n_hot:].to(device)
            grouped = by_coactivation(unpack_words(sample, self.h)[:, cold], 0)
            permutation = torch.cat([permutation[:n_hot].to(device), cold[grouped]])
        rate = rate[permutation.cpu()]
        permutation = permutation.to(device)
        train = make_order(permutation, n_hot)
        infer = train if hot_too < gathers_only else make_order(permutation, 0)
        room = self.room.restart(_bounds(needs, rate[n_hot:]))
        version = old.version + 1
        self.decide(Decision(version, train, infer, slots, version, rate, room, sample is not None))

    def state_dict(self) -> dict[str, object]:
        decision = self.decision
        return {
            "fired": self.fired, "tokens": self.tokens, "order": decision.train.order.cpu(), "rate": decision.rate,
            "n_hot": (decision.train.n_hot, decision.infer.n_hot), "grouped": decision.grouped, "room": decision.room,
            "most": self.room.most, "headroom": self.room.headroom, "slots": decision.slots, "dtype": self.dtype,
            "shape": None if self.shape is None else tuple(self.shape),
        }  # fmt: skip

    def load_state_dict(self, saved: dict[str, object]) -> None:
        permutation = saved["order"].to(self.seen.numbers.device)
        if len(permutation) != self.h:
            raise ValueError(f"the saved state is of a layer with {len(permutation)} neurons, not {self.h}")
        self.fired, self.tokens, self.dtype = saved["fired"], saved["tokens"], saved["dtype"]
        self.shape = None if saved["shape"] is None else Shape(*saved["shape"])
        train, infer = (make_order(permutation, n_hot - n_hot % WHOLE) for n_hot in saved["n_hot"])
        self.room.room, self.room.most = saved["room"], saved["most"]
        self.room.headroom = saved.get("headroom", HEADROOM)  # not in early checkpoints
        version = self.decision.version + 1
        learnt = (saved["slots"], version, saved["rate"], saved["room"], saved["grouped"])
        self.decide(Decision(version, train, infer, *learnt))


def _more_slots(in_a_tile: int) -> int:
    """Slots, a multiple of 8, for TwELL tiles that ran over with so many entries (0: none did)."""
    return -(-(int(HEADROOM * in_a_tile) + 1) // 8) * 8 if in_a_tile else 0


def _bounds(needs: Sequence[int], cold_rate: Tensor) -> Needs:
    """Needs in an order that has not run yet: upper bounds take the place of what only that order could measure."""
    entries, _, _, all_segments = needs
    # A long row has at most 2 / SPLIT segments per cold entry; a tile is touched at most as often as its neurons fire.
    segments = min(all_segments, int(2 / SPLIT * float(cold_rate.sum()) * PER))
    tile_rate = pad(cold_rate, (0, -len(cold_rate) % TILE)).view(-1, TILE).sum(1).clamp(max=1)
    return Needs(entries, segments, int(float(tile_rate.sum()) * PER), all_segments)


def overflowed(states: Sequence[FFNState]) -> Tensor:
    """Whether any layer ran out of room since the last update: bool scalar on the device."""
    return torch.stack([state.seen.numbers[6] for state in states]).any()


def signature(states: Sequence[FFNState]) -> tuple:
    """What a captured CUDA graph of training passes has baked in: when this changes, capture anew.

    Of a layer that runs dense, only that: what it learns meanwhile is for later.
    """
    return tuple(
        (state.decision.ordered, state.decision.room, state.decision.slots, state.wants_sample, state.shape)
        if state.runs_sparse()
        else None
        for state in states
    )


def update(states: Sequence[FFNState]) -> None:
    """Let every layer decide anew from what it saw since the last update. Waits for the device, once."""
    numbers = torch.stack([state.seen.numbers for state in states])
    fired = torch.cat([state.seen.fired for state in states])
    host = torch.cat([numbers.view(-1), fired.long()]).to("cpu")
    rows = host[: numbers.numel()].view(len(states), -1).tolist()
    counts = host[numbers.numel() :].split([state.h for state in states])
    overflow = any(row[6] for row in rows)
    for state, row, fired in zip(states, rows, counts):
        state.seen.numbers.zero_()
        state.seen.fired.zero_()
        state.room.adapt(overflow)
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
            route = "sparse" if decision.runs_sparse(*arguments, state.captured) else "dense"
            cold = f" {float(decision.rate[n_hot:].sum()):5.1f}" if backward else ""
            line += f" {n_hot:5d}{cold} {route:>6} {sparse:8.3f}/{dense:<8.3f}"
        lines.append(f"{line} {decision.room}")
    return "\n".join(lines)
