import errno
import json
import math
import sys
import threading
import types
from pathlib import Path

import pytest

from tests.training import compose_config
from twell import tracking
from twell.tracking import METRICS, Histogram, StopWatch, Table, Tracker

README = Path(tracking.__file__).parent.parent / "README.md"


@pytest.fixture
def start(tmp_path):
    opened = []

    def make(*overrides, step=0, is_main=True, wandb_id=None, swept=()):
        cfg = compose_config("wandb.mode=disabled", *overrides)
        tracker = Tracker(cfg, tmp_path, is_main=is_main, total_steps=10, wandb_id=wandb_id, step=step, swept=swept)
        opened.append(tracker)
        return tracker

    yield make
    for tracker in opened:
        tracker.close()


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_records_are_written_at_once_and_nan_becomes_null(start, tmp_path):
    start().record(1, 100, {"train/loss": math.nan, "train/lr": 0.5, "perf/mfu": None})
    (record,) = records(tmp_path)
    assert (record["step"], record["tokens"], record["train/loss"], record["train/lr"]) == (1, 100, None, 0.5)
    assert record["perf/mfu"] is None


def test_histograms_and_tables_are_objects_in_json_and_in_wandb(start, tmp_path):
    class Recorder:
        def log(self, values):
            logged.append(values)

        def finish(self):
            pass

    logged, tracker = [], start()
    tracker.wandb = Recorder()
    histogram, table = Histogram([3, 1.5], [0, 1, 2]), Table(["token", "n"], [["a", 1]])
    tracker.record(1, 1, {"sparsity/l0_heatmap": histogram, "sparsity/tokens_most": table})
    (record,) = records(tmp_path)
    assert record["sparsity/l0_heatmap"] == {"counts": [3, 1.5], "edges": [0, 1, 2]}
    assert record["sparsity/tokens_most"] == {"columns": ["token", "n"], "rows": [["a", 1]]}
    (values,) = logged
    assert values["sparsity/l0_heatmap"].bins == [0, 1, 2] and values["sparsity/l0_heatmap"].histogram == [3, 1.5]
    assert values["sparsity/tokens_most"].data == [["a", 1]] and "time" not in values


def test_only_documented_metrics_can_be_logged(start):
    tracker = start()
    tracker.record(1, 1, {"sparsity/l0/layer_07": 1.0})
    with pytest.raises(KeyError, match="train/los"):
        tracker.record(1, 1, {"train/los": 1.0})


def test_resuming_drops_later_records_and_a_torn_line(start, tmp_path):
    first = start()
    for step in range(1, 6):
        first.record(step, step, {"train/loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "tok')
    start(step=3).record(4, 4, {"train/loss": 2.0})
    assert [(r["step"], r["train/loss"]) for r in records(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


@pytest.mark.parametrize(
    "line", [b"123", b"[1]", b"null", b'{"step": "x"}', b'{"tokens": 1}', b"\xff\xfe", b"[" * 100_000, b'{"step": 1e9}']
)
def test_resuming_survives_lines_that_are_no_records(start, tmp_path, capsys, line):
    start().record(1, 1, {"train/loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n")
    start(step=3).record(2, 2, {"train/loss": 2.0})
    assert [r["step"] for r in records(tmp_path)] == [1, 2]
    assert "1 of 2 lines are no records and are left out" in capsys.readouterr().out


def test_other_ranks_write_nothing(start, tmp_path, capsys):
    tracker = start(is_main=False)
    tracker.record(1, 1, {"train/loss": 1.0})
    tracker.print("hello")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_console_lines_go_to_the_log_file_too(start, tmp_path, capsys):
    start().print("hello")
    assert capsys.readouterr().out == "hello\n" and (tmp_path / "train.log").read_text() == "hello\n"


def test_without_wandb_training_goes_on_saying_so_once(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    start("wandb.mode=online").record(1, 1, {"train/loss": 1.0})
    assert capsys.readouterr().out.count("not installed") == 1 and len(records(tmp_path)) == 1


def test_auto_mode_without_a_key_is_offline_and_never_prompts(start, tmp_path, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc there
    tracker = start("wandb.mode=auto")
    tracker.record(1, 1, {"train/loss": 1.0})
    tracker.close()
    assert "wandb: offline" in capsys.readouterr().out
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1


@pytest.mark.slow
def test_an_unreachable_server_means_offline(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("twell.wandb_run.WANDB_TIMEOUT", 3)
    tracker = start("wandb.mode=auto")
    tracker.record(1, 1, {"train/loss": 1.0})
    tracker.close()
    printed = capsys.readouterr().out
    assert "wandb: online failed" in printed and "wandb: offline;" in printed
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_online_without_a_key_is_offline_and_asks_nothing(start, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    start("wandb.mode=online").close()
    assert "wandb: offline" in capsys.readouterr().out


def test_losing_wandb_in_the_middle_costs_nothing_else(start, tmp_path, capsys):
    class Lost:
        def log(self, values):
            raise ConnectionResetError

    tracker = start()
    tracker.wandb = Lost()
    for step in (1, 2):
        tracker.record(step, step, {"train/loss": 1.0})
    assert capsys.readouterr().out.count("wandb: lost (ConnectionResetError)") == 1
    assert len(records(tmp_path)) == 2


def test_wandb_that_raises_without_words_is_survived(start, monkeypatch, capsys):
    def fail(**kwargs):
        raise TimeoutError

    monkeypatch.setattr("wandb.init", fail)
    assert start("wandb.mode=offline").wandb is None
    assert "wandb: offline failed: TimeoutError" in capsys.readouterr().out


def test_runs_of_a_sweep_are_tagged_with_its_keys(start):
    tags = start("wandb.mode=offline", "wandb.tags=[mine]", swept=["ffn.l1.coef", "x" * 100]).wandb.tags
    assert {"mine", "sparse", "sweep:ffn.l1.coef", "sweep:" + "x" * 58} <= set(tags)


def test_wandb_id_is_kept_over_a_resume(start):
    assert start("wandb.mode=offline", wandb_id="abc123").wandb_id == "abc123"
    assert start(wandb_id="abc123").wandb_id == "abc123"


def test_stop_watch_counts_only_between_start_and_stop(monkeypatch):
    times = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: next(times))
    watch = StopWatch()
    for _ in range(2):
        watch.start()
        watch.stop()
    assert watch.take() == (3.0, 2) and watch.take() == (0.0, 0)


def test_readme_documents_every_metric_in_the_same_words():
    text = README.read_text()
    assert [key for key, meaning in METRICS.items() if f"| `{key}` | {meaning} |" not in text] == []


def test_a_full_disk_does_not_end_the_run(start, capsys):
    tracker = start()

    def full(_text):
        raise OSError(errno.ENOSPC, "No space left on device")

    tracker._log_file = tracker._metrics_file = types.SimpleNamespace(write=full, close=lambda: None, name="the file")
    tracker.record(1, 10, {"train/loss": 1.0})
    tracker.print("still here")
    tracker.close()
    out = capsys.readouterr().out
    assert "still here" in out and out.count("No space left on device") == 1


def test_a_server_that_does_not_answer_at_the_end_is_left(start, monkeypatch):
    monkeypatch.setattr(tracking, "WANDB_FINISH", 0.1)
    tracker = start()
    answer = threading.Event()
    tracker.wandb = types.SimpleNamespace(finish=answer.wait)
    tracker.close()
    assert not answer.is_set()
    answer.set()
