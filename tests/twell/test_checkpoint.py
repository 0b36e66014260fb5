import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twell import checkpoint
from twell.checkpoint import CheckpointError

CPU = torch.device("cpu")


class Net(torch.nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, width))


def save(run, step, value=1.0, best=None):
    meta = {"progress": {"best_step": best}}
    checkpoint.save(run, step, {"model.weight": torch.full((2, 3), value), "optim.step": torch.tensor(value)}, meta)


def test_tensors_come_back_exactly_and_in_place(tmp_path):
    kept = torch.randn(5, 7)
    checkpoint.save(tmp_path, 4, {"a": kept, "b": torch.tensor(3)}, {"note": "x"})
    a, b = torch.zeros(5, 7), torch.tensor(0)
    assert checkpoint.load(tmp_path, 4, {"a": a, "b": b}) == set()
    assert torch.equal(a, kept) and b == 3
    assert checkpoint.read_meta(tmp_path, 4)["note"] == "x"


def test_missing_tensors_are_named_and_left_alone(tmp_path):
    save(tmp_path, 1)
    mine = torch.ones(2)
    assert checkpoint.load(tmp_path, 1, {"model.other": mine}) == {"model.other"}
    assert torch.equal(mine, torch.ones(2))
    with pytest.raises(CheckpointError, match=r"has no model\.other"):
        checkpoint.restore(tmp_path, 1, {"model.other": mine}, 0, CPU)


def test_another_shape_is_another_model(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"model\.weight is \[2, 3\] there and \[2, 4\]"):
        checkpoint.load(tmp_path, 1, {"model.weight": torch.zeros(2, 4)})


def test_a_newer_format_is_refused(tmp_path):
    save(tmp_path, 1)
    meta = checkpoint.folder(tmp_path, 1) / checkpoint.META
    meta.write_text(json.dumps({"format": checkpoint.FORMAT + 1}))
    with pytest.raises(CheckpointError, match="newer"):
        checkpoint.read_meta(tmp_path, 1)


@pytest.mark.parametrize("damage", ["__0_0.distcp", ".metadata", "meta.json"])
def test_a_damaged_checkpoint_names_itself_and_the_one_before(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = checkpoint.folder(tmp_path, 2) / damage
    path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(CheckpointError, match=r"step-00000002: damaged .*; delete it to continue from step 1"):
        checkpoint.read_meta(tmp_path, 2)
        checkpoint.load(tmp_path, 2, {"model.weight": torch.zeros(2, 3)})


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = checkpoint.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"step-00000002: cannot be written \(0\.0 GB needed; 0\.0 GB free"):
        save(tmp_path, 2)
    assert checkpoint.valid_steps(tmp_path) == [1]


