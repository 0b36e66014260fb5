"""Whole runs on several ranks (gloo): the same numbers as on one, and what happens when things go wrong."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.ranks import kill_ranks, processes_of, run_ranks, start_ranks
from tests.training import losses, read_metrics, train_tiny, wait_for
from twell import checkpoint

pytestmark = pytest.mark.slow

COMMON = (
    "steps=50 optim.lr=1e-2 eval.interval=25 ffn.l1.coef=1e-2 ffn.dead.remedy=reinit ffn.dead.after_tokens=2048 "
    "checkpoint.interval=20"
)
DIVIDED = "parallel=fsdp parallel.shard_gradients=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all runs that are compared lie; beside them the run on one process."""
    folder = tmp_path_factory.mktemp("ranks")
    train_tiny(folder, "name=one", "batch.micro=2", *COMMON.split())
    train_tiny(folder, "name=one-bf16", "batch.micro=2", "dtype=bf16", *COMMON.split())
    return folder


def assert_same_run(folder: Path, name: str, other: str, rel: float) -> None:
    """Losses and norms agree at every step, and nearly what is counted (a neuron may fire here and just not there)."""
    records, expected = (read_metrics(folder / "runs" / n) for n in (name, other))
    assert len(records) == len(expected)
    for record, wanted in zip(records, expected):
        for key in record.keys() & {"train/loss", "val/loss", "train/lr", "train/l1", "train/grad_norm"}:
            scale = 1 if key == "train/loss" or key == "val/loss" else 100
            assert record[key] == pytest.approx(wanted[key], rel=scale * rel), f"{name}: {key} at {record['step']}"
        for key in record.keys() & {"sparsity/l0_mean", "sparsity/dead_share"}:
            assert record[key] == pytest.approx(wanted[key], rel=1e3 * rel, abs=0.02), f"{name}: {key}"
    assert any(r.get("sparsity/reinitialized", 0) > 0 for r in expected)


def test_two_ranks_train_as_one_process_does(folder):
    modes = {"ddp2": "parallel=ddp", "zero2": "parallel=zero1", "fsdp2": "parallel=fsdp", "shares2": DIVIDED}
    jobs = [f"name={name} {mode} batch.micro=2 {COMMON}" for name, mode in modes.items()]
    done = run_ranks(folder, 2, *jobs, f"name=ddp2-bf16 dtype=bf16 batch.micro=2 {COMMON}")
    assert done.returncode == 0, done.stderr
    for name in modes:
        assert_same_run(folder, name, "one", rel=2e-5)
    assert_same_run(folder, "ddp2-bf16", "one-bf16", rel=2e-5)


def test_four_ranks_and_copies_of_shares_do_too(folder):
    modes = {
        "ddp4": "parallel=ddp",
        "copies4": f"{DIVIDED} parallel.shard_size=2",
        "zero4": "parallel=zero1 parallel.shard_size=2",
    }
    done = run_ranks(folder, 4, *(f"name={name} {mode} batch.micro=1 {COMMON}" for name, mode in modes.items()))
    assert done.returncode == 0, done.stderr
    for name in modes:
        assert_same_run(folder, name, "one", rel=2e-5)


def test_a_run_goes_on_with_other_ranks_in_another_mode(folder):
    common = COMMON.replace("steps=50", "steps={}") + " optim.schedule.horizon=50 name=moving batch.micro=1 "
    parts = [(2, 12, "parallel=fsdp"), (1, 21, "parallel=ddp"), (4, 37, "parallel=zero1"), (2, 50, "parallel=ddp")]
    for n_ranks, steps, mode in parts:
        if n_ranks == 1:
            train_tiny(folder, *(common.format(steps) + mode).split())
        else:
            done = run_ranks(folder, n_ranks, common.format(steps) + mode)
            assert done.returncode == 0, done.stderr
    expected = losses(read_metrics(folder / "runs" / "one"))
    assert losses(read_metrics(folder / "runs" / "moving")) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_same_ranks_go_on_exactly(tmp_path, mode):
    common = f"parallel={mode} batch.micro=1 optim.schedule.horizon=16 {COMMON} checkpoint.interval=5"
    done = run_ranks(
        tmp_path, 2, *(f"{common} {part}" for part in ("name=a steps=16", "name=b steps=7", "name=b steps=16"))
    )
    assert done.returncode == 0, done.stderr
    a, b = (losses(read_metrics(tmp_path / "runs" / name)) for name in "ab")
    assert a == b and len(a) == 16


