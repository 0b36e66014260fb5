"""What is counted over micro-batches and ranks, against a brute-force count."""

import math

import pytest
import torch
from torch import Tensor

from twell.sparsity import SparsityMeter, SparsityStats, hottest_shares, percentile

LAYERS, B, T, H = 2, 3, 11, 13


def firing(seed: int, b: int = B, t: int = T) -> tuple[Tensor, Tensor, SparsityStats]:
    """(fires bool [layers, b, t, h], counted bool [b, t], the statistics of both)."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.rand(LAYERS, b, t, 1, generator=generator)
    fires = torch.rand(LAYERS, b, t, H, generator=generator) < likely
    counted = torch.rand(b, t, generator=generator) < 0.7
    fired = (fires & counted[None, ..., None]).sum((1, 2), dtype=torch.int32)
    return fires, counted, SparsityStats(fires.sum(3, dtype=torch.int32), counted, fired)


def meter_of(*seeds: int) -> SparsityMeter:
    meter = SparsityMeter(LAYERS, H, T, "cpu")
    for seed in seeds:
        meter.add(firing(seed)[2])
    meter.accept()
    return meter


def test_summary_equals_brute_force():
    summary = meter_of(1, 2, 3).summary()
    heatmap = summary.pop("sparsity/l0_heatmap")
    parts = [firing(seed) for seed in (1, 2, 3)]
    counted = torch.cat([c for _, c, _ in parts])  # [3 b, t]
    fires = torch.cat([f for f, _, _ in parts], dim=1)  # [layers, 3 b, t, h]
    l0 = fires.sum(3)[:, counted]  # [layers, counted tokens]
    expected = {
        "sparsity/l0_mean": l0.double().mean(),
        "sparsity/density": l0.double().mean() / H,
        "sparsity/l0_max": l0.max(),
    }
    for i in range(LAYERS):
        ordered = l0[i].sort().values
        expected[f"sparsity/l0/layer_0{i}"] = l0[i].double().mean()
        expected[f"sparsity/l0_p50/layer_0{i}"] = ordered[-(-len(ordered) * 50 // 100) - 1]
        expected[f"sparsity/l0_p99/layer_0{i}"] = ordered[-(-len(ordered) * 99 // 100) - 1]
        expected[f"sparsity/l0_max/layer_0{i}"] = ordered[-1]
    for part in range(8):
        inside = torch.tensor([p * 8 // T == part for p in range(T)])
        expected[f"sparsity/l0_part/part_{part}"] = fires.sum(3)[:, counted & inside].double().mean()
    for share in (1, 5, 10):  # of 13 neurons: one
        hottest = fires[:, counted].sum(1).double()  # [layers, h]
        expected[f"sparsity/hottest_{share}pct"] = (hottest.amax(1) / hottest.sum(1)).mean()
    assert summary == pytest.approx({key: value.item() for key, value in expected.items()})
    assert heatmap == ([summary["sparsity/l0/layer_00"], summary["sparsity/l0/layer_01"]], [0, 1, 2])


def test_percentile_of_a_known_histogram():
    histogram = torch.tensor([[50, 49, 0, 1], [49, 2, 48, 1], [0, 0, 0, 0]])  # tokens with 0, 1, 2, 3 neurons
    assert percentile(histogram, 50).tolist() == [0, 1, 0]
    assert percentile(histogram, 99).tolist() == [1, 2, 0]
    assert percentile(histogram, 100).tolist() == [3, 3, 0]


def test_hottest_shares():
    fired = torch.ones(1, 200, dtype=torch.int64)
    fired[0, 100] = 801  # of 1000 firings
    assert hottest_shares(fired).flatten().tolist() == pytest.approx([0.802, 0.81, 0.82])


def test_only_accepted_steps_count_and_an_interval_starts_empty():
    meter = SparsityMeter(LAYERS, H, T, "cpu")
    meter.add(firing(1)[2])
    meter.drop()
    meter.add(firing(2)[2])
    meter.accept()
    assert meter.summary() == meter_of(2).summary()
    meter.reset()
    meter.add(firing(3)[2])
    meter.accept()
    assert meter.summary() == meter_of(3).summary()


def test_merged_ranks_and_shorter_sequences_equal_the_whole():
    ranks = [meter_of(1), meter_of(2)]
    ranks[0].merge(lambda mine: mine.add_(ranks[1].interval.all))
    assert ranks[0].summary() == meter_of(1, 2).summary()

    halves = SparsityMeter(LAYERS, H, T, "cpu")
    fires, counted, _ = firing(4)
    for rows in (slice(0, 1), slice(1, B)):
        fired = (fires & counted[None, ..., None])[:, rows].sum((1, 2), dtype=torch.int32)
        halves.add(SparsityStats(fires[:, rows].sum(3, dtype=torch.int32), counted[rows], fired))
    halves.accept()
    assert torch.equal(halves.interval.all, meter_of(4).interval.all)

    short = SparsityMeter(LAYERS, H, T, "cpu")
    short.add(firing(5, t=4)[2])
    assert short.step.counted[4:].sum() == 0 and short.step.l0_sum().sum() == short.step.fired.sum()


def test_nothing_counted_is_nan_and_no_error():
    _, counted, stats = firing(1)
    meter = SparsityMeter(LAYERS, H, T, "cpu")
    meter.add(SparsityStats(stats.nnz, torch.zeros_like(counted), torch.zeros_like(stats.fired)))
    meter.accept()
    summary = meter.summary()
    assert summary.keys() == meter_of(1).summary().keys() and all(math.isnan(value) for value in summary.values())
