"""Neuron orders: which neurons are hot, and which share a tile. An index only: weights never move.

    natural         as the weights lie
    by frequency    descending firing rate: the hot neurons first, rare ones with rare ones, dead ones last
    co-activation   inside the cold part, neurons that fire on the same tokens side by side

Any order gives the same result; a good one lets a tile of neurons be touched by fewer tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16  # neurons per tile of the weight gradients


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
    """`order` int [h], any permutation of the neurons; n_hot a multiple of TILE or h."""
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


def by_coactivation(pattern: Tensor, n_hot: int, step: int = 8) -> Tensor:
    """By frequency, but with the cold neurons grouped in tiles of neurons that fire on the same tokens: int64 [h].

    pattern bool [m, h]: which neurons fired on a sample of tokens. Greedy: a tile starts from the most frequent neuron
    left and takes, `step` at a time, those of whose tokens the smallest share is new to the tile. Rare neurons thus go
    where their few tokens are touched already. Neurons that never fired in the sample come last.
    """
    count = pattern.sum(0)
    order = by_frequency(count)
    cold = order[n_hot:]
    cold, silent = cold[count[cold] > 0], cold[count[cold] == 0]
    fires = pattern[:, cold].float()  # [m, k]
    size = fires.sum(0)
    taken = torch.zeros(len(cold), dtype=torch.bool, device=pattern.device)
    tiles = [order[:n_hot]]
    for first in range(0, len(cold), TILE):
        room = min(TILE, len(cold) - first)
        chosen = size.masked_fill(taken, -1).argmax().view(1)
        while len(chosen) < room:
            taken[chosen] = True
            touched = fires[:, chosen].amax(1)  # [m]
            new = (1 - touched) @ fires / size
            more = new.masked_fill(taken, torch.inf).topk(min(step, room - len(chosen)), largest=False).indices
            chosen = torch.cat([chosen, more])
        taken[chosen] = True
        tiles.append(cold[chosen])
    return torch.cat([*tiles, silent])


def unpack_words(words: Tensor, h: int) -> Tensor:
    """bool [m, h] from the gate stage's occupancy words int32 [m, ceil(h / 32)]."""
    return (words.unsqueeze(-1) >> torch.arange(32, device=words.device) & 1).flatten(1)[:, :h].bool()
