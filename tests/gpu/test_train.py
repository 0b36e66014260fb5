"""What the loop promises on a GPU: bf16, compiled, one host read per step, and a resume that goes on."""

import pytest
import torch

import train
from tests.training import losses, train_tiny
from twell.hostread import HostRead

pytestmark = pytest.mark.gpu
GPU = ("device=cuda", "compile=true", "optim.lr=1e-2")


@pytest.mark.parametrize("cuda_graph", ["off", "on"])
@pytest.mark.parametrize("ffn", ["dense_silu", "sparse"])
def test_nothing_but_the_host_read_waits_for_the_device(tmp_path, monkeypatch, ffn, cuda_graph):
    """From the third step on (the first two compile), any other synchronisation raises."""
    steps = []
    start, stop, read = train.StopWatch.start, train.StopWatch.stop, HostRead.read

    def guarded_start(self):
        steps.append(None)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")
        start(self)

    def unguarded_stop(self):
        torch.cuda.set_sync_debug_mode("default")
        stop(self)

    def unguarded_read(self, *args):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        word = read(self, *args)
        torch.cuda.set_sync_debug_mode(before)
        return word

    monkeypatch.setattr(train.StopWatch, "start", guarded_start)
    monkeypatch.setattr(train.StopWatch, "stop", unguarded_stop)
    monkeypatch.setattr(HostRead, "read", unguarded_read)
    try:
        records = train_tiny(tmp_path, "name=a", f"ffn={ffn}", f"cuda_graph={cuda_graph}", "steps=6", *GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 6 and len(losses(records)) == 6


def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path):
    whole = losses(train_tiny(tmp_path, "name=whole", "steps=12", "optim.schedule.horizon=12", *GPU))
    train_tiny(tmp_path, "name=parts", "steps=5", "optim.schedule.horizon=12", *GPU)
    parts = losses(train_tiny(tmp_path, "name=parts", "steps=12", "optim.schedule.horizon=12", *GPU))
    assert parts == pytest.approx(whole, rel=2e-3)
    assert whole[12] < whole[1]


def test_bf16_follows_fp32(tmp_path):
    bf16, fp32 = (
        losses(train_tiny(tmp_path, f"name={dtype}", f"dtype={dtype}", "steps=10", *GPU)) for dtype in ("bf16", "fp32")
    )
    assert bf16 == pytest.approx(fp32, rel=2e-2)


def test_training_through_the_kernels_follows_torch_and_overflow_repeats_the_step(tmp_path, monkeypatch):
    from kernels.state import Decision

    common = (*GPU, "steps=12", "log.interval=2", "dtype=fp32")
    expected = losses(train_tiny(tmp_path, "name=torch", "ffn.impl=torch", *common))
    room_for, calls = Decision.room_for, []

    def too_small_once(self, n, h, backward):
        calls.append(None)
        room = room_for(self, n, h, backward)
        return room._replace(entries=64) if len(calls) == 1 else room

    monkeypatch.setattr(Decision, "room_for", too_small_once)
    records = train_tiny(tmp_path, "name=triton", "ffn.impl=triton", *common)
    assert max(r.get("train/repeated_steps", 0) for r in records) >= 1
    assert losses(records) == pytest.approx(expected, rel=2e-3)
