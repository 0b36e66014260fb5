"""Sparsity on the validation text, and the share of operations executed, against brute force."""

import itertools

import pytest
import torch

from tests.twell.small import N_VOCAB, batch, build
from twell.measures import SEEN_AT_LEAST, ValidationSparsity, executed_share, log_edges
from twell.sparsity import SparsityStats

LAYERS, H = 2, 9


def random_batch(seed: int) -> tuple[torch.Tensor, SparsityStats]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, (4, 11), generator=generator)
    nnz = torch.randint(H + 1, (LAYERS, 4, 11), generator=generator, dtype=torch.int32)
    counted = torch.rand(4, 11, generator=generator) < 0.8
    return tokens, SparsityStats(nnz, counted, torch.zeros(LAYERS, H, dtype=torch.int32))


def test_tables_and_histograms_equal_brute_force():
    measures = ValidationSparsity(LAYERS, H, 7, "cpu")
    batches = [random_batch(1), random_batch(2)]
    measures.add(*random_batch(3))
    measures.clear()
    for tokens, stats in batches:
        measures.add(tokens, stats)
    summary = measures.summary(lambda ids: f"<{ids[0]}>", lambda counts: counts)

    counted = torch.stack([stats.counted for _, stats in batches])
    tokens = torch.stack([tokens for tokens, _ in batches])[counted]
    nnz = torch.stack([stats.nnz for _, stats in batches], dim=1)[:, counted]  # [layers, counted tokens]
    for i in range(LAYERS):
        counts, edges = summary[f"sparsity/l0_histogram/layer_0{i}"]
        assert edges == [0, 1, 2, 3, 4, 6, 8, 10]
        assert counts == [((nnz[i] >= a) & (nnz[i] < b)).sum() for a, b in itertools.pairwise(edges)]
    expected = []
    for token in range(7):
        here = tokens == token
        if here.sum() >= SEEN_AT_LEAST:
            expected.append([f"<{token}>", nnz[:, here].double().mean().item(), here.sum().item()])
    expected.sort(key=lambda row: -row[1])
    most, fewest = summary["sparsity/tokens_most"], summary["sparsity/tokens_fewest"]
    assert most.columns == ["token", "active neurons", "times seen"]
    assert len(expected) >= 4 and len(most.rows) == len(expected)
    for row, wanted in zip(most.rows, expected):
        assert row[0] == wanted[0] and row[1] == pytest.approx(wanted[1]) and row[2] == wanted[2]
    assert fewest.rows == most.rows[::-1]


def test_ranks_are_joined():
    parts = [ValidationSparsity(LAYERS, H, 7, "cpu") for _ in range(2)]
    whole = ValidationSparsity(LAYERS, H, 7, "cpu")
    for seed, part in enumerate(parts):
        part.add(*random_batch(seed))
        whole.add(*random_batch(seed))
    joined = parts[0].summary(str, lambda counts: counts.add_(parts[1]._all))
    assert joined == whole.summary(str, lambda counts: counts)


def test_edges_are_fine_for_few_neurons_and_end_at_the_last():
    assert log_edges(1) == [0, 1]
    assert log_edges(3) == [0, 1, 2, 3]
    edges = log_edges(14337)
    assert edges[-1] == 14337 and len(edges) < 40 and all(b <= 1.5 * a for a, b in itertools.pairwise(edges[2:]))


@pytest.mark.parametrize(("kind", "per_neuron"), [("sparse", 16), ("sparse_nongated", 10)])
def test_executed_share_counts_active_neurons_where_a_layer_runs_sparse(kind: str, per_neuron: int):
    model = build(kind)
    d_ff = len(model.blocks[0].ffn.w_up)
    values = {f"sparsity/l0/layer_0{i}": 5.0 for i in range(3)}
    assert executed_share(model, values) == 1
    values["sparsity/route/layer_00"], values["sparsity/route/layer_01"] = 1.0, 0.0
    saved = per_neuron * 24 * (d_ff - 5)  # FLOPs: d_model 24
    assert executed_share(model, values) == pytest.approx(1 - saved / model.flops_per_token())


def test_a_model_fills_them():
    model = build("sparse")
    tokens, targets = batch(b=4, masked=5)
    measures = ValidationSparsity(3, 40, N_VOCAB, "cpu")
    measures.add(tokens, model(tokens, targets).stats)
    histogram = measures.summary(str, lambda counts: counts)["sparsity/l0_histogram/layer_02"]
    assert sum(histogram.counts) == 4 * 17 - 5
