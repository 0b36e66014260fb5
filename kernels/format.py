"""The packed formats of a sparse [n, h] activation matrix: what they mean, and packing and unpacking in plain torch.

Rows are tokens, columns are neurons. The *pattern* is the set of entries that are present; a present entry may hold any
value, zero and NaN included. The Triton stages produce and consume these layouts; the code here is their specification
and serves tests, tools and inspection, not the training step.

    TileBitmap    what the gate product can write from its epilogue at no cost: one occupancy word per 32 columns
    TwELL         tile-wise ELLPACK, the layout of arXiv 2603.23198: a tile's non-zeros packed beside their count
    PackedRows    per token a list of (neuron, value): what the row products read
    NeuronTiles   per tile of TILE neurons the tokens that touch them and dense blocks: what the weight gradients read

Every format converts to every other through `Entries`, the plain coordinate list:

    rows = convert(bitmap, PackedRows)            tiles = convert(rows, NeuronTiles, order=by_frequency)

All drawings below show one matrix, n = 2 tokens, h = 6 neurons, with tiles narrower than the real ones:

            neuron  0  1  2  3  4  5
    token 0      [  .  a  .  .  b  c ]
    token 1      [  d  .  .  .  e  . ]
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from kernels.order import TILE

OFFSETS = (torch.int32, torch.int64)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Entries:
    """The non-zeros as coordinates, ordered by token and then by neuron.

    token   0  0  0  1  1
    neuron  1  4  5  0  4
    value   a  b  c  d  e
    """

    token: Tensor  # int64 [m]
    neuron: Tensor  # int64 [m]
    value: Tensor  # [m]
    n: int
    h: int

    @classmethod
    def of(cls, dense: Tensor, pattern: Tensor | None = None) -> Self:
        """The entries of dense [n, h] that `pattern` (bool [n, h]; None: the non-zeros, NaN included) names."""
        token, neuron = (dense != 0 if pattern is None else pattern).nonzero(as_tuple=True)
        return cls(token, neuron, dense[token, neuron], *dense.shape)

    def dense(self) -> Tensor:
        """[n, h], zero wherever there is no entry."""
        out = self.value.new_zeros(self.n, self.h)
        out[self.token, self.neuron] = self.value
        return out

    def row_counts(self) -> Tensor:
        """Entries per token, int32 [n]."""
        return torch.bincount(self.token, minlength=self.n).int()


def _sorted(token: Tensor, neuron: Tensor, value: Tensor, n: int, h: int) -> Entries:
    by = (token * h + neuron).argsort()
    return Entries(token[by], neuron[by], value[by], n, h)


def _place_in_group(group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """For non-decreasing group numbers [m]: each element's place inside its group [m], and the group sizes [groups]."""
    size = torch.bincount(group, minlength=groups)
    first = size.cumsum(0) - size
    return torch.arange(len(group), device=group.device) - first[group], size


