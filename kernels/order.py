"""Neuron orders: which neurons are hot, and which share a tile. An index only: weights never move.

    natural         as the weights lie
    by frequency    descending firing rate: the hot neurons first, rare ones with rare ones, dead ones last
    co-activation   inside the cold part, neurons that fire on the same tokens side by side

Any order gives the same result; a good one lets a tile of 64 neurons be touched by fewer tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """A permutation of the neurons, whose first `n_hot` are the hot ones."""

    order: Tensor  # int32 [h], neuron of each rank
    rank_of: Tensor  # int32 [h], its inverse
    hot_words: Tensor  # int32 [ceil(h / 32)], one bit per hot column
    n_hot: int

    @property
    def cold(self) -> Tensor:
        """int32 [h - n_hot], the other neurons by rank."""
        return self.order[self.n_hot :]


def make_order(order: Tensor, n_hot: int) -> Order:
    """`order` int [h], any permutation of the neurons; n_hot a multiple of 64 or h."""
    h = order.shape[0]
    device = order.device
    rank_of = torch.empty(h, dtype=torch.int32, device=device)
    rank_of[order.long()] = torch.arange(h, dtype=torch.int32, device=device)
    is_hot = torch.zeros(-(-h // 32) * 32, dtype=torch.int64, device=device)
    is_hot[order[:n_hot].long()] = 1
    words = (is_hot.view(-1, 32) << torch.arange(32, device=device)).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()  # the 32 bits as a signed number
    return Order(order.int(), rank_of, words, n_hot)


def natural(h: int, device: torch.device) -> Order:
    return make_order(torch.arange(h, dtype=torch.int32, device=device), 0)


def by_frequency(fired: Tensor) -> Tensor:
    """Neurons by descending firing count, int64 [h]; ties keep their natural order."""
    return fired.argsort(descending=True, stable=True)
