import pytest
import torch

from kernels.order import TILE
from kernels.plan import plan
from kernels.weight_grad import weight_grad


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "n_cold, n, d, l2", [(1, 3, 8, 0), (100, 21, 40, 1 << 16), (130, 40, 70, 70_000), (130, 40, 70, 0)]
)
def test_weight_grad(n_cold, n, d, l2, gated, device, monkeypatch):
    monkeypatch.setattr("kernels.weight_grad.l2_bytes", lambda _: l2)  # decides how many tiles make a group
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    h, tiles = n_cold + 7, -(-n_cold // TILE)
    order = torch.randperm(h, generator=generator).to(device, torch.int32)[7:]
    x, dy = make(n, d), make(n, d)
    occupied = (torch.rand(tiles, n, generator=generator) < 0.4).to(device, torch.int8)
    occupied[-1] = 0 if tiles > 1 else 1  # a tile that nobody touches
    count = int(occupied.sum())
    index = plan(occupied, count, 2 * TILE if gated else TILE, TILE, x.dtype, None)
    index.inner.copy_(make(*index.inner.shape))
    index.hidden.copy_(make(*index.hidden.shape))
    outputs = [torch.full((h, d), 7.0, device=device) for _ in range(3)]
    weight_grad(index, x, dy, order, outputs[0] if gated else None, outputs[1], outputs[2])

    offsets = index.offsets.tolist()
    sources = [(index.hidden, dy, outputs[2]), (index.inner[:, -TILE:], x, outputs[1])]
    if gated:
        sources.append((index.inner[:, :TILE], x, outputs[0]))
    for blocks, source, output in sources:
        expected = torch.full((h, d), 7.0, device=device)  # rows of other neurons are left alone
        for tile in range(tiles):
            slots = slice(offsets[tile], offsets[tile + 1])
            neurons = order[TILE * tile : TILE * tile + TILE].long()
            expected[neurons] = (blocks[slots].T @ source[index.tokens[slots].long()])[: len(neurons)]
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
