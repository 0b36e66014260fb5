"""The weight of the L1 penalty, and the statistics gathered over micro-batches and ranks."""

import pytest
import torch
from torch.testing import assert_close

from tests.twell.small import batch, build
from twell import sparsity
from twell.config import FFNConfig, L1Config
from twell.sparsity import SparsityMeter, SparsityStats, l1_coefficient, l1_weight


def test_coefficient_warms_up_linearly():
    cfg = L1Config(coef=0.3, warmup_steps=3)
    assert [l1_coefficient(cfg, step) for step in range(5)] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.3])
    assert l1_coefficient(L1Config(coef=0.3), 0) == 0.3


def test_weight_gives_the_documented_penalty():
    """coef * mean over layers and counted tokens of the sum (or mean) over neurons."""
    model = build("sparse")
    tokens, targets = batch(masked=7)
    counted = targets >= 0
    sums = []
    for block in model.blocks:
        block.ffn.register_forward_pre_hook(
            lambda ffn, args: sums.append(
                ((args[0] @ ffn.w_gate.T).relu() * (args[0] @ ffn.w_up.T)).abs().sum(-1)[counted].mean()
            )
        )
    l1_sum = model(tokens, targets).l1_sum
    for norm, divisor in (("sum", 1), ("mean", 40)):
        cfg = FFNConfig(kind="sparse", d_ff=40, l1=L1Config(coef=0.5, norm=norm))
        penalty = l1_weight(cfg, n_layers=3, step=0) * l1_sum / counted.sum()
        assert_close(penalty, 0.5 * torch.stack(sums).mean() / divisor)


def stats(firing: list[list[list[int]]]) -> SparsityStats:
    """From 0/1 of [layers, tokens, h]."""
    fires = torch.tensor(firing)
    nnz = fires.sum(2)
    return SparsityStats(nnz.sum(1), nnz.amax(1).int(), fires.sum(1).int())


FIRST = stats([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]])
SECOND = stats([[[0, 1, 0]], [[0, 1, 0]]])


def test_summary_over_micro_batches():
    meter = SparsityMeter(n_layers=2, d_ff=3, device="cpu")
    meter.update(FIRST, torch.tensor(2))
    meter.update(SECOND, torch.tensor(1))
    assert meter.summary() == pytest.approx(
        {
            "sparsity/l0_mean": 4 / 3,
            "sparsity/density": 4 / 9,
            "sparsity/l0_max": 3,
            "sparsity/dead_share": 1 / 6,  # neuron 2 of layer 0 has never fired
            "sparsity/l0/layer_00": 4 / 3,
            "sparsity/l0/layer_01": 4 / 3,
            "sparsity/l0_max/layer_00": 2,
            "sparsity/l0_max/layer_01": 3,
            "sparsity/dead_share/layer_00": 1 / 3,
            "sparsity/dead_share/layer_01": 0,
        }
    )
    meter.reset()
    meter.update(SECOND, torch.tensor(1))
    after = meter.summary()
    assert after["sparsity/l0_mean"] == 1 and after["sparsity/l0_max"] == 1
    assert after["sparsity/dead_share/layer_00"] == pytest.approx(1 / 3)  # silence does not start anew


def test_a_neuron_is_dead_after_a_million_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sparsity, "DEAD_AFTER", 10)
    meter = SparsityMeter(n_layers=1, d_ff=2, device="cpu")
    shares = []
    for firing in ([1, 1], [1, 0], [1, 0], [1, 0], [1, 1]):
        meter.update(stats([[firing]]), torch.tensor(4))
        shares.append(meter.summary()["sparsity/dead_share"])
    assert shares == [0, 0, 0, 0.5, 0]  # silent for 12 >= 10 tokens at the fourth


def test_nothing_seen_is_not_death():
    assert SparsityMeter(1, 4, "cpu").summary()["sparsity/dead_share"] == 0


def test_merged_ranks_equal_one_rank():
    alone = SparsityMeter(2, 3, "cpu")
    ranks = [SparsityMeter(2, 3, "cpu", n_ranks=2) for _ in range(2)]
    # A step of 2 x 1 tokens, twice; within a step the single rank sees the same tokens as the two together.
    for left, right in ((SECOND, SECOND), (stats([[[1, 0, 0]], [[0, 0, 0]]]), stats([[[1, 0, 1]], [[0, 0, 1]]]))):
        both = SparsityStats(
            left.l0_sum + right.l0_sum, torch.maximum(left.l0_max, right.l0_max), left.fired + right.fired
        )
        alone.update(both, torch.tensor(2))
        for meter, part in zip(ranks, (left, right)):
            meter.update(part, torch.tensor(1))

    calls = []  # what the other rank contributes, in the order of the reductions
    ranks[1].merge(lambda t: calls.append(t.clone()) or t, lambda t: calls.append(t.clone()) or t)
    incoming = iter(calls)
    ranks[0].merge(lambda t: t.add_(next(incoming)), lambda t: t.copy_(torch.maximum(t, next(incoming))))
    assert ranks[0].summary() == alone.summary()
    for name, tensor in alone.state().items():
        assert_close(ranks[0].state()[name], tensor)


def test_state_restores_the_silence():
    meter, fresh = SparsityMeter(2, 3, "cpu"), SparsityMeter(2, 3, "cpu")
    meter.update(FIRST, torch.tensor(2))
    for name, tensor in fresh.state().items():
        tensor.copy_(meter.state()[name])
    meter.reset()
    meter.update(SECOND, torch.tensor(1))
    fresh.update(SECOND, torch.tensor(1))
    assert fresh.summary() == meter.summary()
