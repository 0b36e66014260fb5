"""Training from CUDA graphs is training."""

import pytest

from tests.training import losses, train_tiny
from twell.graphs import CudaRecorder

GPU = ("device=cuda", "compile=true", "optim.lr=1e-2", "steps=16", "log.interval=4", "eval.interval=8")


@pytest.mark.parametrize(
    "options",
    [
        ("ffn=dense_silu",),
        ("ffn=dense_relu", "data.mask_documents=true"),
        ("ffn=sparse", "ffn.impl=torch", "recompute=full"),
        ("ffn=sparse",),
        ("ffn=sparse", "ffn.impl=triton"),
        ("ffn=sparse_nongated", "ffn.impl=triton", "recompute=selective"),
    ],
)
def test_replayed_and_launched_steps_agree(tmp_path, monkeypatch, options):
    launched = losses(train_tiny(tmp_path, "name=off", "cuda_graph=off", *options, *GPU))
    record, recordings = CudaRecorder.record, []

    def counted(self, work):
        recordings.append(None)
        return record(self, work)

    monkeypatch.setattr(CudaRecorder, "record", counted)
    replayed = losses(train_tiny(tmp_path, "name=on", "cuda_graph=on", *options, *GPU))
    assert recordings
    assert replayed == pytest.approx(launched, rel=5e-3)
    assert replayed[16] < replayed[4]


def test_a_resumed_run_records_again_and_goes_on(tmp_path):
    common = ("optim.schedule.horizon=16", "cuda_graph=on", "ffn=dense_relu")
    whole = losses(train_tiny(tmp_path, "name=whole", *GPU, *common))
    train_tiny(tmp_path, "name=parts", *GPU, *common, "steps=8")
    parts = losses(train_tiny(tmp_path, "name=parts", *GPU, *common))
    assert parts == pytest.approx(whole, rel=2e-3)


def test_overflow_in_a_replayed_step_repeats_it(tmp_path, monkeypatch):
    from kernels.state import Decision

    room_for, calls = Decision.room_for, []

    def too_small_once(self, n, h, backward):
        calls.append(None)
        room = room_for(self, n, h, backward)
        return room._replace(entries=64) if len(calls) == 1 else room

    common = (*GPU, "dtype=fp32", "ffn.impl=triton")
    expected = losses(train_tiny(tmp_path, "name=launched", "cuda_graph=off", *common))
    monkeypatch.setattr(Decision, "room_for", too_small_once)
    records = train_tiny(tmp_path, "name=replayed", "cuda_graph=on", *common)
    assert max(r.get("train/repeated_steps", 0) for r in records) >= 1
    assert losses(records) == pytest.approx(expected, rel=2e-3)
