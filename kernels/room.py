"""Room: how large the packed buffers of a pass are, from what earlier passes needed.

Tokens are not equal: in real layers some fire everything, a few in a million, and one such token needs more segments
than all others together. So room follows the maximum over many passes, slowly forgotten, plus what a few tokens that
fire everything would need on top. A pass that runs over all the same is repeated by its caller (`kernels.state`).

In the first hundreds of steps a model changes so fast that a layer may need twice as much a few steps later, and one
layer of many is enough to repeat the step. So an overflow of any layer earns all of them more headroom for a while.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kernels.compact import SPLIT

PER = 1024  # what was needed is noted per so many tokens, so that batches of different sizes compare
HEADROOM = 1.25  # room given over the most that was needed, in quiet times
MOST_HEADROOM = 4.0
GROWTH = 1.5  # of the headroom, by an overflow
DECAY = 0.98  # of the remembered maximum and of the headroom, per update
SPARE = 1.3  # of a size that had to grow: each new size is allocated anew, and a CUDA graph recorded anew
SPARE_TOKENS = 4  # tokens that fire everything and still fit


class Room(NamedTuple):
    """Capacities of one call."""

    entries: int  # non-zeros
    segments: int  # pieces of long rows
    blocks: int  # (tile, token) pairs


class Needs(NamedTuple):
    """What packing takes per PER tokens."""

    entries: int
    segments: int
    blocks: int
    all_segments: int  # segments if no neuron were hot


class RoomMemory:
    """The most that one layer's passes needed, slowly forgotten, and the room that this earns them."""

    def __init__(self):
        self.most = [0.0] * len(Needs._fields)
        self.headroom = HEADROOM
        self.room: Needs | None = None

    def adapt(self, overflowed: bool) -> None:
        """Once per update, before `learn` or `restart`. overflowed: whether any layer ran over since the last one."""
        self.headroom = (
            min(GROWTH * self.headroom, MOST_HEADROOM) if overflowed else max(DECAY * self.headroom, HEADROOM)
        )

    def learn(self, needs: Sequence[int]) -> Needs:
        """Room per PER tokens after passes that needed up to `needs`."""
        self.most = [max(need, DECAY * most) for need, most in zip(needs, self.most)]
        want = [int(self.headroom * most) + 1 for most in self.most]
        if self.room is not None:  # a size that still does stays, and a larger one is to do for a while: see SPARE
            want = [int(SPARE * w) if w > have else have if have <= 2 * w else w for have, w in zip(self.room, want)]
        self.room = Needs(*want)
        return self.room

    def restart(self, bounds: Needs) -> Needs:
        """Room for a neuron order that has not run yet, of whose needs only upper bounds are known."""
        self.most = [float(bounds.entries), 0.0, 0.0, float(bounds.all_segments)]  # the rest will be measured
        self.room = Needs(*(int(self.headroom * bound) + 1 for bound in bounds))
        return self.room


def room_for(room: Needs, n: int, h: int, tiles: int, backward: bool, same_order: bool) -> Room:
    """Capacities of a pass over n tokens with `tiles` cold tiles.

    A pass without backward gets twice the room, since its caller may not look for overflow; and if its hot neurons are
    not those of training (same_order), as many segments as without any.
    """
    entries, segments, blocks, all_segments = (-(-per * n // PER) for per in room)
    if not backward:
        entries, segments = 2 * entries, 2 * segments if same_order else all_segments
    entries += SPARE_TOKENS * h
    segments += SPARE_TOKENS * -(-h // SPLIT)
    blocks += SPARE_TOKENS * tiles
    # To a multiple: Triton compiles a kernel anew for sizes that are not divisible by 16.
    most_segments = n * -(-h // SPLIT)
    return Room(
        min(_rounded(entries, 64), n * h),
        min(_rounded(segments, 16), most_segments),
        min(_rounded(blocks, 64), n * tiles),
    )


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