def test_a_nan_on_one_rank_is_seen_by_all(tmp_path):
    # rank 1's 9th forward pass is its first micro-batch of step 3; four in a step
    done = run_ranks(tmp_path, 2, f"name=a nan_at=9 {COMMON} steps=5 batch.micro=1 parallel=fsdp")
    assert done.returncode == 0, done.stderr
    assert "step 3: the loss or the gradient norm is not finite" in done.stdout
    records = [r for r in read_metrics(tmp_path / "runs" / "a") if "train/loss" in r]
    assert [r["train/skipped_steps"] for r in records] == [0, 0, 1, 1, 1] and records[-1]["train/loss"] > 0


# Few lines: nobody reads the pipe that they go to before the end.
LONG = (
    "name=a steps=100000 optim.schedule.horizon=100 batch.micro=1 checkpoint.interval=10 checkpoint.keep=3 "
    "log.interval=50"
)


def steps_saved(folder: Path) -> list[int]:
    return checkpoint.valid_steps(folder / "runs" / "a")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_in_order(tmp_path, number):
    with start_ranks(tmp_path, 2, f"{LONG} parallel=fsdp") as process:
        wait_for(lambda: steps_saved(tmp_path), process)
        os.kill(processes_of(tmp_path)[1], number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"stopped at step {steps_saved(tmp_path)[-1]} of 100000" in out


def test_a_killed_rank_ends_the_others_and_torchrun_starts_all_again(tmp_path):
    with start_ranks(tmp_path, 2, f"{LONG} stop_timeout=20", launcher=("--max-restarts=1",)) as process:
        wait_for(lambda: steps_saved(tmp_path), process)
        before = processes_of(tmp_path)
        os.kill(before[1], signal.SIGKILL)
        wait_for(lambda: not set(before) & set(processes_of(tmp_path)), process)
        saved = steps_saved(tmp_path)[-1]
        wait_for(lambda: steps_saved(tmp_path)[-1] > saved, process)
        os.kill(processes_of(tmp_path)[0], signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "another rank is gone or does not answer" in err and "resuming from step" in out


def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path):
    with start_ranks(tmp_path, 2, f"{LONG} parallel.timeout=10") as process:
        wait_for(lambda: steps_saved(tmp_path), process)
        stuck = processes_of(tmp_path)[1]
        os.kill(stuck, signal.SIGSTOP)
        wait_for(lambda: stuck not in processes_of(tmp_path) or process.poll() is not None, process)
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and "other ranks are gone or stuck" in err
    assert "10 s without progress (parallel.timeout)" in err and "Furthest behind: rank" in err


def test_kills_at_any_moment_leave_a_checkpoint_to_go_on_from(tmp_path):
    """Ten times: kill all ranks at a random moment, many of them within a save, and start again."""
    moments = random.Random(0)
    saved, job = 0, f"{LONG} checkpoint.interval=2 checkpoint.keep=2"
    for _ in range(10):
        with start_ranks(tmp_path, 2, job) as process:
            wait_for(lambda saved=saved: steps_saved(tmp_path)[-1:] > [saved], process)
            time.sleep(moments.uniform(0, 0.5))
            kill_ranks(tmp_path)
            process.communicate(timeout=60)
        assert steps_saved(tmp_path)[-1] > saved
        saved = steps_saved(tmp_path)[-1]
    done = run_ranks(tmp_path, 2, f"{job} steps={saved + 3}")
    assert done.returncode == 0 and f"resuming from step {saved}" in done.stdout, done.stderr


@pytest.fixture
def small_disk(tmp_path):
    """For the runs, a disk of 17 MiB, on which three checkpoints are all that leave as much as is kept for logs."""
    disk = tmp_path / "runs"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=17m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path, small_disk):
    job = f"name=a batch.micro=1 {COMMON} steps=25 checkpoint.interval=5 checkpoint.keep=9"
    done = run_ranks(tmp_path, 2, job)
    run = small_disk / "a"
    last = checkpoint.valid_steps(run)[-1]
    assert "NOT saved" in done.stdout and "training goes on" in done.stdout, done.stdout + done.stderr
    assert len(losses(read_metrics(run))) == 25  # up to the end, whose own checkpoint could not be written
    assert done.returncode != 0 and "cannot be written" in done.stderr
    for path in sorted((run / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(path)
    done = run_ranks(tmp_path, 2, job)
    assert done.returncode == 0 and f"resuming from step {last}" in done.stdout, done.stderr
