"""What a layer learns from step to step, and that no buffer can run over unseen."""

from dataclasses import replace

import pytest
import torch

from kernels.dispatch import HYSTERESIS, Costs
from kernels.ops import sparse_ffn
from kernels.order import TILE
from kernels.room import Needs
from kernels.state import FFNState, overflowed, signature, table, update
from tests.kernels.ffn_cases import Case, assert_accurate, make_case, run


def learn(state: FFNState, case: Case) -> FFNState:
    """One training step of the sparse stages, and the update after it."""
    run(case, impl="triton", state=state)
    update([state])
    return state


def with_room(state: FFNState, buffer: str, room: int) -> FFNState:
    """The state with this much room per 1024 tokens in one buffer."""
    old = state.decision
    rooms = list(old.room)
    rooms[("entries", "segments", "blocks").index(buffer)] = room
    state.decide(replace(old, version=old.version + 1, room=Needs(*rooms), routes={}, rooms={}))
    return state


# Every buffer has some places to spare (by rounding); these need more, at as few entries as possible.
@pytest.mark.parametrize(
    "buffer, n, h, pattern",
    [
        ("entries", 2, 140, "all"),
        pytest.param("segments", 10, 66, "all", marks=pytest.mark.slow),
        ("blocks", 70, 40, "one neuron always"),
    ],
)
def test_overflow_is_seen_and_repeating_the_step_is_exact(buffer, n, h, pattern, device, monkeypatch):
    monkeypatch.setattr("kernels.room.SPARE_TOKENS", 0)
    case = make_case(n, 8, h, pattern, device=device)
    state = with_room(learn(FFNState(h, device), case), buffer, 1)
    run(case, impl="triton", state=state)
    assert overflowed([state])
    update([state])
    assert not overflowed([state])
    output, gradients = run(case, impl="triton", state=state)
    assert not overflowed([state])
    assert_accurate(case, output, gradients)


def test_one_layers_overflow_earns_all_layers_headroom(device, monkeypatch):
    monkeypatch.setattr("kernels.room.SPARE_TOKENS", 0)
    case = make_case(2, 8, 300, "all", device=device)
    narrow, wide = (learn(FFNState(300, device), case) for _ in range(2))
    before = wide.room.headroom
    run(case, impl="triton", state=with_room(narrow, "entries", 1))
    assert overflowed([narrow, wide]) and not overflowed([wide])
    update([narrow, wide])
    assert narrow.room.headroom == wide.room.headroom > before


