"""Divided tensors, on one process that forms a group of its own. What several ranks do: tests/test_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.twell.small import batch, build
from twell import parallel, sharded
from twell.config import ParallelConfig
from twell.parallel import GradientSync, Ranks
from twell.sharded import ShardedWeights, copy_rows, gathered, local_rows, units, with_share
from twell.weights import Weights


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)
    yield parallel.start("cpu")
    parallel.finish()


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
@pytest.mark.parametrize("n_units", [1, 2, 3])  # of three blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_train_like_whole_weights(ranks: Ranks, monkeypatch, mode, n_units, dtype):
    monkeypatch.setattr(sharded, "UNITS", n_units)
    plain, model = build(dtype=dtype), build(dtype=dtype)
    whole, shares = Weights(plain, dtype), ShardedWeights(model, dtype, ParallelConfig(mode), ranks)
    for weights, net in ((whole, plain), (shares, model)):
        weights.zero_grad()
        for i in range(3):
            weights.begin(last=i == 2)
            out = net(*batch(seed=i))
            out.loss_sum.backward()
            weights.accumulate()
        weights.join()
    assert whole.masters.keys() == shares.masters.keys()
    for name, master in whole.masters.items():
        assert torch.equal(shares.masters[name], master)
        assert_close(shares.masters[name].grad, master.grad, rtol=1e-6, atol=1e-6)
    assert_close(shares.norm(shares.grad), whole.norm(whole.grad))
    # what the optimizer changes is what the next pass computes with
    with torch.no_grad():
        for weights in (whole, shares):
            for master in weights.masters.values():
                master.mul_(0.5)
            weights.refresh()
    assert torch.equal(plain(*batch()).loss_sum, model(*batch()).loss_sum)


def test_units_are_of_a_size_and_not_too_few(monkeypatch):
    blocks = torch.nn.ModuleList(torch.nn.Linear(10, 10, bias=False) for _ in range(9))  # 100 parameters each
    for most, sizes in ((1, [1] * 9), (250, [2, 2, 2, 2, 1]), (10**9, [3, 3, 3])):  # a quarter of nine: three
        monkeypatch.setattr(sharded, "UNIT_PARAMETERS", most)
        found = units(blocks)
        assert [len(unit) for unit in found] == sizes
        assert [block for unit in found for block in unit] == list(blocks)


def test_weights_reach_the_ffn_as_plain_tensors_in_their_layout(ranks: Ranks):
    model = build(dtype=torch.bfloat16)
    ShardedWeights(model, torch.bfloat16, ParallelConfig("fsdp"), ranks)
    seen = []
    model.blocks[1].ffn.register_forward_pre_hook(lambda ffn, _: seen.extend(ffn.weights(torch.bfloat16)))
    model(*batch())
    for weight, name in zip(seen, ("w_gate", "w_up", "w_down")):
        assert type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.is_contiguous()
        assert weight.dtype == torch.bfloat16 and weight.shape == getattr(model.blocks[1].ffn, name).shape


def test_a_model_from_nowhere_is_filled_by_rows(ranks: Ranks):
    expected = build(seed=4)
    with torch.device("meta"):
        model = build_empty()
    weights = ShardedWeights(model, torch.float32, ParallelConfig("zero1"), ranks)
    model.init_weights(4, copy_rows)
    for name, parameter in expected.named_parameters():
        assert torch.equal(weights.masters[name], parameter)
    assert torch.equal(model.rope, expected.rope)
    with gathered(model):
        assert torch.equal(model.blocks[0].ffn.w_up, expected.blocks[0].ffn.w_up)


def build_empty():
    from tests.twell.small import N_VOCAB, VOCAB_SIZE, ffn_config, model_config
    from twell.model import Transformer

    return Transformer(model_config(), ffn_config("sparse"), VOCAB_SIZE, N_VOCAB)


def test_rows_share_memory_and_shares_can_be_replaced(ranks: Ranks):
    weights = ShardedWeights(build(), torch.float32, ParallelConfig("zero1"), ranks)
    state = weights.state()["model.blocks.0.ffn.w_up"]
    rows, first = local_rows(state)
    rows[3] = 5.0
    assert first == 0 and (weights.masters["blocks.0.ffn.w_up"][3] == 5).all()
    other = with_share(state, torch.zeros_like(rows))
    assert other.shape == state.shape and not local_rows(other)[0].any()
    plain = torch.ones(4, 2)
    assert local_rows(plain) == (plain, 0)


def test_gradients_are_summed_bucket_by_bucket_in_one_order(ranks: Ranks, monkeypatch):
    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (5, 3, 4, 6)]
    grad, starts = torch.zeros(18), [0, 5, 8, 12]
    for parameter, start in zip(parameters, starts):
        parameter.grad = grad[start : start + len(parameter)]
    summed, completed, all_reduce = [], [], dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda part, **kwargs: (summed.append(len(part)), all_reduce(part, **kwargs))[1]
    )
    sync = GradientSync(grad, parameters, starts, completed.append, bucket=7)
    (parameters[0].sum() + parameters[3].sum()).backward()  # not the last pass: nothing happens
    assert summed == [] and completed == []
    sync.begin()
    parameters[0].sum().backward()
    parameters[1].sum().backward()
    assert summed == []  # the bucket of 3 and 2 comes first, on every rank
    (parameters[2].sum() + parameters[3].sum()).backward()
    assert summed == [10, 8] and completed == [[3, 2], [1, 0]]
    sync.wait()
    sync.begin()
    parameters[3].sum().backward()
    sync.wait()  # sums the rest, which backward never came to
    assert summed == [10, 8, 10, 8]
    assert torch.equal(grad, torch.tensor([2.0] * 5 + [1.0] * 3 + [1.0] * 4 + [3.0] * 6))
