"""A small activation and its packed forms, which the tests of the single stages start from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import compact
from kernels.compact import PackedRows, RowsShape
from kernels.order import TILE, Order, make_order


def random_activation(n: int, h: int, density: float, device: torch.device, seed: int = 0) -> Tensor:
    """[n, h], non-negative, zero outside a random pattern of the given density."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(n, h, generator=generator) + 0.5
    return (values * (torch.rand(n, h, generator=generator) < density)).to(device)


def bitmap(dense: Tensor) -> tuple[Tensor, Tensor]:
    """(words, scratch) as the gate stage writes them: what is not an entry is NaN in scratch."""
    n, h = dense.shape
    bits = torch.zeros(n, -(-h // 32) * 32, dtype=torch.int64, device=dense.device)
    bits[:, :h] = dense != 0
    words = (bits.view(n, -1, 32) << torch.arange(32, device=dense.device)).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return words, dense.masked_fill(dense == 0, float("nan"))


@dataclass
class Packed:
    dense: Tensor
    order: Order
    rows: PackedRows


def pack(dense: Tensor, n_hot: int = 0, room: int | None = None, segments: int | None = None, counted=None) -> Packed:
    """Compact `dense` with a random neuron order; room for everything unless told otherwise."""
    n, h = dense.shape
    permutation = torch.randperm(h, generator=torch.Generator().manual_seed(1)).to(dense.device)
    order = make_order(permutation, n_hot)
    shape = RowsShape(
        n, h, -(-(h - n_hot) // TILE), n * h if room is None else room, n * h if segments is None else segments, True
    )
    words, scratch = bitmap(dense)
    _, rows = compact.compact(words, scratch, order.hot_words, order.rank_of, n_hot, shape, counted)
    return Packed(dense, order, rows)


def unpack(packed: Packed) -> Tensor:
    """The dense activation that the packed rows describe."""
    rows, out = packed.rows, torch.zeros_like(packed.dense)
    for t, (start, count) in enumerate(zip(rows.start.tolist(), rows.count.tolist())):
        column = rows.column[start : start + count].long()
        assert column.unique().numel() == count
        out[t, column] = rows.value[start : start + count]
    return out
