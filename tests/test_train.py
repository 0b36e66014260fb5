"""Whole runs of train.py, tiny: what the loop promises."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import train
from data.loader import IGNORE, Loader
from tests.training import (
    compose_config,
    forward_with_nan,
    losses,
    read_metrics,
    run_main,
    tiny_overrides,
    train_tiny,
    wait_for,
)
from twell import checkpoint
from twell.errors import UserError
from twell.model import Transformer
from twell.run import run_name
from twell.tracking import METRICS

ROOT = Path(train.__file__).parent
# About 100 training sequences, 8 a step: an epoch has 12 steps or so.


def final_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    run = folder / "runs" / name
    step = checkpoint.valid_steps(run)[-1]
    metadata = checkpoint.dcp.FileSystemReader(checkpoint.folder(run, step)).read_metadata().state_dict_metadata
    weights = {key: torch.empty(entry.size) for key, entry in metadata.items() if key.startswith("model.")}
    checkpoint.load(run, step, weights)
    return weights


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def subprocess_command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *tiny_overrides(folder, *overrides)]


def subprocess_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


EVERY_METRIC = ("ffn.l1.layer_weights=[1,2]", "ffn.l1.target_l0=20")


def expected_metrics() -> set[str]:
    """Every documented key, for the two layers of a tiny model."""
    whole = {key for key in METRICS if "{i}" not in key}
    whole |= {key.replace("{i}", f"0{i}") for key in METRICS if "/layer_{i}" in key for i in range(2)}
    return whole | {key.replace("{i}", str(i)) for key in METRICS if "/part_{i}" in key for i in range(8)}


def test_a_run_learns_and_leaves_every_documented_metric(tmp_path):
    records = train_tiny(tmp_path, "name=a", "steps=30", "optim.lr=1e-2", "eval.interval=10", *EVERY_METRIC)
    curve = losses(records)
    assert list(curve) == list(range(1, 31)) and curve[30] < 0.7 * curve[1]
    logged = {key for record in records for key in record}
    assert logged == expected_metrics() | {"time"}
    assert [r["step"] for r in records if "val/loss" in r] == [10, 20, 30]
    run = tmp_path / "runs" / "a"
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "tokenizer",
        "train.log",
    }


@pytest.mark.parametrize("ffn", ["dense_silu", "dense_relu", "sparse_nongated"])
def test_the_other_ffn_kinds_train(tmp_path, ffn):
    records = train_tiny(tmp_path, "name=a", f"ffn={ffn}", "steps=8", "optim.lr=1e-2")
    curve = losses(records)
    assert curve[8] < curve[1]
    assert all(record["perf/executed_flops"] == 1 for record in records if "train/loss" in record)


def test_muon_trains_and_resumes_exactly(tmp_path):
    whole = losses(train_tiny(tmp_path, "name=whole", "optim=muon", "steps=6", "optim.schedule.horizon=6"))
    train_tiny(tmp_path, "name=parts", "optim=muon", "steps=3", "optim.schedule.horizon=6")
    parts = losses(train_tiny(tmp_path, "name=parts", "optim=muon", "steps=6", "optim.schedule.horizon=6"))
    assert parts == whole and whole[6] < whole[1]


def test_bf16_trains_fp32_masters_and_resumes_exactly(tmp_path):
    common = ("dtype=bf16", "optim.schedule.horizon=12", "optim.lr=1e-2")
    whole = losses(train_tiny(tmp_path, "name=whole", "steps=12", *common))
    train_tiny(tmp_path, "name=parts", "steps=5", *common)
    assert losses(train_tiny(tmp_path, "name=parts", "steps=12", *common)) == whole
    weights = final_weights(tmp_path, "whole")
    assert_same_weights(weights, final_weights(tmp_path, "parts"))
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights.values())
    assert whole == pytest.approx(losses(train_tiny(tmp_path, "name=fp32", "steps=12", *common[1:])), rel=1e-2)


def test_resume_is_exact_twice_in_a_row_and_across_an_epoch(tmp_path):
    common = ("optim.schedule.horizon=30", "eval.interval=4", "checkpoint.interval=5")
    records = train_tiny(tmp_path, "name=whole", "steps=30", *common)
    for stop in (7, 9, 30):
        resumed = train_tiny(tmp_path, "name=parts", f"steps={stop}", *common)
    assert losses(resumed) == losses(records) and len(losses(records)) == 30
    assert records[-1]["train/epoch"] > 2 if "train/epoch" in records[-1] else records[-2]["train/epoch"] > 2
    for key in ("sparsity/dead_share", "sparsity/l0_mean", "train/lr", "train/grad_norm"):
        assert [r[key] for r in resumed if key in r] == [r[key] for r in records if key in r]
    assert_same_weights(final_weights(tmp_path, "whole"), final_weights(tmp_path, "parts"))


def test_a_longer_run_does_not_stretch_the_schedule_silently(tmp_path, capsys):
    train_tiny(tmp_path, "name=a", "steps=6")
    capsys.readouterr()
    records = train_tiny(tmp_path, "name=a", "steps=9")
    rates = {r["step"]: r["train/lr"] for r in records if "train/lr" in r}
    assert "the schedule ends at 6 steps" in capsys.readouterr().out
    assert rates[7] == rates[8] == rates[9] == rates[6]


def test_another_unit_on_resume_keeps_the_schedule(tmp_path):
    train_tiny(tmp_path, "name=a", "steps=6", "optim.schedule.warmup=0")
    tokens = ("optim.schedule.unit=tokens", "optim.schedule.warmup=0")
    resumed = train_tiny(tmp_path, "name=a", "steps=8", *tokens)
    whole = train_tiny(tmp_path, "name=b", "steps=8", "optim.schedule.horizon=1536", *tokens)
    rates = [[r["train/lr"] for r in records if "train/lr" in r] for records in (resumed, whole)]
    assert rates[0] == pytest.approx(rates[1])


def test_a_refused_resume_leaves_the_run_as_it_is(tmp_path):
    bpe = ("name=a", "steps=2", "data.tokenizer=bpe", "data.bpe_vocab_size=300")
    train_tiny(tmp_path, *bpe)
    run = tmp_path / "runs" / "a"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "texts" / "new.txt").write_text("something else entirely: quick brown foxes " * 20)
    with pytest.raises(UserError, match=r"cannot continue the data stream|was trained with another"):
        train_tiny(tmp_path, *bpe, "steps=4")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_model_that_diverged_is_still_saved_and_not_sampled(tmp_path, monkeypatch):
    step = torch.optim.AdamW.step

    def diverge(self, *args, **kwargs):
        step(self, *args, **kwargs)
        self.param_groups[0]["params"][0].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", diverge)
    records = train_tiny(tmp_path, "name=a", "steps=1")
    assert records[-1]["val/loss"] is None and "val/sample" not in records[-1]
    assert checkpoint.valid_steps(tmp_path / "runs" / "a") == [1]


def test_a_finished_run_started_again_does_nothing(tmp_path, capsys):
    before = train_tiny(tmp_path, "name=a", "steps=3")
    assert train_tiny(tmp_path, "name=a", "steps=3") == before
    printed = capsys.readouterr().out
    assert "a is complete: step 3, validation loss" in printed and "steps=N trains on" in printed


def test_a_finished_run_says_how_it_is_trained_on(tmp_path, capsys):
    """The printed arguments work as they are, for a name made from overrides, too."""
    overrides = tiny_overrides(tmp_path, "steps=3", "seed=7")
    for _ in range(2):
        run_main(*overrides)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "trains on to step N" in line)
    arguments = shlex.split(line.partition(" trains on")[0].replace("steps=N", "steps=5"))
    run_main(*arguments)
    (run,) = (tmp_path / "runs").iterdir()
    assert "batch.tokens=256" in run.name and list(losses(read_metrics(run))) == [1, 2, 3, 4, 5]


def mask_some_targets(monkeypatch):
    """Make every batch leave out targets, unevenly over its sequences."""
    assemble = Loader._assemble

    def masked(self, step):
        tensors = assemble(self, step)
        picked = tensors["tokens"] % 3 == 0
        picked[1] = True
        return {**tensors, "targets": tensors["targets"].masked_fill(picked, IGNORE)}

    monkeypatch.setattr(Loader, "_assemble", masked)


def test_four_micro_batches_of_one_equal_one_of_four(tmp_path, monkeypatch):
    mask_some_targets(monkeypatch)
    common = ("steps=6", "optim.lr=1e-2", "batch.tokens=128", "ffn.l1.coef=1e-2")
    one, four = (losses(train_tiny(tmp_path, f"name=m{m}", f"batch.micro={m}", *common)) for m in (1, 4))
    for step in one:
        assert one[step] == pytest.approx(four[step], rel=2e-5)
    a, b = final_weights(tmp_path, "m1"), final_weights(tmp_path, "m4")
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=2e-3, atol=2e-4)


def test_a_nan_between_two_log_lines_never_reaches_the_weights(tmp_path, monkeypatch, capsys):
    # two micro-batches a step: call 9 is in step 5, between the log lines of steps 4 and 8
    monkeypatch.setattr(Transformer, "forward", forward_with_nan(at_call=9))
    records = train_tiny(tmp_path, "name=a", "steps=8", "log.interval=4", "eval.interval=4")
    assert "step 5: the loss or the gradient norm is not finite" in capsys.readouterr().out
    by_step = {r["step"]: r for r in records if "train/loss" in r}
    assert by_step[4]["train/skipped_steps"] == 0 and by_step[8]["train/skipped_steps"] == 1
    assert math.isfinite(by_step[8]["train/loss"])
    assert all(torch.isfinite(w).all() for w in final_weights(tmp_path, "a").values())


def test_a_skipped_step_changes_nothing_but_the_position(tmp_path, monkeypatch):
    train_tiny(tmp_path, "name=short", "steps=4", "optim.schedule.horizon=9")
    monkeypatch.setattr(Transformer, "forward", forward_with_nan(at_call=9))
    train_tiny(tmp_path, "name=skipping", "steps=5", "optim.schedule.horizon=9")
    assert_same_weights(final_weights(tmp_path, "short"), final_weights(tmp_path, "skipping"))


def test_a_record_of_skipped_steps_alone_says_nothing_of_sparsity(tmp_path, monkeypatch):
    monkeypatch.setattr(Transformer, "forward", forward_with_nan(at_call=1))
    first, second = train_tiny(tmp_path, "name=a", "steps=2")[:2]
    silent = {"sparsity/dead_share", "sparsity/revived", "sparsity/reinitialized"}
    keys = [key for key in first if key.startswith("sparsity/") and "dead_share" not in key and "route" not in key]
    assert all(first[key] is None and second[key] is not None for key in set(keys) - silent)


def test_too_many_nonfinite_steps_end_the_run(tmp_path):
    with pytest.raises(UserError, match=r"2 steps in a row were not finite"):
        train_tiny(tmp_path, "name=a", "steps=50", "optim.lr=1e30", "optim.clip=0", "max_nonfinite=2")


def test_one_host_read_per_step(tmp_path, monkeypatch):
    """Between two log lines nothing but HostRead turns a tensor into a Python number."""
    reads, allowed = [], []
    item, tolist = torch.Tensor.item, torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (reads.append("item"), item(self))[1])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append("tolist"), tolist(self))[1])
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: (reads.append("bool"), bool(item(self)))[1])
    stop = train.StopWatch.stop
    monkeypatch.setattr(
        train.StopWatch, "stop", lambda self: (allowed.append(len(reads)), reads.clear(), stop(self))[-1]
    )
    start = train.StopWatch.start
    monkeypatch.setattr(train.StopWatch, "start", lambda self: (reads.clear(), start(self))[-1])
    train_tiny(tmp_path, "name=a", "steps=5", "log.interval=100")
    assert allowed == [1] * 5


def test_the_run_folder_does_not_depend_on_hydra_changing_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = [o.replace(f"{tmp_path}/", "") for o in tiny_overrides(tmp_path, "name=a", "steps=2")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *relative],
        cwd=tmp_path,
        env=subprocess_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "datasets", "runs"}
    assert len(losses(read_metrics(tmp_path / "runs" / "a"))) == 2


@pytest.mark.slow
def test_the_offline_wandb_run_holds_every_documented_metric(tmp_path):
    train_tiny(tmp_path, "name=a", *EVERY_METRIC, "steps=3", "wandb.mode=offline", "wandb.tags=[mine]")
    (log,) = (tmp_path / "runs" / "a" / "wandb").glob("offline-run-*/run-*.wandb")
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    records = [json.loads(line) for line in subprocess.check_output(inspect, text=True).splitlines()]
    # Of a histogram or a table, wandb stores the parts, among them its type.
    logged = {key.removesuffix("._type") for r in records if r["type"] == "history" for key in r["history"]["item"]}
    assert expected_metrics() <= logged
    (run,) = (r["run"] for r in records if r["type"] == "run")
    assert {"nano", "sparse", "text", "adamw", "mine"} <= set(run["tags"]) and run["run_group"] == "nano-text"


@pytest.mark.slow
def test_a_sweep_gives_each_job_its_own_run_named_as_it_would_be_alone(tmp_path):
    command = subprocess_command(tmp_path, "steps=2", "ffn.l1.coef=0,1e-3")
    command.insert(2, "--multirun")
    done = subprocess.run(command, cwd=tmp_path, env=subprocess_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = [run for run in (tmp_path / "runs").iterdir() if run.is_dir()]  # Hydra leaves a multirun.yaml beside them
    assert all(len(losses(read_metrics(run))) == 2 for run in runs)
    alone = [tiny_overrides(tmp_path, "steps=2", f"ffn.l1.coef={coef}") for coef in ("0", "1e-3")]
    assert {run.name for run in runs} == {run_name(compose_config(*job), job) for job in alone}


@pytest.mark.slow
def test_a_sweep_with_one_name_is_refused_before_it_trains(tmp_path):
    command = subprocess_command(tmp_path, "name=foo", "steps=2", "ffn.l1.coef=0,1e-3")
    command.insert(2, "--multirun")
    done = subprocess.run(command, cwd=tmp_path, env=subprocess_environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "name=foo in a sweep" in done.stderr
    assert not (tmp_path / "runs" / "foo").exists()


@pytest.mark.slow
def test_compiled_and_eager_agree_and_share_checkpoints(tmp_path):
    eager = losses(train_tiny(tmp_path, "name=eager", "steps=6", "optim.schedule.horizon=6", "compile=false"))
    train_tiny(tmp_path, "name=mixed", "steps=3", "optim.schedule.horizon=6", "compile=true")
    mixed = losses(train_tiny(tmp_path, "name=mixed", "steps=6", "optim.schedule.horizon=6", "compile=false"))
    for step in eager:
        assert mixed[step] == pytest.approx(eager[step], rel=1e-4)


@pytest.mark.slow
def test_profile_writes_a_trace(tmp_path):
    train_tiny(tmp_path, "name=a", "steps=9", "profile=2")
    trace = json.loads((tmp_path / "runs" / "a" / "trace.json").read_text())
    assert any("ProfilerStep" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_cleanly_and_the_run_continues_exactly(tmp_path, number):
    whole = losses(train_tiny(tmp_path, "name=whole", "steps=400", "optim.schedule.horizon=400"))
    command = subprocess_command(tmp_path, "name=stopped", "steps=400", "optim.schedule.horizon=400")
    process = subprocess.Popen(
        command, env=subprocess_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "stopped" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    stopped_at = checkpoint.valid_steps(tmp_path / "runs" / "stopped")[-1]
    assert f"stopped at step {stopped_at} of 400" in out and stopped_at < 400
    resumed = train_tiny(tmp_path, "name=stopped", f"steps={stopped_at + 20}", "optim.schedule.horizon=400")
    expected = {step: loss for step, loss in whole.items() if step <= stopped_at + 20}
    assert losses(resumed) == expected


@pytest.mark.slow
def test_kill_9_loses_only_what_came_after_the_last_checkpoint(tmp_path):
    common = ("steps=400", "optim.schedule.horizon=400", "checkpoint.interval=7")
    whole = losses(train_tiny(tmp_path, "name=whole", *common))
    process = subprocess.Popen(subprocess_command(tmp_path, "name=killed", *common), env=subprocess_environment())
    run = tmp_path / "runs" / "killed"
    wait_for(lambda: len(checkpoint.valid_steps(run)) > 1, process)
    process.kill()
    process.wait()
    last = checkpoint.valid_steps(run)[-1]
    resumed = train_tiny(tmp_path, "name=killed", f"steps={last + 5}", *common[1:])
    assert losses(resumed) == {step: loss for step, loss in whole.items() if step <= last + 5}


def _numbers(value) -> Iterator[float]:
    """All numbers in nested lists and objects, in order."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from _numbers(part)
        elif not isinstance(part, str):
            yield part


