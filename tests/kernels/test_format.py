import itertools

import pytest
import torch

from kernels.format import Entries, NeuronTiles, PackedRows, TileBitmap, TwELL, convert

FORMATS = (TileBitmap, TwELL, PackedRows, NeuronTiles)
LAYOUT = {TwELL: {"tile": 24, "slots": 25}}  # room for every neuron of a tile


def random_matrix(n: int, h: int, density: float, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(n, h, generator=generator)
    return (dense * (torch.rand(n, h, generator=generator) < density)).to(dtype)


def pack(kind, dense, **layout):
    return kind.pack(Entries.of(dense), **(LAYOUT.get(kind, {}) | layout))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("n, h", [(1, 1), (3, 31), (5, 32), (2, 33), (7, 64), (4, 65), (9, 130)])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
def test_pack_and_unpack_are_inverse(kind, n, h, density):
    dense = random_matrix(n, h, density)
    packed = pack(kind, dense)
    packed.check()
    assert torch.equal(packed.entries().dense(), dense)


@pytest.mark.parametrize("source, target", list(itertools.permutations(FORMATS, 2)))
def test_every_format_converts_to_every_other(source, target):
    dense = random_matrix(6, 77, 0.2)
    packed = convert(pack(source, dense), target, **LAYOUT.get(target, {}))
    packed.check()
    assert isinstance(packed, target)
    assert torch.equal(packed.entries().dense(), dense)


@pytest.mark.parametrize("kind", FORMATS)
def test_no_tokens(kind):
    packed = pack(kind, torch.zeros(0, 70, dtype=torch.bfloat16))
    packed.check()
    assert packed.entries().dense().shape == (0, 70)


@pytest.mark.parametrize("kind", FORMATS)
def test_one_busy_token_and_one_busy_neuron(kind):
    dense = torch.zeros(5, 100, dtype=torch.bfloat16)
    dense[3], dense[:, 99] = 2, -1
    assert torch.equal(pack(kind, dense).entries().dense(), dense)


@pytest.mark.parametrize("kind", FORMATS)
def test_bits_of_extreme_values_survive(kind):
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.5, 3.3e38, 1e-38], dtype=torch.bfloat16)
    dense = torch.zeros(2, 40, dtype=torch.bfloat16)
    dense[1, 30:36] = values
    out = pack(kind, dense).entries()
    assert torch.equal(out.value.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("kind", (TileBitmap, TwELL, PackedRows))
def test_zeros_of_the_pattern_stay_entries(kind):
    dense, pattern = torch.zeros(2, 40, dtype=torch.bfloat16), torch.zeros(2, 40, dtype=torch.bool)
    pattern[1, 31] = pattern[0, 32] = True
    entries = kind.pack(Entries.of(dense, pattern)).entries()
    assert (entries.token.tolist(), entries.neuron.tolist()) == ([0, 1], [32, 31])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes(dtype):
    dense = random_matrix(3, 50, 0.3, dtype)
    for kind in (TileBitmap, PackedRows, NeuronTiles):
        assert torch.equal(pack(kind, dense).entries().dense(), dense)
    if dtype == torch.float16:
        assert torch.equal(pack(TwELL, dense).entries().dense(), dense)
    else:
        with pytest.raises(ValueError, match=f"bf16 or fp16, not {dtype}"):
            pack(TwELL, dense)


def test_bitmap_layout():
    dense = torch.zeros(1, 70, dtype=torch.bfloat16)
    dense[0, [0, 31, 32, 69]] = 1
    assert TileBitmap.pack(Entries.of(dense)).words.tolist() == [[1 - 2**31, 1, 1 << 5]]


def test_bitmap_never_reads_undefined_values():
    dense = random_matrix(4, 70, 0.3)
    packed = pack(TileBitmap, dense)
    assert packed.values.isnan().sum() == (dense == 0).sum()  # uninitialised memory is NaN in these tests
    assert torch.equal(convert(packed, PackedRows).entries().dense(), dense)


def test_bitmap_check_finds_bits_past_the_last_neuron():
    packed = pack(TileBitmap, random_matrix(2, 33, 0.5))
    packed.words[0, 1] |= 2
    with pytest.raises(ValueError, match="beyond h=33"):
        packed.check()


def test_twell_layout():
    dense = torch.zeros(1, 8, dtype=torch.bfloat16)
    dense[0, 1], dense[0, 6], dense[0, 7] = 1.0, -2.0, 0.5
    packed = TwELL.pack(Entries.of(dense), tile=4, slots=3)
    assert packed.slots[0, 0, :2].tolist() == [1, 1 << 16 | 0x3F80]
    assert packed.slots[0, 1].tolist() == [2, 6 << 16 | 0xC000, 7 << 16 | 0x3F00]


def test_twell_reports_a_tile_that_runs_over():
    dense = torch.zeros(2, 48, dtype=torch.bfloat16)
    dense[1, 24:29] = 1
    fits = TwELL.pack(Entries.of(dense), tile=24, slots=6)
    runs_over = TwELL.pack(Entries.of(dense), tile=24, slots=5)
    assert not fits.overflow()
    assert runs_over.overflow()
    assert runs_over.slots[1, 1, 0] == 5  # the true count, not what was stored
    with pytest.raises(ValueError, match="holds 5 non-zeros but has 5 slots"):
        runs_over.entries()


def test_twell_check_finds_foreign_neurons():
    packed = pack(TwELL, random_matrix(2, 48, 1.0))
    packed.slots[0, 0, 1] = 30 << 16
    with pytest.raises(ValueError, match="another tile"):
        packed.check()


@pytest.mark.parametrize("h", [65536, 65537])
def test_neuron_numbers_beyond_16_bits(h):
    neuron = torch.tensor([0, 32767, 32768, h - 1])
    entries = Entries(torch.zeros(4, dtype=torch.int64), neuron, torch.ones(4, dtype=torch.bfloat16), 1, h)
    for kind in (TileBitmap, PackedRows, NeuronTiles):
        assert torch.equal(kind.pack(entries).entries().neuron, neuron)
    if h == 65536:
        assert torch.equal(TwELL.pack(entries).entries().neuron, neuron)
    else:
        with pytest.raises(ValueError, match="h=65537 exceeds 65536; use TileBitmap or PackedRows"):
            TwELL.pack(entries)


def test_offsets_beyond_31_bits():
    n, h = 40_000, 65_536  # n * h > 2^31
    token, neuron = torch.tensor([0, n - 1, n - 1]), torch.tensor([5, 0, h - 1])
    entries = Entries(token, neuron, torch.ones(3, dtype=torch.bfloat16), n, h)
    for kind in (PackedRows, NeuronTiles):
        out = kind.pack(entries).entries()
        assert torch.equal(out.token, token)
        assert torch.equal(out.neuron, neuron)
    rows = PackedRows.pack(entries)
    moved = PackedRows(rows.start + 2**33, rows.count, rows.neurons, rows.values, h)
    assert moved.overflow()  # not wrapped around to a valid offset


def test_rows_in_any_order_with_gaps():
    rows = PackedRows(
        start=torch.tensor([5, 0]),
        count=torch.tensor([2, 3], dtype=torch.int32),
        neurons=torch.tensor([1, 4, 5, -1, -1, 0, 4, -1], dtype=torch.int32),
        values=torch.tensor([1.0, 2, 3, float("nan"), float("nan"), 4, 5, float("nan")]),
        h=6,
    )
    rows.check()
    assert rows.entries().dense().tolist() == [[4, 0, 0, 0, 5, 0], [0, 1, 0, 0, 2, 3]]
    with pytest.raises(ValueError, match="overlap"):
        PackedRows(torch.tensor([2, 0]), rows.count, rows.neurons, rows.values, 6).check()
    backwards = PackedRows(rows.start.int(), rows.count, 5 - rows.neurons, rows.values, 6)
    backwards.check()
    assert backwards.entries().dense().tolist() == [[0, 5, 0, 0, 0, 4], [3, 2, 0, 0, 1, 0]]
    with pytest.raises(ValueError, match="twice"):
        PackedRows(rows.start, rows.count, rows.neurons.clamp(max=1), rows.values, 6).check()


def test_rows_report_running_over():
    dense = random_matrix(4, 50, 0.5)
    total = int((dense != 0).sum())
    assert not pack(PackedRows, dense, capacity=total).overflow()
    short = pack(PackedRows, dense, capacity=total - 1)
    assert short.overflow()
    with pytest.raises(ValueError, match=f"need a buffer of {total}, this one holds {total - 1}"):
        short.entries()


def test_tiles_in_a_given_order():
    h = 130
    order = torch.randperm(h, generator=torch.Generator().manual_seed(1)).int()
    dense = random_matrix(9, h, 0.03)
    tiles = pack(NeuronTiles, dense, order=order)
    tiles.check()
    assert torch.equal(tiles.entries().dense(), dense)
    for i in range(-(-h // NeuronTiles.TILE)):
        tokens = tiles.tokens[tiles.offsets[i] : tiles.offsets[i + 1]].long()
        owned = dense[:, order[NeuronTiles.TILE * i : NeuronTiles.TILE * (i + 1)].long()]
        assert torch.equal(tokens, owned.any(1).nonzero()[:, 0])
        block = tiles.values[tiles.offsets[i] : tiles.offsets[i + 1], : owned.shape[1]]
        assert torch.equal(block, owned[tokens])


def test_tiles_report_running_over():
    dense = random_matrix(4, 130, 0.5)
    needed = len(pack(NeuronTiles, dense).tokens)
    short = pack(NeuronTiles, dense, capacity=needed - 1)
    assert short.overflow()
    with pytest.raises(ValueError, match=f"need a buffer of {needed}"):
        short.entries()


def test_tiles_check_finds_broken_contents():
    tiles = pack(NeuronTiles, random_matrix(4, 70, 0.5))
    tiles.values[int(tiles.offsets[-2]), -1] = 1
    with pytest.raises(ValueError, match="beyond h=70"):
        tiles.check()
    tiles = pack(NeuronTiles, random_matrix(4, 70, 1.0))
    tiles.tokens[:2] = tiles.tokens[:2].flip(0)
    with pytest.raises(ValueError, match="tokens must rise"):
        tiles.check()
    with pytest.raises(ValueError, match="not a permutation"):
        pack(NeuronTiles, random_matrix(4, 70, 0.5), order=torch.zeros(70, dtype=torch.int32)).check()


def test_wrong_shapes_and_dtypes_are_refused():
    words, values = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 40)
    with pytest.raises(ValueError, match="needs 3 words"):
        TileBitmap(words, values, 70)
    with pytest.raises(ValueError, match="words must be int32"):
        TileBitmap(words.long(), values, 40)
    with pytest.raises(ValueError, match="start must be int32 or int64"):
        PackedRows(words[0].short(), words[0], words[0], values[0, :2], 40)
    with pytest.raises(ValueError, match="at least 2 slots"):
        TwELL(torch.zeros(2, 1, 1, dtype=torch.int32), 40, 64, torch.bfloat16)
