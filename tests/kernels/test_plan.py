import pytest
import torch

from kernels import plan as plan_module
from kernels.plan import plan
from kernels.summary import Seen


def new_seen(device: torch.device) -> Seen:
    return Seen(torch.zeros(8, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device))


@pytest.mark.parametrize("tiles, n, density", [(1, 1, 1.0), (3, 70, 0.3), (5, 40, 0.0), (2, 33, 1.0)])
def test_token_lists(tiles, n, density, device, monkeypatch):
    monkeypatch.setattr(plan_module, "BLOCK", 16)  # several blocks of tokens
    occupied = (torch.rand(tiles, n) < density).to(device, torch.int8)
    total = int(occupied.sum())
    seen = new_seen(device)
    result = plan(occupied, total + 3, 128, 64, torch.float32, seen)
    offsets = result.offsets.tolist()
    assert offsets[0] == 0 and offsets[-1] == total
    for tile in range(tiles):
        tokens = result.tokens[offsets[tile] : offsets[tile + 1]].long()
        assert torch.equal(tokens, occupied[tile].nonzero().squeeze(1))
        slots = torch.arange(offsets[tile], offsets[tile + 1], device=device, dtype=torch.int32)
        assert torch.equal(result.slot[tile, tokens], slots)
    for blocks in (result.inner, result.hidden):
        assert (blocks[:total] == 0).all()
        assert blocks[total:].isnan().all()  # cleared is what is used, no more
    assert seen.numbers[4] == -(-total * 1024 // n) and seen.numbers[6] == 0


@pytest.mark.parametrize("tiles, n", [(1026, 2), (2, 34 * 16)])
def test_many_tiles_and_many_blocks_of_tokens(tiles, n, device, monkeypatch):
    monkeypatch.setattr(plan_module, "BLOCK", 16)
    occupied = torch.ones(tiles, n, dtype=torch.int8, device=device)
    result = plan(occupied, tiles * n, 32, 16, torch.float32, None)
    assert torch.equal(result.offsets, torch.arange(tiles + 1, device=device, dtype=torch.int32) * n)
    assert torch.equal(result.slot.view(-1), torch.arange(tiles * n, device=device, dtype=torch.int32))


def test_too_many_blocks_are_reported_and_nothing_is_written_beyond(device):
    occupied = torch.ones(2, 20, dtype=torch.int8, device=device)
    seen = new_seen(device)
    result = plan(occupied, 25, 128, 64, torch.float32, seen)
    assert seen.numbers[6] == 1 and seen.numbers[4] == 2 * 1024
    assert result.offsets.tolist() == [0, 20, 40]
    assert (result.inner == 0).all()


def test_no_cold_tiles(device):
    result = plan(torch.empty(0, 5, dtype=torch.int8, device=device), 10, 128, 64, torch.float32, None)
    assert result.offsets.tolist() == [0]