@pytest.mark.slow
def test_two_ranks_give_the_losses_of_one(tmp_path):
    common = ("steps=12", "optim.lr=1e-2", "eval.interval=6", "batch.micro=2", "ffn.l1.coef=1e-2")
    one = train_tiny(tmp_path, "name=one", *common)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, *subprocess_command(tmp_path, "name=two", *common)[1:]]
    done = subprocess.run(command, env=subprocess_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = read_metrics(tmp_path / "runs" / "two")
    assert len(one) == len(two)
    for a, b in zip(one, two):
        for key in a.keys() - {"time", "val/sample"}:
            if key.startswith("perf/"):
                continue
            seen, expected = b[key], a[key]
            if isinstance(expected, dict):  # a histogram, or a table: by its numbers
                seen, expected = (list(_numbers(value)) for value in (seen, expected))
            assert seen == pytest.approx(expected, rel=1e-4, abs=1e-6), key
    # and on with one rank from the checkpoint of two
    resumed = losses(train_tiny(tmp_path, "name=two", *common[1:], "steps=14"))
    assert losses(train_tiny(tmp_path, "name=one", *common[1:], "steps=14")) == pytest.approx(resumed, rel=1e-4)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_among_the_ranks_is_refused_once(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, *subprocess_command(tmp_path, "name=a", "steps=2", "batch.tokens=128")[1:]]
    done = subprocess.run(command, env=subprocess_environment(), capture_output=True, text=True)
    assert done.returncode != 0 and not (tmp_path / "runs").exists()
    assert done.stderr.count("batch.tokens=128 is not a multiple of") == 1 and "WORLD_SIZE=2" in done.stderr