def test_a_write_that_fails_is_one_line(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("unexpected pos 704 vs 598\nand a trace")

    monkeypatch.setattr(checkpoint.dcp, "save", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written \(unexpected pos 704 vs 598; .* GB free") as caught:
        save(tmp_path, 2)
    assert "\n" not in str(caught.value)


def test_a_folder_without_meta_is_not_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (checkpoint.folder(tmp_path, 2) / checkpoint.META).unlink()
    assert checkpoint.valid_steps(tmp_path) == [1]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 1, 2.0)
    tensor = torch.zeros(2, 3)
    checkpoint.load(tmp_path, 1, {"model.weight": tensor})
    assert torch.equal(tensor, torch.full((2, 3), 2.0))


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep=2, best_step=1)
    assert checkpoint.valid_steps(tmp_path) == [1, 4, 5]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_load_model_by_name_and_step(tmp_path):
    save(tmp_path, 1, 1.0, best=1)
    save(tmp_path, 2, 2.0, best=1)
    net = Net()
    for which, value in (("latest", 2.0), ("best", 1.0), ("1", 1.0)):
        checkpoint.load_model(tmp_path, net, which)
        assert torch.equal(net.weight.data, torch.full((2, 3), value))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9; there are 1, 2"):
        checkpoint.load_model(tmp_path, net, "9")
    with pytest.raises(CheckpointError, match="latest, best or a step"):
        checkpoint.load_model(tmp_path, net, "newest")
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        checkpoint.load_model(tmp_path / "elsewhere", net)


def test_best_without_any_validation_is_an_error(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="best"):
        checkpoint.load_model(tmp_path, Net(), "best")


def test_random_generators_continue(tmp_path):
    torch.manual_seed(5)
    checkpoint.save(tmp_path, 1, checkpoint.rng_tensors(0, CPU), {})
    expected = torch.rand(4)
    torch.manual_seed(6)
    checkpoint.restore(tmp_path, 1, {}, 0, CPU)
    assert torch.equal(torch.rand(4), expected)


KILLED_SAVE = """
import os, signal, sys, torch
from pathlib import Path
from twell import checkpoint
run = Path(sys.argv[1])
checkpoint.save(run, 1, {"w": torch.ones(3)}, {})
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(*{"tensors": (checkpoint.json, "dump"), "rename": (checkpoint.os, "replace")}[sys.argv[2]], die)
checkpoint.save(run, 2, {"w": torch.zeros(3)}, {})
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["tensors", "rename"])
def test_kill_during_a_save_leaves_the_last_checkpoint(tmp_path, moment):
    root = Path(checkpoint.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED_SAVE, str(tmp_path), moment], env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == -signal.SIGKILL
    assert checkpoint.valid_steps(tmp_path) == [1]
    lines = []
    checkpoint.clean_up(tmp_path, lines.append)
    assert len(lines) == 1 and list((tmp_path / "checkpoints").iterdir()) == [checkpoint.folder(tmp_path, 1)]
    save(tmp_path, 2)
    assert checkpoint.valid_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("damage", ["cut short", "missing", "meta"])
def test_a_torn_checkpoint_is_set_aside_and_told(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = checkpoint.folder(tmp_path, 2)
    data = path / "__0_0.distcp"
    if damage == "cut short":
        data.write_bytes(data.read_bytes()[:100])
    elif damage == "missing":
        data.unlink()
    else:
        (path / checkpoint.META).write_text("{")
    lines = []
    checkpoint.clean_up(tmp_path, lines.append)
    assert checkpoint.valid_steps(tmp_path) == [1]
    assert len(lines) == 1 and lines[0].startswith(f"ignoring {path}: ") and ".torn-step-00000002" in lines[0]
    save(tmp_path, 2)
    checkpoint.clean_up(tmp_path, lines.append)
    assert len(lines) == 1 and checkpoint.valid_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_checkpoint_becomes_one_file(tmp_path, suffix, capsys):
    save(tmp_path, 1, 1.5)
    save(tmp_path, 2, 2.5)
    out = tmp_path / f"sub/model{suffix}"
    checkpoint.main([f"run={tmp_path}", f"out={out}", "checkpoint=1", "dtype=bf16"])
    if suffix == ".pt":
        tensors = torch.load(out)
    else:
        tensors = pytest.importorskip("safetensors.torch").load_file(out)
    assert tensors.keys() == {"weight"} and torch.equal(tensors["weight"], torch.full((2, 3), 1.5).bfloat16())
    assert capsys.readouterr().out.strip() == str(out) and len(list(out.parent.iterdir())) == 1
    for wrong, message in ((["out=x.bin"], "must end in"), ([f"out={out}", "dtype=fp8"], "dtype=fp8")):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.main([f"run={tmp_path}", *wrong])


def test_ranks_that_write_to_other_disks_are_found_out(tmp_path, monkeypatch):
    save(tmp_path, 1)
    dcp_save = checkpoint.dcp.save

    def elsewhere(*args, storage_writer, **kwargs):
        dcp_save(*args, storage_writer=storage_writer, **kwargs)
        (storage_writer.path / "__0_0.distcp").unlink()

    monkeypatch.setattr(checkpoint.dcp, "save", elsewhere)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp not there: `out` must be one disk for all nodes"):
        save(tmp_path, 2)
    assert checkpoint.valid_steps(tmp_path) == [1]
