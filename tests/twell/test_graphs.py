"""When a micro-step is launched, recorded and replayed; that CUDA does as told is tested in tests/gpu."""

import pytest
import torch

from data.loader import Batch
from tests.training import compose_config
from twell import graphs
from twell.checks import validate
from twell.config import ConfigError
from twell.graphs import AGAIN, WARM_UP, GraphedMicroStep


class FakeRecorder:
    """Notes what is asked; a recording is the work itself."""

    def __init__(self):
        self.log = []

    def run(self, work):
        self.log.append("run")
        work()

    def record(self, work):
        self.log.append("record")
        return lambda: (self.log.append("replay"), work())

    def wait(self):
        self.log.append("wait")


def batches(n: int, documents: bool = False) -> list[Batch]:
    tokens = torch.arange(6).view(2, 3)
    return [Batch(tokens + i, tokens + i + 1, tokens if documents else None) for i in range(n)]


@pytest.mark.parametrize("documents", [False, True])
def test_every_batch_is_used_once_in_order_whether_launched_or_replayed(documents: bool):
    seen, inputs, recorder = [], set(), FakeRecorder()

    def micro_step(batch: Batch) -> None:
        seen.append((batch.tokens.clone(), batch.targets.clone()))
        if len(seen) > WARM_UP:
            inputs.add((batch.tokens.data_ptr(), batch.targets.data_ptr()))
            assert (batch.doc_ids is not None) == documents

    step = GraphedMicroStep(micro_step, lambda: (), recorder)
    given = batches(8, documents)
    for batch in given:
        step(batch)
    assert recorder.log == ["run"] * WARM_UP + ["record"] + ["replay"] * (8 - WARM_UP)
    assert len(inputs) == 1  # a replay reads where the recording did
    for (tokens, targets), batch in zip(seen, given, strict=True):
        assert torch.equal(tokens, batch.tokens) and torch.equal(targets, batch.targets)
    assert torch.equal(given[WARM_UP].tokens, batches(WARM_UP + 1)[WARM_UP].tokens)  # not written into


def test_a_changed_decision_is_launched_and_recorded_anew():
    decisions, recorder, used = iter([0] * 5 + [1] * 5), FakeRecorder(), []
    step = GraphedMicroStep(lambda batch: used.append(None), lambda: next(decisions), recorder)
    for batch in batches(10):
        step(batch)
    first = ["run"] * WARM_UP + ["record", "replay", "replay"]
    then = ["wait"] + ["run"] * AGAIN + ["record"] + ["replay"] * (5 - AGAIN)
    assert recorder.log == [*first, *then] and len(used) == 10


def test_decisions_that_never_settle_are_never_recorded():
    decisions, recorder = iter(range(10)), FakeRecorder()
    step = GraphedMicroStep(lambda batch: None, lambda: next(decisions), recorder)
    for batch in batches(10):
        step(batch)
    assert recorder.log == ["run"] * 10


def test_auto_is_for_small_models_on_one_gpu():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    auto = compose_config()
    assert graphs.wanted(auto, gpu, 1, 124_000_000)
    assert not graphs.wanted(auto, gpu, 1, 1_500_000_000)
    assert not graphs.wanted(auto, gpu, 8, 124_000_000)
    assert not graphs.wanted(auto, cpu, 1, 124_000_000)
    assert graphs.wanted(compose_config("cuda_graph=on"), gpu, 1, 1_500_000_000)
    assert not graphs.wanted(compose_config("cuda_graph=off"), gpu, 1, 124_000_000)


def test_on_is_refused_where_it_cannot_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda_graph=on with no GPU"):
        validate(compose_config("cuda_graph=on"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="cuda_graph=on with WORLD_SIZE=2"):
        validate(compose_config("cuda_graph=on", "ffn=dense_relu"), world_size=2)
