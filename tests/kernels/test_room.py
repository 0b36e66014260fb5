import pytest
import torch

from kernels.compact import SPLIT
from kernels.room import HEADROOM, MOST_HEADROOM, PER, Needs, RoomMemory, room_for


def heavy_tailed_passes(passes: int, n: int, h: int, generator: torch.Generator):
    """(entries, segments) of passes over n tokens: log-normal rows of mean 15, and now and then one that fires all."""
    for _ in range(passes):
        row = torch.exp(torch.randn(n, generator=generator)) * (15 / 1.65)
        row = row.clamp(max=h).int()
        if torch.rand((), generator=generator) < 0.02:
            row[: 1 + int(torch.randint(3, (), generator=generator))] = h
        yield int(row.sum()), int(torch.where(row > SPLIT, (row + SPLIT - 1) // SPLIT, 0).sum())


@pytest.mark.parametrize("update_every", [1, 10])
def test_heavy_tails_rarely_overflow(update_every):
    """48 layers and micro-batches a step; a step is repeated if any of them overflows."""
    n, h, draws, steps = 1024, 2048, 48, 200
    generator = torch.Generator().manual_seed(0)
    memory = RoomMemory()
    most, overflowed, overflows = [0, 0], False, 0
    for step in range(steps):
        room = None if memory.room is None else room_for(memory.room, n, h, 32, True, True)
        over = False
        for needs in heavy_tailed_passes(draws, n, h, generator):
            most = [max(m, -(-need * PER // n)) for m, need in zip(most, needs)]
            over |= room is not None and (needs[0] > room.entries or needs[1] > room.segments)
        overflows += over
        overflowed |= over
        if over or step % update_every == update_every - 1 or step == 0:
            memory.adapt(overflowed)
            memory.learn((*most, 0, most[1]))
            most, overflowed = [0, 0], False
    assert overflows <= 1


def test_room_follows_the_maximum_and_forgets_slowly():
    memory = RoomMemory()
    memory.learn((1000, 10, 500, 10))
    room = memory.learn((100, 1, 50, 1))
    assert room.entries >= 1000
    for _ in range(300):
        room = memory.learn((100, 1, 50, 1))
    assert room.entries <= 2 * 126


def test_overflow_earns_more_than_was_needed():
    memory = RoomMemory()
    memory.learn((1000, 10, 500, 10))
    memory.adapt(overflowed=True)
    assert memory.learn((2000, 10, 500, 10)).entries >= 1.5 * 2000


def test_headroom_grows_with_overflows_and_shrinks_in_quiet_times():
    memory = RoomMemory()
    for _ in range(9):
        memory.adapt(overflowed=True)
    assert memory.learn((1000, 10, 500, 10)).entries == MOST_HEADROOM * 1000 + 1
    for _ in range(100):
        memory.adapt(overflowed=False)
    assert memory.headroom == HEADROOM


def test_needs_that_keep_growing_overflow_a_few_times_only():
    """28 layers whose needs double within ten steps, as early in training; updates after every fifth."""
    memories, needs, overflows = [RoomMemory() for _ in range(28)], [1000.0] * 28, 0
    generator = torch.Generator().manual_seed(0)
    for memory in memories:
        memory.learn((1000,) * 4)
    for step in range(60):
        growth = 1 + 0.14 * torch.rand(28, generator=generator)
        needs = [need * g for need, g in zip(needs, growth.tolist())]
        over = any(need > memory.room.entries for need, memory in zip(needs, memories))
        overflows += over
        if over or step % 5 == 4:
            for need, memory in zip(needs, memories):
                memory.adapt(over)
                memory.learn((int(need),) * 4)
    assert overflows <= 6


def test_a_size_that_does_is_kept():
    memory = RoomMemory()
    memory.learn((1000, 10, 500, 10))
    grown = memory.learn((900, 9, 450, 9))
    assert memory.learn((950, 9, 470, 9)) == grown


def test_a_size_that_grows_does_for_a_while():
    memory, sizes = RoomMemory(), set()
    for need in range(1000, 2000, 20):
        sizes.add(memory.learn((need, 0, 0, 0)).entries)
    assert len(sizes) <= 4


def test_capacities_never_exceed_what_could_be_needed():
    room = room_for(Needs(10**6, 10**6, 10**6, 10**6), 3, 100, 2, True, True)
    assert room == (300, 6, 6)


def test_inference_gets_more():
    needs = Needs(10_000, 100, 5_000, 400)
    train = room_for(needs, 2048, 4096, 64, True, True)
    same = room_for(needs, 2048, 4096, 64, False, True)
    other = room_for(needs, 2048, 4096, 64, False, False)
    assert same.entries > 1.3 * train.entries and same.segments > train.segments
    assert other.segments > same.segments
