import threading

import pytest
import torch

from twell import checkpoint, saver
from twell.checkpoint import CheckpointError
from twell.parallel import Ranks
from twell.saver import Saver, share_of

ONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def tensors():
    return {"model.a": torch.arange(6.0).view(2, 3), "model.b": torch.full((), 7), "sparsity.c": torch.ones(5).bool()}


def make(run, tensors, lines, background=True):
    return Saver(run, tensors, ONE, background=background, log=lines.append)


def save(writer, step, **options):
    writer.save(step, {"note": step}, {"mine": torch.ones(2)}, **{"keep": 2, "best": None, "wait": False, **options})


@pytest.mark.parametrize("background", [True, False])
def test_what_is_saved_is_what_was_there_when_asked(tmp_path, tensors, background):
    lines = []
    writer = make(tmp_path, tensors, lines, background)
    save(writer, 3)
    writer.before_update()
    expected = tensors["model.a"].clone()
    tensors["model.a"].zero_()
    writer.finish(wait=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint.restore(tmp_path, 3, loaded, 0, ONE.device)
    assert torch.equal(loaded["model.a"], expected) and loaded["model.b"] == 7 and loaded["sparsity.c"].all()
    assert checkpoint.read_meta(tmp_path, 3)["note"] == 3
    assert torch.equal(checkpoint.load_own(tmp_path, 3, rank=0)["mine"], torch.ones(2))
    assert torch.equal(checkpoint.load_own(tmp_path, 3, rank=5)["mine"], torch.ones(2))  # which was not there
    assert lines == [f"saved {checkpoint.folder(tmp_path, 3)}"]


def test_training_goes_on_while_it_writes(tmp_path, tensors, monkeypatch):
    go, lines, dcp_save = threading.Event(), [], checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *args, **kwargs: (go.wait(10), dcp_save(*args, **kwargs)))
    writer = make(tmp_path, tensors, lines)
    save(writer, 1)
    for _ in range(3):
        writer.before_update()
    assert lines == [] and checkpoint.valid_steps(tmp_path) == []
    go.set()
    writer.finish(wait=True)
    assert len(lines) == 1 and checkpoint.valid_steps(tmp_path) == [1]


def test_old_ones_go_only_when_the_new_one_is_there(tmp_path, tensors, monkeypatch):
    lines = []
    writer = make(tmp_path, tensors, lines)
    for step in (1, 2, 3):
        save(writer, step, keep=1, best=1, wait=True)
    assert checkpoint.valid_steps(tmp_path) == [1, 3]

    def fail(*args, **kwargs):
        raise OSError("the disk is gone")

    monkeypatch.setattr(checkpoint.dcp, "save", fail)
    save(writer, 4, keep=1, best=1)
    writer._thread.join()
    writer.before_update()
    assert checkpoint.valid_steps(tmp_path) == [1, 3]
    assert "NOT saved" in lines[-1] and "the disk is gone" in lines[-1] and "training goes on" in lines[-1]
    with pytest.raises(CheckpointError, match="the disk is gone"):  # the last one of a run must not fail silently
        save(writer, 5, wait=True)


def test_without_memory_for_a_copy_every_save_is_waited_for(tmp_path, tensors, monkeypatch):
    monkeypatch.setattr(saver, "available_memory", lambda: 10)
    lines = []
    writer = make(tmp_path, tensors, lines)
    save(writer, 1)
    assert "every save will be waited for" in lines[0] and checkpoint.valid_steps(tmp_path) == [1]


def test_ranks_divide_what_they_hold_alike():
    sizes = [100, 1, 50, 49, 2, 30, 70]
    tensors = {f"t{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    shares = [share_of(tensors, Ranks(rank, 3, ONE.device)) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    assert max(sum(t.numel() for t in share.values()) for share in shares) <= 110
