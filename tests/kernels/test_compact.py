import pytest
import torch

from kernels.compact import SPLIT
from kernels.order import TILE
from tests.kernels.stages import pack, random_activation, unpack


@pytest.mark.parametrize("n, h, density", [(1, 1, 1.0), (7, 31, 0.3), (9, 200, 0.05), (5, 1100, 0.5), (3, 70, 0.0)])
def test_rows_hold_what_fired(n, h, density, device):
    packed = pack(random_activation(n, h, density, device))
    assert torch.equal(unpack(packed), packed.dense)
    assert torch.equal(packed.rows.fired, (packed.dense != 0).sum(0, dtype=torch.int32))
    assert packed.rows.needed[0] == packed.dense.count_nonzero()


def test_hot_entries_come_first_and_both_parts_ascend(device):
    packed = pack(random_activation(6, 200, 0.4, device), n_hot=64)
    rows, is_hot = packed.rows, packed.order.rank_of < 64
    for t in range(6):
        first, n_hot, end = rows.start[t], rows.hot[t], rows.start[t] + rows.count[t]
        hot, cold = rows.column[first : first + n_hot].long(), rows.column[first + n_hot : end].long()
        assert is_hot[hot].all() and not is_hot[cold].any()
        assert (hot.diff() > 0).all() and (cold.diff() > 0).all()


def test_occupied_tiles(device):
    packed = pack(random_activation(10, 300, 0.02, device), n_hot=64)
    cold = packed.dense[:, packed.order.cold.long()]
    padded = torch.nn.functional.pad(cold, (0, -cold.shape[1] % TILE))
    expected = (padded.view(10, -1, TILE) != 0).any(2).T
    assert torch.equal(packed.rows.occupied.bool(), expected)


def test_fired_counts_only_counted_tokens(device):
    dense = random_activation(8, 50, 0.5, device)
    counted = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.int8, device=device)
    packed = pack(dense, counted=counted)
    assert torch.equal(packed.rows.fired, (dense[counted.bool()] != 0).sum(0, dtype=torch.int32))
    assert torch.equal(packed.rows.count, (dense != 0).sum(1, dtype=torch.int32))


def test_long_rows_are_cut_in_segments(device):
    dense = torch.zeros(4, 300, device=device)
    dense[1, : 2 * SPLIT + 1] = 1
    dense[2, :SPLIT] = 1  # just not long
    dense[3] = 1
    rows = pack(dense).rows
    parts = {1: 3, 3: -(-300 // SPLIT)}
    assert rows.needed[1] == sum(parts.values())
    for t, count in parts.items():
        first = int(rows.segment_first[t])
        assert (rows.segment_row[first : first + count] == t).all()


def test_rows_that_do_not_fit_are_empty_and_reported(device):
    dense = random_activation(20, 64, 0.5, device)
    complete = int(dense.count_nonzero())
    packed = pack(dense, room=complete // 2)
    rows = packed.rows
    assert rows.needed[0] == complete
    assert rows.count.sum() <= complete // 2
    kept = rows.count > 0
    assert kept.any() and not kept.all()
    assert torch.equal(unpack(packed)[kept], dense[kept])
