"""The sparse FFN, forward and backward, as a sequence of stages on plain tensors.

    forward     gate -> compact -> [hot products] -> rows -> summary
    backward    plan -> [hot products] -> rows -> weight_grad

See each stage's file for what it does; here is only what follows what, and which buffers live how long. All tensors
are contiguous; x, dy, y and dx are [n, d], the weights [h, d], counted is an int8 [n] mask or None.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import compact, gate, hot, plan, rows, twell, weight_grad
from kernels.compact import PackedRows, RowsShape
from kernels.order import TILE, Order
from kernels.products import over_tokens
from kernels.room import Room
from kernels.summary import Seen, summarize


class SparseForward(NamedTuple):
    y: Tensor  # [n, d]
    l1: Tensor  # fp32 scalar
    fired: Tensor  # int32 [h]
    rows: PackedRows
    memory: Tensor  # uint8, what all of `rows` but its count lives in
    shape: RowsShape


def cold_tiles(h: int, order: Order) -> int:
    return -(-(h - order.n_hot) // TILE)


def forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    counted: Tensor | None,
    order: Order,
    room: Room | None,
    seen: Seen | None,
    save: bool,
    sample: Tensor | None = None,
    slots: int = 0,
    stats: bool = True,
    residual: Tensor | None = None,
) -> SparseForward:
    """`room` None: the buffers are sized by reading the number of non-zeros back, which waits for the device.

    `sample`, int32 [up to n, ceil(h / 32)], receives the occupancy words of the first tokens. `slots`: of a TwELL tile,
    if the gate product is to pack that format; needs `room` and `seen`. Without `stats`, l1 and fired are undefined.
    `residual`, [n, d], is added to y.
    """
    n, h = x.shape[0], w_up.shape[0]
    gated = w_gate is not None
    w_first = w_gate if gated else w_up
    if slots:
        shape = _rows_shape(n, h, order, room, gated, save)
        tiles = gate.gate_twell(x, w_first, slots)
        memory, packed = twell.compact_twell(
            tiles, order.hot_words, order.rank_of, order.n_hot, shape, counted, seen, save,
            stats,
        )  # fmt: skip
        del tiles
    else:
        memory, packed, shape, room = _from_words(x, w_first, counted, order, room, gated, save, sample, stats)

    n_hot = order.n_hot
    l1_parts = torch.empty(2 * n if n_hot else n, dtype=torch.float32, device=x.device)
    if n_hot:
        weights = hot.gather_rows([w_up, w_down] if gated else [w_down], order.order, n_hot)
        u_hot = x @ weights[:n_hot].T if gated else None
        a_hot = hot.forward(u_hot, packed, order.rank_of, n_hot, counted, l1_parts)
        y = a_hot @ weights[-n_hot:]
        del u_hot, a_hot, weights
    else:
        y = torch.empty_like(x)
    cold_l1 = l1_parts[-n:] if n else l1_parts
    rows.forward(x, w_up if gated else None, w_down, packed, y, n_hot > 0, counted, cold_l1, residual)
    l1, fired = summarize(
        l1_parts, packed.count, packed.fired, counted, seen, packed.needed, room.entries, room.segments, stats
    )
    return SparseForward(y, l1, fired, packed, memory, shape)


def _rows_shape(n: int, h: int, order: Order, room: Room, gated: bool, save: bool) -> RowsShape:
    """Without `save` nobody asks for the occupied tiles, nor for x . w_up."""
    return RowsShape(n, h, cold_tiles(h, order) if save else 0, room.entries, room.segments, gated and save)


def _from_words(
    x: Tensor, w: Tensor, counted: Tensor | None, order: Order, room: Room | None, gated: bool, save: bool,
    sample: Tensor | None, stats: bool,
) -> tuple[Tensor, PackedRows, RowsShape, Room]:  # fmt: skip
    """(memory, rows, their shape, their room) of relu(x w^T), by way of occupancy words."""
    n, h = x.shape[0], w.shape[0]
    words, scratch = gate.gate(x, w)
    if sample is not None:
        sample.copy_(words[: len(sample)])
    measured = room is None
    if measured:
        room = Room(entries=64 * n, segments=n, blocks=0)
    while True:
        shape = _rows_shape(n, h, order, room, gated, save)
        memory, packed = compact.compact(
            words, scratch, order.hot_words, order.rank_of, order.n_hot, shape, counted, save, stats
        )
        if not measured:
            return memory, packed, shape, room
        entries, segments = packed.needed.tolist()
        if entries <= room.entries and segments <= room.segments:
            return memory, packed, shape, room
        room = Room(max(entries, room.entries), max(segments, room.segments), 0)


def backward(
    dy: Tensor,
    dl1: Tensor,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    counted: Tensor | None,
    order: Order,
    blocks: int,
    seen: Seen | None,
    packed: PackedRows,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(dx, dw_gate, dw_up, dw_down); there is room for `blocks` (tile, token) pairs."""
    gated = w_gate is not None
    n_hot = order.n_hot
    dw_gate = torch.empty_like(w_gate) if gated else None
    dw_up, dw_down = torch.empty_like(w_up), torch.empty_like(w_down)
    if n_hot:
        matrices = [w_gate, w_up, w_down] if gated else [w_up, w_down]
        weights = hot.gather_rows(matrices, order.order, n_hot)
        da_hot = dy @ weights[-n_hot:].T
        inner, hidden = hot.backward(da_hot, dl1, packed, gated, order.rank_of, n_hot, counted)
        del da_hot
        dx = inner @ weights[:-n_hot]
        dw = weights  # as large, and not needed any more
        over_tokens(inner, x, out=dw[:-n_hot])
        over_tokens(hidden, dy, out=dw[-n_hot:])
        hot.scatter_rows(dw, [dw_gate, dw_up, dw_down] if gated else [dw_up, dw_down], order.order, n_hot)
        del inner, hidden, weights, dw
    else:
        dx = torch.empty_like(x)
    tiles = plan.plan(packed.occupied, blocks, TILE * (2 if gated else 1), TILE, x.dtype, seen)
    rows.backward(x, dy, dl1, w_gate, w_up, w_down, packed, order.rank_of, n_hot, tiles, dx, n_hot > 0, counted)
    weight_grad.weight_grad(tiles, x, dy, order.cold, dw_gate, dw_up, dw_down)
    return dx, dw_gate, dw_up, dw_down
