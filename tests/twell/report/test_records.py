import json

import numpy as np
import pytest

from tests.twell.report.making import append, write_run
from twell.report.figures import LIGHT
from twell.report.page import page
from twell.report.plots import PLOTS
from twell.report.records import listed
from twell.report.runs import load_runs, read_run


def test_a_broken_line_is_skipped_and_said(tmp_path):
    path = write_run(tmp_path, "name=broken")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[1:1] = ["\x00\x00", "[1, 2]", '{"step": 5}', '{"step": "5", "tokens": 1}', ""]
    (path / "metrics.jsonl").write_text("\n".join(lines))  # the last line is whole, if without an end
    run = read_run(path)
    assert [row["step"] for row in run.rows] == [10, 20, 30, 40, 50, 60]
    assert run.remarks == ["broken: lines of metrics.jsonl that are no records are skipped: 2, 3, 4, 5"]
    assert "are skipped: 2, 3, 4, 5</li>" in page([run], [])


@pytest.mark.parametrize(
    "content", [None, "a: [1\n", "- 1\n", "steps: ${nowhere}\n", "", "3\n", "a\n", "a: 1", "[" * 9999]
)
def test_metrics_alone_are_enough(content, tmp_path):
    path = write_run(tmp_path, "name=bare")
    (path / "config.yaml").unlink()
    if content is not None:
        (path / "config.yaml").write_text(content)
    run = load_runs([str(path)])[0]
    assert len(run.remarks) == 1 and "config.yaml" in run.remarks[0]
    assert run.d_ff == pytest.approx(512) and run.steps is None and run.label == "bare"
    assert "<small>0.65%</small>" in page([run], [])  # active neurons, 10/3 of 512


def test_records_may_lack_metrics(tmp_path):
    path = tmp_path / "sparse"
    path.mkdir()
    records = [
        {"step": 1, "tokens": 10, "train/loss": None, "sparsity/l0/layer_01": 3.0},
        {"step": 2, "tokens": 20, "train/loss": 2.0, "val/sample": "text", "sparsity/l0/layer_00": None},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run = load_runs([str(path)])[0]
    assert run.last("train/loss") == 2.0 and run.last("val/sample") is None and run.median("perf/step_ms") is None
    tokens, l0 = run.table("sparsity/l0/layer_")
    np.testing.assert_array_equal(tokens, [10])
    np.testing.assert_array_equal(l0, [[np.nan], [3.0]])
    figures = {plot.name: plot.draw([run], LIGHT) for plot in PLOTS}
    assert figures["loss-tokens"] is not None and figures["loss-time"] is None


HUGE = int("9" * 400)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("val/loss", "abc"),
        ("val/loss", -1.0),
        ("train/loss", True),
        ("train/loss", HUGE),
        ("time", [1]),
        ("sparsity/l0_mean", float("inf")),
        ("sparsity/l0/layer_999999999", 3.0),
        (f"sparsity/l0_part/part_{HUGE}", 3.0),
        ("sparsity/tokens_most", 3),
        ("sparsity/tokens_most", {"rows": 3}),
        ("sparsity/tokens_most", {"rows": [["a", 1.0, 2], ["b", 1.0]]}),
        ("sparsity/tokens_fewest", {"rows": [["a", "1", 2]]}),
    ],
)
def test_a_value_that_does_not_fit_is_left_out_and_said(key, value, tmp_path):
    path = write_run(tmp_path, "name=odd")
    append(path, {"step": 60, "tokens": 122880, key: value, "perf/memory_gb": 0.75})
    append(path, {"step": 70, "tokens": 1, key: value})
    run = load_runs([str(path)])[0]
    (remark,) = run.remarks
    assert remark.startswith(f"odd: values of metrics.jsonl that do not fit their names are left out: {key[:50]}")
    assert run.last("perf/memory_gb") == 0.75 and len(remark) < 200
    assert run.last("val/loss") == pytest.approx(3 + 1 / 6)  # of the records before
    assert run.table("sparsity/l0/layer_")[1].shape[0] == 3 and len(run.last_rows("sparsity/tokens_most")) <= 1
    for plot in PLOTS:
        plot.draw([run], LIGHT)
    assert "<h1>odd</h1>" in page([run], [])


@pytest.mark.parametrize(
    "line",
    [b"123", b"null", b"[" * 100_000, b"\xff\xfe", b"9" * 5000, b'{"step": 1, "tokens": %d}' % HUGE,
     b'{"step": true, "tokens": 1}', b'{"step": -1, "tokens": 1}', b'{"step": 1.5, "tokens": 1}'],
)  # fmt: skip
def test_lines_that_are_no_records(line, tmp_path):
    path = write_run(tmp_path, "name=odd")
    append(path, line, line, {"step": 70, "tokens": 143360})
    run = load_runs([str(path)])[0]
    assert run.step == 70 and run.remarks == ["odd: lines of metrics.jsonl that are no records are skipped: 10, 11"]


@pytest.mark.parametrize("value", ["abc", "-1", "0", "[1]", "{a: 1}", "9" * 400, ".nan"])
def test_settings_that_cannot_be_are_left_out_and_said(value, tmp_path):
    path = write_run(tmp_path, "name=odd")
    config = f"batch: {{tokens: {value}}}\nsteps: {value}\ntokens: {value}\n"
    config += f"ffn: {{kind: {value}, d_ff: {value}, l1: {{target_l0: {value}}}}}\nmodel: {value}\n"
    (path / "config.yaml").write_text(config)
    run = load_runs([str(path)])[0]
    assert run.steps is None and run.d_ff == pytest.approx(512)
    if value != "{a: 1}":  # which is read as settings of another name
        (remark,) = run.remarks
        assert remark.startswith(
            "odd: settings of config.yaml that cannot be are left out: batch.tokens, tokens, steps"
        )
    for plot in PLOTS:
        plot.draw([run], LIGHT)
    assert "<h1>odd</h1>" in page([run], [])


def test_a_remark_names_a_few_things_in_short():
    assert listed(range(7)) == "0, 1, 2, 3, 4 and 2 more"
    assert listed(["a\x00\n" + 100 * "x"]) == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}" + 77 * "x" + "…"
