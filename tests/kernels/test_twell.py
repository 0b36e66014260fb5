import pytest
import torch

from kernels.compact import RowsShape
from kernels.format import Entries, TwELL
from kernels.gate import gate, gate_twell
from kernels.order import make_order, unpack_words
from kernels.state import SLOTS, FFNState, overflowed, update
from kernels.twell import compact_twell
from tests.kernels.ffn_cases import assert_accurate, make_case, run
from tests.kernels.stages import Packed, pack, random_activation, unpack

DTYPE = torch.float16  # bf16 does not interpret


@pytest.mark.parametrize("n, d, h", [(1, 8, 1), (33, 40, 31), (37, 24, 100)])
def test_gate_writes_the_format(n, d, h, device):
    x, w = torch.randn(n, d).to(device, DTYPE), torch.randn(h, d).to(device, DTYPE)
    twell = gate_twell(x, w, slots=33)
    twell.check()
    words, scratch = gate(x, w)
    expected = torch.where(unpack_words(words, h), scratch, 0)
    assert torch.equal(twell.entries().dense(), expected)


@pytest.mark.parametrize("n_hot", [0, 64])
def test_compaction_gives_the_same_rows_as_words_do(n_hot, device):
    dense = random_activation(9, 200, 0.2, device).to(DTYPE)
    twell = TwELL.pack(Entries.of(dense), tile=64, slots=40)
    expected = pack(dense, n_hot)
    order = expected.order
    shape = RowsShape(9, 200, expected.rows.occupied.shape[0], 9 * 200, 9 * 4, True)
    counted = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.int8, device=device)
    seen = FFNState(200, device).seen
    _, rows = compact_twell(twell, order.hot_words, order.rank_of, n_hot, shape, counted, seen)
    assert not seen.numbers.any()
    assert torch.equal(unpack(Packed(dense, order, rows)), dense)
    for name in ("occupied", "hot", "count"):
        assert torch.equal(getattr(rows, name), getattr(expected.rows, name)), name
    assert torch.equal(rows.fired, (dense[counted.bool()] != 0).sum(0, dtype=torch.int32))


def test_a_tile_that_runs_over_is_noted(device):
    dense = torch.ones(2, 64, device=device, dtype=DTYPE)
    dense[0, 5:] = 0
    twell = TwELL.pack(Entries.of(dense), tile=64, slots=8)
    order = make_order(torch.arange(64, device=device), 0)
    seen = FFNState(64, device).seen
    compact_twell(twell, order.hot_words, order.rank_of, 0, RowsShape(2, 64, 1, 128, 4, False), None, seen)
    assert seen.numbers.tolist() == [0, 0, 0, 0, 0, 0, 1, 64]


@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_that_packs_twell(gated, device):
    """The whole path, forward and backward; the densest tile runs over at first, and the repeated step is exact."""
    case = make_case(9, 16, 140, "one token", gated=gated, dtype=DTYPE, device=device, masked=True)
    state = FFNState(140, device, packing="twell")
    run(case, impl="triton", state=state)  # without room yet: by way of words
    update([state])
    run(case, impl="triton", state=state)
    assert overflowed([state])
    update([state])
    assert state.decision.slots > SLOTS
    output, gradients = run(case, impl="triton", state=state)
    assert not overflowed([state])
    assert_accurate(case, output, gradients)


def test_an_unknown_packing_is_refused(device):
    with pytest.raises(ValueError, match="packing='ell': must be bitmap or twell"):
        FFNState(64, device, packing="ell")
