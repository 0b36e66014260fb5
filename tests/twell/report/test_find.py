import re

import pytest

from tests.twell.report.making import found, write_run
from twell.errors import UserError
from twell.report.find import find_runs
from twell.report.runs import load_runs


def test_how_runs_are_named_on_the_command_line(runs, tmp_path, monkeypatch):
    dense, first, second = found(str(runs))  # in the order of their start, not of their names
    assert [run.name for run in (dense, first, second)] == [
        "nano-dense_silu-stdlib",
        "nano-sparse-stdlib-ffn.l1.coef=0.001-optim.lr=0.004",
        "nano-sparse-stdlib-ffn.l1.coef=0.0003-optim.lr=0.004",
    ]  # fmt: skip
    assert found(str(runs / "multirun.yaml")) == [first, second]
    assert found(f"{runs}/nano-sparse-*") == [first, second]
    assert [run.path for run in load_runs([str(second), str(runs)])] == [second, dense, first]  # each once
    monkeypatch.chdir(tmp_path)
    for argument in ("runs/none", "runs/*", str(tmp_path)):
        with pytest.raises(UserError, match=re.escape(argument)):
            load_runs([argument])
    (tmp_path / "multirun.yaml").write_text("a: 1\n")
    with pytest.raises(UserError, match="not a file that Hydra wrote"):
        load_runs(["multirun.yaml"])
    (tmp_path / "multirun.yaml").write_text("hydra: {overrides: {task: [seed=1]}}\n")
    with pytest.raises(UserError, match="none of its 1 runs can be shown; left out, since they have not started"):
        load_runs(["multirun.yaml"])


def test_runs_without_a_record(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="no record yet"):
        load_runs([str(tmp_path / "empty")])
    loaded = load_runs([str(tmp_path / "empty"), str(runs)])
    assert len(loaded) == 3 and any("empty is left out" in remark for remark in loaded[0].remarks)


def test_a_sweep_says_which_of_its_jobs_are_missing(runs):
    _, remarks = find_runs(f"{runs}/multirun.yaml")
    (remark,) = remarks
    assert remark.startswith("left out, since they have not started: nano-sparse-stdlib-ffn.l1.coef=5e-05")
    assert remark in load_runs([f"{runs}/multirun.yaml"])[0].remarks


@pytest.mark.parametrize("refused", ["steps=abc", "model=gone", "name=a/b"])
def test_jobs_that_train_py_refuses_are_said(refused, tmp_path):
    write_run(tmp_path, "seed=5")
    key, _, value = refused.partition("=")
    good = {"steps": "1200", "model": "nano", "name": "null"}[key]
    (tmp_path / "multirun.yaml").write_text(f"hydra: {{overrides: {{task: ['{key}={value},{good}', seed=5]}}}}\n")
    if key == "steps":
        write_run(tmp_path, "seed=5", "steps=1200")
    if key == "name":
        write_run(tmp_path, "name=null", "seed=6")
    folders, (remark,) = find_runs(f"{tmp_path}/multirun.yaml")
    assert len(folders) == 1 and remark.startswith(f"left out, since train.py refuses them: {refused} seed=5 (")


@pytest.mark.parametrize(
    "content",
    ["hydra: {overrides: {task: null}}", "hydra: {overrides: {task: [1, 2]}}", "hydra: {overrides: {task: ['a=[1']}}",
     "hydra: {overrides: {task: ['a=range(x)']}}", "hydra: 3", "3", "", "a: [", "[" * 9999],
)  # fmt: skip
def test_files_that_tell_of_no_sweep(content, tmp_path):
    (tmp_path / "multirun.yaml").write_text(content)
    with pytest.raises(UserError, match=r"multirun.yaml: not a file that Hydra wrote for a sweep \("):
        find_runs(f"{tmp_path}/multirun.yaml")


def test_runs_that_were_moved_aside(tmp_path):
    now, before = write_run(tmp_path, "name=a"), write_run(tmp_path, "name=a.old-1")
    remark = "left out, since resume=never has moved them aside: a.old-1"
    assert find_runs(str(tmp_path)) == ([now], [remark]) == find_runs(f"{tmp_path}/a*")
    assert found(before) == [before] == found(f"{tmp_path}/*.old-1")  # where they are asked for


def test_a_folder_that_only_looks_like_a_run(tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match="neither a run"):
        find_runs(str(tmp_path / "run"))
