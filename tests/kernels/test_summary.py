import pytest
import torch

from kernels.summary import Seen, summarize


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("needed, over", [((7, 3), 0), ((8, 3), 1), ((7, 4), 1)])
def test_either_buffer_running_over_is_noted(needed, over, stats, device):
    seen = Seen(torch.zeros(8, dtype=torch.int64, device=device), torch.zeros(5, dtype=torch.int32, device=device))
    parts, count = torch.ones(4, device=device), torch.tensor([2, 0, 3, 2], dtype=torch.int32, device=device)
    fired = torch.tensor([1, 2, 0, 3, 1], dtype=torch.int32, device=device)
    numbers = torch.tensor(needed, device=device)
    l1, fired_out = summarize(parts, count, fired, None, seen, numbers, entries=7, segments=3, stats=stats)
    assert seen.numbers[6] == over
    assert seen.numbers[2:4].tolist() == [need * 256 for need in needed]  # per 1024 tokens
    if stats:
        assert l1 == 4 and torch.equal(fired_out, fired) and torch.equal(seen.fired, fired)
        assert seen.numbers[:2].tolist() == [1, 4]
