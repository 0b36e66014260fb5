import pytest
import torch

from kernels import rows
from kernels.compact import SPLIT
from kernels.order import TILE
from kernels.plan import plan
from kernels.rows_dot import piece_of
from tests.kernels.stages import pack, random_activation


def problem(d: int, device: torch.device):
    """An activation with a long row, an empty one, and one of exactly SPLIT entries; weights; x."""
    dense = random_activation(6, 200, 0.1, device)
    dense[1] = random_activation(1, 200, 1.0, device, seed=1)
    dense[2] = 0
    dense[3] = 0
    dense[3, :SPLIT] = 1.5
    generator = torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    return dense, make(6, d), make(6, d), [make(200, d) for _ in range(3)]


def test_weights_beyond_the_cache_are_gathered_in_pieces(monkeypatch):
    device = torch.device("cpu")
    assert [piece_of(device, d, 200, 4) for d in (24, 70)] == [32, 32]  # what the tests below cover
    monkeypatch.setattr("kernels.rows_dot.l2_bytes", lambda _: 60 << 20)
    monkeypatch.setattr("kernels.rows_dot.LEAST_PIECE", 256)
    assert piece_of(device, 2048, 5632, 2) == 2048
    assert piece_of(device, 3072, 8192, 2) == 1024
    assert piece_of(device, 4096, 14336, 2) == 1024
    assert piece_of(device, 8192, 100_000, 2) == 256


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("add, with_residual", [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("d", [24, 70])
def test_forward(gated, add, with_residual, d, device):
    dense, x, _, (_, w_up, w_down) = problem(d, device)
    counted = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.int8, device=device)
    packed = pack(dense, segments=8)
    before = torch.randn(6, d, device=device)
    y = before.clone() if add else torch.empty_like(x)
    l1 = torch.empty(6, device=device)
    residual = torch.randn(6, d, device=device) if with_residual else None
    rows.forward(x, w_up if gated else None, w_down, packed.rows, y, add, counted, l1, residual)

    up = x @ w_up.T
    a = dense * up if gated else dense
    expected = a @ w_down + (before if add else 0) + (residual if with_residual else 0)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(l1.sum(), a[counted.bool()].abs().sum(), rtol=1e-5, atol=1e-3)
    if gated:
        for t in range(6):
            entries = slice(int(packed.rows.start[t]), int(packed.rows.start[t] + packed.rows.count[t]))
            torch.testing.assert_close(
                packed.rows.up[entries], up[t, packed.rows.column[entries].long()], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("d", [24, 70])
def test_backward(gated, d, device):
    dense, x, dy, (w_gate, w_up, w_down) = problem(d, device)
    packed = pack(dense, segments=8)
    up = x @ w_up.T if gated else torch.ones_like(dense)
    if gated:
        rows.forward(x, w_up, w_down, packed.rows, torch.empty_like(x), False, None, torch.empty(6, device=device))
    tiles = plan(packed.rows.occupied, 6 * -(-200 // TILE), 2 * TILE if gated else TILE, TILE, x.dtype, None)
    dl1, dx = torch.tensor(0.3, device=device), torch.empty_like(x)
    order = packed.order
    rows.backward(
        x, dy, dl1, w_gate if gated else None, w_up, w_down, packed.rows, order.rank_of, 0, tiles, dx, False, None
    )

    a = dense * up
    da = (dy @ w_down.T + 0.3 * a.sign()) * (dense != 0)
    d_gate, d_up = (da * up, da * dense) if gated else (None, da)
    expected = d_up @ w_up + (d_gate @ w_gate if gated else 0)
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-3)
    blocks = {"hidden": (tiles.hidden, a), "last": (tiles.inner[:, -TILE:], d_up)}
    if gated:
        blocks["gate"] = (tiles.inner[:, :TILE], d_gate)
    offsets = tiles.offsets.tolist()
    for values, matrix in blocks.values():
        in_order = torch.nn.functional.pad(matrix[:, order.order.long()], (0, -200 % TILE))
        for tile in range(-(-200 // TILE)):
            slots = slice(offsets[tile], offsets[tile + 1])
            expected = in_order[tiles.tokens[slots].long(), TILE * tile : TILE * tile + TILE]
            torch.testing.assert_close(values[slots], expected, rtol=1e-4, atol=1e-3)