def test_passes_without_statistics_get_more_room_too(device, monkeypatch):
    monkeypatch.setattr("kernels.room.SPARE_TOKENS", 0)
    case = make_case(2, 8, 300, "all", device=device)
    state = with_room(learn(FFNState(300, device), case), "entries", 1)
    sparse_ffn(*case.tensors, impl="triton", state=state, stats=False)
    assert overflowed([state])
    update([state])
    y = sparse_ffn(*case.tensors, impl="triton", state=state, stats=False).y
    assert not overflowed([state])
    torch.testing.assert_close(y, run(case, impl="torch")[0].y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
def test_learnt_order_and_room_change_no_result(gated, device):
    case = make_case(6, 16, 140, "1 %", gated=gated, device=device, masked=True)
    case.x[:, 1] += 1  # some more entries
    state = learn(FFNState(140, device), case)
    assert not torch.equal(state.decision.train.order.cpu(), torch.arange(140, dtype=torch.int32))
    output, gradients = run(case, impl="triton", state=state)
    assert not overflowed([state])
    assert_accurate(case, output, gradients)


def test_backward_uses_the_decision_of_its_forward(device):
    """Activation checkpointing and pipelines put other passes, and updates, between a forward and its backward."""
    case = make_case(4, 16, 70, "50 %", device=device)
    state = learn(FFNState(70, device), case)
    leaves = [t.detach().requires_grad_() for t in case.tensors]
    output = sparse_ffn(*leaves, impl="triton", state=state)
    state.decide(
        replace(FFNState(70, device).decision, version=state.decision.version + 1, room=Needs(1, 1, 1, 1), rooms={})
    )
    gradients = torch.autograd.grad(output.y, leaves, case.dy)
    expected = torch.autograd.grad(sparse_ffn(*leaves, impl="torch").y, leaves, case.dy)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_counts_add_up_over_passes(device):
    case = make_case(6, 16, 40, "50 %", device=device, masked=True)
    state = FFNState(40, device)
    outputs = [run(case, impl="triton", state=state)[0] for _ in range(2)]
    calls, tokens, entries, *_ = state.seen.numbers.tolist()
    assert (calls, tokens) == (2, 2 * int(case.counted.sum()))
    assert entries == -(-int(outputs[0].nnz.sum()) * 1024 // 6)  # per 1024 tokens, rounded up
    assert torch.equal(state.seen.fired, outputs[0].fired + outputs[1].fired)
    update([state])
    assert not state.seen.numbers.any() and not state.seen.fired.any()


def test_a_route_changes_only_for_a_clear_gain(device, monkeypatch):
    case = make_case(6, 16, 70, "1 %", device=device)
    state = learn(FFNState(70, device), case)
    order = state.decision.train.order
    shift = torch.zeros_like(case.x)
    shift[:, 0] = 0.1  # fires a little differently
    monkeypatch.setattr("kernels.dispatch.sparse_costs", lambda *_: (torch.tensor([1.0]), torch.tensor([1.0])))
    for gain, kept in ((0.5 * HYSTERESIS, True), (2 * HYSTERESIS, False)):
        best = 2 / (1 + gain)
        monkeypatch.setattr("kernels.dispatch.best_n_hot", lambda *_, best=best, **__: (64, Costs(best / 2, best / 2)))
        learn(state, replace(case, x=case.x + shift))
        assert torch.equal(state.decision.train.order, order) == kept
        assert (state.decision.train.n_hot == 64) == (not kept)


def test_a_restored_state_decides_alike(device):
    case = make_case(6, 16, 140, "1 %", device=device)
    state = learn(FFNState(140, device), case)
    restored = FFNState(140, device)
    restored.load_state_dict(state.state_dict())
    assert restored.decision.room == state.decision.room
    assert torch.equal(restored.decision.train.rank_of, state.decision.train.rank_of)
    learn(state, case), learn(restored, case)
    assert restored.decision.room == state.decision.room
    assert torch.equal(restored.fired, state.fired)


def test_table_says_what_was_decided(device):
    case = make_case(6, 16, 140, "1 %", device=device)
    lines = table([FFNState(140, device), learn(FFNState(140, device), case)]).splitlines()
    assert "not measured yet" in lines[1]
    assert str(learn(FFNState(140, device), case).decision.room) in lines[2]


def test_cold_neurons_are_grouped_once_a_sample_was_seen(device):
    """Two groups of neurons that fire on different tokens: by frequency alone they would share tiles."""
    n, h = 8, 130
    case = make_case(n, 8, h, "none", device=device)
    group = torch.arange(h, device=device) % 2
    case.x[:, 2], case.w_gate[:, 2] = torch.arange(n, device=device) % 2 * 2.0 - 1, (group * 2.0 - 1) * 80
    state = learn(FFNState(h, device), case)
    assert state.decision.grouped
    of_second = group[state.decision.train.order.long()][: h // TILE * TILE].view(-1, TILE).sum(1)
    assert all(min(k, TILE - k) <= 1 for k in of_second.tolist())
    order = state.decision.train.order
    assert torch.equal(learn(state, case).decision.train.order, order)


def test_signature_changes_with_what_a_captured_graph_contains(device):
    case = make_case(6, 8, 140, "1 %", device=device)
    state = FFNState(140, device)
    state.forced = True
    before = signature([state])
    run(case, impl="triton", state=state)  # leaves the sample from which co-activation is learnt
    sampled = signature([state])
    update([state])  # the first order and room
    learnt = signature([state])
    assert len({before, sampled, learnt}) == 3
    learn(state, case)
    learn(state, case)
    settled = signature([state])
    assert signature([learn(state, case)]) == settled
    assert signature([with_room(state, "blocks", 1)]) != settled


def test_a_state_of_another_width_is_refused_and_hot_neurons_come_in_whole_blocks(device):
    state = learn(FFNState(140, device), make_case(5, 16, 140, "50 %", device=device))
    with pytest.raises(ValueError, match="layer with 140 neurons, not 150"):
        FFNState(150, device).load_state_dict(state.state_dict())
    restored = FFNState(140, device)
    restored.load_state_dict({**state.state_dict(), "n_hot": (80, 140)})  # as versions before this rule saved it
    assert (restored.decision.train.n_hot, restored.decision.infer.n_hot) == (64, 128)