@dataclass(frozen=True)
class TileBitmap:
    """One 32-bit occupancy word per (token, 32 neurons), and a value matrix of which only the named entries exist.

    Bit b of word w says whether neuron 32 w + b is present. Drawn with words of 3 bits, lowest bit on the left:

        words   token 0   .x. .xx      values   ?  a  ?  ?  b  c
                token 1   x.. .x.               d  ?  ?  ?  e  ?      ? = never written, never read
    """

    WORD: ClassVar[int] = 32

    words: Tensor  # int32 [n, ceil(h / 32)]
    values: Tensor  # [n, h]
    h: int

    def __post_init__(self) -> None:
        width = -(-self.h // self.WORD)
        _require(self.words.dtype == torch.int32, f"words must be int32, not {self.words.dtype}")
        _require(self.words.shape[1] == width, f"h={self.h} needs {width} words a token, not {self.words.shape[1]}")
        _require(
            self.values.shape == (len(self.words), self.h),
            f"values must be [{len(self.words)}, {self.h}], not {list(self.values.shape)}",
        )

    @classmethod
    def pack(cls, entries: Entries) -> Self:
        n, h = entries.n, entries.h
        width = -(-h // cls.WORD)
        words = torch.zeros(n * width, dtype=torch.int64, device=entries.token.device)
        bit = 1 << entries.neuron % cls.WORD
        words.scatter_add_(0, entries.token * width + entries.neuron // cls.WORD, bit)  # distinct bits: a sum is an or
        values = entries.value.new_empty(n, h)
        values[entries.token, entries.neuron] = entries.value
        return cls(words.int().view(n, width), values, h)

    def pattern(self) -> Tensor:
        """bool [n, ceil(h / 32) * 32]: columns past h are the unused bits of the last word."""
        bit = torch.arange(self.WORD, dtype=torch.int32, device=self.words.device)
        return (self.words[:, :, None] >> bit & 1).bool().flatten(1)

    def entries(self) -> Entries:
        token, neuron = self.pattern()[:, : self.h].nonzero(as_tuple=True)
        return Entries(token, neuron, self.values[token, neuron], len(self.words), self.h)

    def check(self) -> None:
        """Raise ValueError if the contents break the definition (waits for the device)."""
        _require(not self.pattern()[:, self.h :].any(), f"a word names a neuron beyond h={self.h}")


@dataclass(frozen=True)
class TwELL:
    """Tile-wise ELLPACK: each (token, tile of T neurons) owns a few 32-bit slots.

    Slot 0 holds the number of non-zeros in the tile; the following ones hold them by rising neuron, the neuron in the
    upper and the bits of the value in the lower 16 bits. Drawn with T = 3 and 3 slots:

                    tile 0 (0-2)   tile 1 (3-5)
        token 0   [ 1  1:a   ?  |  2  4:b  5:c ]
        token 1   [ 1  0:d   ?  |  1  4:e   ?  ]

    The count is the true one even where it exceeds the room (slots - 1); entries beyond the room are not stored. So
    running over is seen by reading the counts alone, and `entries` refuses such a matrix instead of losing non-zeros.
    16 bits for the neuron limit h to 65536; TileBitmap and PackedRows have no such limit.
    """

    MAX_H: ClassVar[int] = 1 << 16

    slots: Tensor  # int32 [n, ceil(h / T), slots]
    h: int
    tile: int  # T
    dtype: torch.dtype  # of the values: bf16 or fp16

    def __post_init__(self) -> None:
        _require(
            self.h <= self.MAX_H,
            f"TwELL keeps a neuron's number in 16 bits: h={self.h} exceeds {self.MAX_H}; use TileBitmap or PackedRows",
        )
        _require(self.dtype.itemsize == 2, f"TwELL keeps a value in 16 bits: bf16 or fp16, not {self.dtype}")
        _require(self.slots.dtype == torch.int32, f"slots must be int32, not {self.slots.dtype}")
        tiles = -(-self.h // self.tile)
        _require(self.slots.shape[1] == tiles, f"h={self.h} has {tiles} tiles, not {self.slots.shape[1]}")
        _require(self.slots.shape[2] >= 2, "a tile needs at least 2 slots: the count and one non-zero")

    @classmethod
    def pack(cls, entries: Entries, tile: int = 256, slots: int = 32) -> Self:
        """tile: neurons per tile (T); slots: 32-bit slots per tile, the count's included (the paper's T / C)."""
        tiles = -(-entries.h // tile)
        group = entries.token * tiles + entries.neuron // tile
        place, count = _place_in_group(group, entries.n * tiles)
        packed = torch.empty(entries.n * tiles, slots, dtype=torch.int32, device=entries.token.device)
        packed[:, 0] = count
        self = cls(packed.view(entries.n, tiles, slots), entries.h, tile, entries.value.dtype)
        kept = place < slots - 1
        bits = entries.value.view(torch.int16).long() & 0xFFFF
        packed[group[kept], 1 + place[kept]] = (entries.neuron << 16 | bits)[kept].int()
        return self

    def overflow(self) -> Tensor:
        """bool []: some tile holds more non-zeros than it has room for."""
        return (self.slots[:, :, 0] >= self.slots.shape[2]).any()

    def entries(self) -> Entries:
        if self.overflow():
            raise ValueError(
                f"a tile holds {self.slots[:, :, 0].max()} non-zeros but has {self.slots.shape[2]} slots, one of them "
                "for the count: pack with more slots"
            )
        place = torch.arange(self.slots.shape[2] - 1, device=self.slots.device)
        token, tile, place = (place < self.slots[:, :, :1]).nonzero(as_tuple=True)
        packed = self.slots[token, tile, 1 + place]
        neuron = (packed >> 16 & 0xFFFF).long()
        value = packed.to(torch.int16).view(self.dtype)  # int32 -> int16 keeps the lower bits
        return Entries(token, neuron, value, len(self.slots), self.h)

    def check(self) -> None:
        """Raise ValueError if the contents break the definition (waits for the device)."""
        _require((self.slots[:, :, 0] >= 0).all(), "a tile's count is negative")
        _require((self.slots[:, :, 0] <= self.tile).all(), f"a tile's count exceeds its {self.tile} neurons")
        e = self.entries()
        place = torch.arange(self.slots.shape[2] - 1, device=self.slots.device)
        tile = (place < self.slots[:, :, :1]).nonzero(as_tuple=True)[1]
        _require((e.neuron < self.h).all(), f"a slot names a neuron beyond h={self.h}")
        _require((e.neuron // self.tile == tile).all(), "a slot names a neuron of another tile")
        _require(((e.token * self.h + e.neuron).diff() > 0).all(), "a token's neurons must rise")


@dataclass(frozen=True)
class PackedRows:
    """Per token a list of (neuron, value), anywhere in one buffer: a token with 2000 non-zeros widens nobody's row.

        start  0  4     count  3  2     neurons  1  4  5  ?  0  4  ?  ?
                                        values   a  b  c  ?  d  e  ?  ?

    Row t is the slice start[t] : start[t] + count[t]; a neuron appears in it at most once, in any place (`pack` writes
    rising neurons). Rows may lie in any order and leave gaps, but do not overlap; so rows of one fixed width are packed
    rows too. A row that ends beyond the buffer was not (wholly) stored: that is how running over is seen.
    """

    start: Tensor  # int64, or int32 where the capacity allows it, [n]
    count: Tensor  # int32 [n]
    neurons: Tensor  # int32 [capacity]
    values: Tensor  # [capacity]
    h: int

    def __post_init__(self) -> None:
        _require(self.start.dtype in OFFSETS, f"start must be int32 or int64, not {self.start.dtype}")
        for name, tensor in (("count", self.count), ("neurons", self.neurons)):
            _require(tensor.dtype == torch.int32, f"{name} must be int32, not {tensor.dtype}")
        _require(self.start.shape == self.count.shape, "start and count must have one element per token")
        _require(self.neurons.shape == self.values.shape, "neurons and values must have the same capacity")

    @classmethod
    def pack(cls, entries: Entries, capacity: int | None = None) -> Self:
        """Rows back to back in a buffer of `capacity` (None: as many as there are entries)."""
        capacity = len(entries.token) if capacity is None else capacity
        count = entries.row_counts()
        neurons = torch.empty(capacity, dtype=torch.int32, device=entries.token.device)
        values = entries.value.new_empty(capacity)
        stored = min(capacity, len(entries.token))
        neurons[:stored] = entries.neuron[:stored].int()
        values[:stored] = entries.value[:stored]
        return cls(count.cumsum(0) - count, count, neurons, values, entries.h)

    def overflow(self) -> Tensor:
        """bool []: some row ends beyond the buffer."""
        return (self.start + self.count > len(self.neurons)).any()

    def entries(self) -> Entries:
        needed = int((self.start + self.count).max()) if len(self.start) else 0
        _require(
            needed <= len(self.neurons),
            f"the rows need a buffer of {needed}, this one holds {len(self.neurons)}: pack with more capacity",
        )
        token = torch.repeat_interleave(self.count.long())
        place, _ = _place_in_group(token, len(self.start))
        at = self.start[token] + place
        return _sorted(token, self.neurons[at].long(), self.values[at], len(self.start), self.h)

    def check(self) -> None:
        """Raise ValueError if the contents break the definition (waits for the device)."""
        _require((self.count >= 0).all(), "a row's count is negative")
        rows = self.count > 0
        start, by_start = self.start[rows].sort()
        end = start + self.count[rows][by_start]
        _require((start >= 0).all(), "a row starts before the buffer")
        _require((end[:-1] <= start[1:]).all(), "two rows overlap")
        e = self.entries()
        _require(((e.neuron >= 0) & (e.neuron < self.h)).all(), f"a row names a neuron outside 0 .. {self.h - 1}")
        _require(((e.token * self.h + e.neuron).diff() > 0).all(), "a row names a neuron twice")


@dataclass(frozen=True)
class NeuronTiles:
    """Per tile of TILE neurons the tokens that touch it, and for each of them a dense block of TILE values.

    The tile is what one matrix product of the weight gradients owns. `order` decides which neurons share a tile (by
    default as numbered; by firing frequency or co-activation the lists get shorter). Drawn with tiles of 3 and
    order = 4 1 5 | 0 2 3:

        offsets  0  2  3        k        0      1      2
                                tokens   0      1      1
                                values  b a c  e . .  d . .       . = 0, stored

    Tile i owns neurons order[TILE i : TILE i + TILE] and tokens offsets[i] : offsets[i + 1], by rising token. A last,
    partial tile keeps zeros in its unused columns. A stored zero is not told from an absent entry: `entries` gives
    non-zeros. Running over: offsets[-1] exceeds the buffer.
    """

    TILE: ClassVar[int] = TILE

    order: Tensor  # int32 [h], a permutation: position -> neuron
    offsets: Tensor  # int64, or int32 where the capacity allows it, [tiles + 1]
    tokens: Tensor  # int32 [capacity]
    values: Tensor  # [capacity, TILE]
    n: int

    def __post_init__(self) -> None:
        _require(self.offsets.dtype in OFFSETS, f"offsets must be int32 or int64, not {self.offsets.dtype}")
        for name, tensor in (("order", self.order), ("tokens", self.tokens)):
            _require(tensor.dtype == torch.int32, f"{name} must be int32, not {tensor.dtype}")
        tiles = -(-len(self.order) // self.TILE)
        _require(len(self.offsets) == tiles + 1, f"{tiles} tiles need {tiles + 1} offsets, not {len(self.offsets)}")
        _require(
            self.values.shape == (len(self.tokens), self.TILE),
            f"values must be [{len(self.tokens)}, {self.TILE}], not {list(self.values.shape)}",
        )

    @classmethod
    def pack(cls, entries: Entries, order: Tensor | None = None, capacity: int | None = None) -> Self:
        """order: int32 [h] (None: as numbered); capacity: of `tokens` (None: as many as needed)."""
        n, h, device = entries.n, entries.h, entries.token.device
        order = torch.arange(h, dtype=torch.int32, device=device) if order is None else order
        position = order.long().argsort()[entries.neuron]
        touch = position // cls.TILE * n + entries.token  # (tile, token) as one number
        touched = touch.unique()  # sorted
        tiles = -(-h // cls.TILE)
        offsets = torch.searchsorted(touched, torch.arange(tiles + 1, device=device) * n)
        capacity = len(touched) if capacity is None else capacity
        stored = min(capacity, len(touched))
        tokens = torch.empty(capacity, dtype=torch.int32, device=device)
        tokens[:stored] = (touched[:stored] % max(n, 1)).int()
        values = entries.value.new_zeros(capacity, cls.TILE)
        k = torch.searchsorted(touched, touch)
        kept = k < capacity
        values[k[kept], position[kept] % cls.TILE] = entries.value[kept]
        return cls(order, offsets, tokens, values, n)

    def overflow(self) -> Tensor:
        """bool []: the lists need more than the buffer holds."""
        return self.offsets[-1] > len(self.tokens)

    def entries(self) -> Entries:
        total, h = int(self.offsets[-1]), len(self.order)
        _require(
            total <= len(self.tokens),
            f"the token lists need a buffer of {total}, this one holds {len(self.tokens)}: pack with more capacity",
        )
        k, lane = (self.values[:total] != 0).nonzero(as_tuple=True)
        tile = torch.searchsorted(self.offsets, k, right=True) - 1
        neuron = self.order[tile * self.TILE + lane].long()
        return _sorted(self.tokens[k].long(), neuron, self.values[k, lane], self.n, h)

    def check(self) -> None:
        """Raise ValueError if the contents break the definition (waits for the device)."""
        h, total = len(self.order), int(self.offsets[-1])
        identity = torch.arange(h, dtype=torch.int32, device=self.order.device)
        _require(torch.equal(self.order.sort().values, identity), f"order is not a permutation of 0 .. {h - 1}")
        _require(int(self.offsets[0]) == 0 and (self.offsets.diff() >= 0).all(), "offsets must rise from 0")
        last = self.values[int(self.offsets[-2]) : total, h - (len(self.offsets) - 2) * self.TILE :]
        _require(not last.any(), f"the last tile holds values beyond h={h}")
        self.entries()
        tile = torch.repeat_interleave(self.offsets.diff())
        token = self.tokens[:total].long()
        _require(((token >= 0) & (token < self.n)).all(), f"a list names a token outside 0 .. {self.n - 1}")
        _require(((tile * self.n + token).diff() > 0).all(), "a tile's tokens must rise")


Packed = TileBitmap | TwELL | PackedRows | NeuronTiles


def convert(packed: Packed, kind: type[Packed], **layout) -> Packed:
    """`packed` in another format; `layout` are the arguments of that format's `pack` (tile, slots, capacity, order)."""
    return kind.pack(packed.entries(), **layout)
