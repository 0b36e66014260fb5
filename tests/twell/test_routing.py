"""The sparse kernels in the training loop; on CPU in Triton's interpreter, at a size that it can bear."""

import pytest
import torch
from torch import nn

from kernels.dispatch import Shape
from tests.training import losses, train_tiny
from twell.config import FFNConfig
from twell.ffn import build_ffn
from twell.routing import Routing

CPU = torch.device("cpu")
KERNELS = (
    "ffn.impl=triton",
    "model.seq_len=8",
    "model.d_ff=48",
    "batch.tokens=16",
    "batch.micro=1",
    "eval.tokens=16",
    "eval.sample_tokens=0",
)


def test_on_the_torch_path_there_is_nothing_to_decide():
    layer = build_ffn(FFNConfig(kind="sparse", d_ff=8), d_model=4)
    routing = Routing(layer, CPU, torch.float32)
    routing.update()
    assert layer.state is None and not routing.overflowed()
    assert routing.metrics() == {"sparsity/route/layer_00": 0.0}


@pytest.mark.parametrize(("impl", "has_state"), [("auto", False), ("torch", False), ("triton", True)])
def test_the_kernels_run_where_they_were_asked_for(impl, has_state):
    layer = build_ffn(FFNConfig(kind="sparse", d_ff=8, impl=impl), d_model=4)
    Routing(layer, CPU, torch.float32)
    assert (layer.state is not None) == has_state


def test_dense_kinds_have_no_routes():
    assert Routing(build_ffn(FFNConfig(kind="dense_relu", d_ff=8), 4), CPU, torch.float32).metrics() == {}


def test_layers_learn_early_and_ever_more_rarely_when_logging(monkeypatch):
    routing = Routing(build_ffn(FFNConfig(kind="sparse", d_ff=8, impl="triton"), 4), CPU, torch.float32)
    learnt = []
    monkeypatch.setattr(routing, "update", lambda: learnt.append(step))
    for step in range(1, 4001):
        routing.after_step(logging=step % 10 == 0)
    assert learnt[:12] == [1, 2, 4, 8, 10, 16, 20, 30, 32, 40, 50, 60]
    assert [step for step in learnt if 1000 <= step < 1300] == [1024, 1170] and learnt[-2:] == [3650, 3850]


def test_what_dense_layers_learn_makes_no_new_signature():
    layers = nn.ModuleList(build_ffn(FFNConfig(kind="sparse", d_ff=48, impl="triton"), 8) for _ in range(2))
    routing = Routing(layers, CPU, torch.float32)
    forced, free = routing._states
    free.forced = False
    for state in (forced, free):
        state.shape, state.dtype = Shape(16, 8, 48, True, 4), torch.float32

    def after_learning(entries: int):
        for state in (forced, free):
            state.learn([1, 16, entries, 20, 30, 40, 0, 0], torch.full((48,), 8))
        assert not free.runs_sparse()
        return routing.signature()

    before, after = after_learning(700), after_learning(7000)
    assert before[0] != after[0] and before[1] == after[1]


@pytest.mark.slow
def test_training_through_the_kernels_equals_training_through_torch(tmp_path):
    torch_records = train_tiny(tmp_path, "name=torch", "steps=4", *KERNELS, "ffn.impl=torch")
    records = train_tiny(tmp_path, "name=triton", "steps=4", *KERNELS)
    assert losses(records) == pytest.approx(losses(torch_records), rel=1e-4)
    assert all(r["sparsity/route/layer_01"] == 1.0 for r in records if "train/loss" in r)
    assert all(r["sparsity/route/layer_01"] == 0.0 for r in torch_records if "train/loss" in r)


@pytest.mark.slow
def test_a_step_that_overflows_is_repeated_and_counted_and_changes_nothing(tmp_path, monkeypatch, capsys):
    from kernels.state import Decision

    room_for, calls = Decision.room_for, []

    def too_small_once(self, n, h, backward):
        room = room_for(self, n, h, backward)
        calls.append(None)
        return room._replace(entries=64) if len(calls) == 1 else room

    monkeypatch.setattr(Decision, "room_for", too_small_once)
    records = train_tiny(tmp_path, "name=small", "steps=4", *KERNELS)
    assert "a buffer of the sparse kernels was too small" in capsys.readouterr().out
    assert records[-2]["train/repeated_steps"] == 1
    monkeypatch.setattr(Decision, "room_for", room_for)
    assert losses(records) == losses(train_tiny(tmp_path, "name=large", "steps=4", *KERNELS))


def test_what_a_layer_has_learnt_survives_as_plain_data(tmp_path):
    def routing():
        return Routing(build_ffn(FFNConfig(kind="sparse", d_ff=48, impl="triton"), 8), CPU, torch.float32)

    before, after = routing(), routing()
    (state,) = before._states
    state.shape, state.dtype = Shape(16, 8, 48, True, 4), torch.float32
    state.learn([1, 16, 700, 20, 30, 40, 0, 0], torch.arange(48).flip(0))
    before._steps = 5
    torch.save(before.state_dict(), tmp_path / "own.pt")
    after.load_state_dict(torch.load(tmp_path / "own.pt", weights_only=True))
    (loaded,) = after._states
    for backward in (True, False):
        assert torch.equal(loaded.decision.order(backward).order, state.decision.order(backward).order)
        assert loaded.decision.room_for(16, 48, backward) == state.decision.room_for(16, 48, backward)
    assert torch.equal(loaded.fired, state.fired) and loaded.shape == state.shape and after._steps == 5
    after.load_state_dict(None)  # a checkpoint without any
    early = before.state_dict()
    del early["updated"], early["layers"][0]["headroom"]
    after.load_state_dict(early)
    assert after._states[0].room.headroom == state.room.headroom


@pytest.mark.slow
def test_a_resumed_sparse_run_goes_on_as_it_was(tmp_path):
    common = (*KERNELS, "optim.schedule.horizon=6", "checkpoint.interval=3")
    whole = train_tiny(tmp_path, "name=whole", "steps=6", *common)
    train_tiny(tmp_path, "name=parts", "steps=3", *common)
    parts = train_tiny(tmp_path, "name=parts", "steps=6", *common)
    assert losses(parts) == losses(whole)
