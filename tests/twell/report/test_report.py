import json
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.text import Text

import twell.report
from tests.twell.report.making import append, found, write_run
from twell.errors import UserError
from twell.report import __main__ as report
from twell.report.figures import DARK, LIGHT, spread, to_svg
from twell.report.page import page
from twell.report.plots import PLOTS
from twell.report.runs import differing_keys, load_runs, reference_run


@pytest.fixture(scope="module")
def written(runs):
    """The folder of a report on those runs."""
    report.main([str(runs), f"out={runs}/new/report"])
    return runs / "new" / "report"


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def test_a_report_of_a_sweep(written):
    text = (written / "index.html").read_text()
    shown = [plot for plot in PLOTS if plot.name != "l1"]  # no run changes its coefficient
    assert all(f"<h2>{plot.title}</h2>" in text for plot in shown)
    names = {f"{plot.name}{dark}.png" for plot in shown for dark in ("", "-dark")}
    assert {path.name for path in written.glob("*.png")} == names
    assert all((written / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert '<span class="differs">0.001</span>' in text and "<td>dense_silu</td>" in text
    assert "not reached" not in text and text.count("-3.2%") == 1  # 3.0667 against 3.1667


def test_the_page_stands_alone_and_follows_the_color_scheme(written):
    text = (written / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text) and "<script" not in text
    ids = re.findall(r'\sid="([^"]*)"', text)
    assert len(ids) == len(set(ids)) and set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)
    assert len(svgs(text)) == 9
    style, body = text.split("</style>", 1)
    for theme in (LIGHT, DARK):
        assert all(colour in style and colour not in body for colour in (theme.ink, *theme.series))
    assert "prefers-color-scheme: dark" in style and "var(--series-0)" in body and "var(--ink)" in body


def test_a_report_of_one_run(runs):
    run = found(str(runs))[1]
    loaded = load_runs([str(run)])
    text = page(loaded, [])
    assert f"<h1>{run.name}</h1>" in text and "Settings that differ" not in text and "to same loss" not in text
    figures = {plot.name: plot.draw(loaded, LIGHT) for plot in PLOTS}
    assert figures["pareto"] is None and not figures["loss-tokens"].axes[0].texts  # nothing to tell apart


def test_a_run_that_is_still_being_written(tmp_path, capsys):
    path = write_run(tmp_path, "name=young", records=1)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "tokens": 409')
    report.main([str(path), f"out={tmp_path}/report"])
    assert "still being written" in capsys.readouterr().out
    text = (tmp_path / "report" / "index.html").read_text()
    assert "still being written" in text and "10 <small>of 1,200</small>" in text and "Loss over tokens" in text


def test_no_active_neuron_at_all(tmp_path):
    path = tmp_path / "dead"
    path.mkdir()
    records = [{"step": i, "tokens": i, "sparsity/l0_mean": 0.0, "sparsity/l0/layer_00": 0.0} for i in (1, 2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run = load_runs([str(path)])
    for plot in PLOTS:
        figure = plot.draw(run, DARK)
        assert (figure is not None) == (plot.name in ("l0-tokens", "l0-layers", "heatmap"))
        if figure is not None:
            assert len(svgs(to_svg(figure, plot.name))) == 1


def test_labels_stay_beside_the_axes(runs, tmp_path):
    """Whatever a run ends with: nothing active in its last layer, or nothing known of it."""
    records = {"none": {"sparsity/l0/layer_02": 0.0}, "unknown": {"sparsity/l0/layer_02": None}}
    for name, record in records.items():
        (tmp_path / name).mkdir()
        line = {"step": 1, "tokens": 9, "sparsity/l0/layer_00": 3.0, **record}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    loaded = load_runs([str(tmp_path), *map(str, found(str(runs))[1:])])
    axes = next(plot for plot in PLOTS if plot.name == "l0-layers").draw(loaded, LIGHT).axes[0]
    assert len(axes.texts) == 4
    for label in axes.texts:
        assert all(0 <= place <= 1 for place in label.xy) and 0 <= label.get_position()[1] <= 1


def test_labels_say_what_sets_runs_apart(tmp_path):
    paths = [write_run(tmp_path, *o) for o in (["seed=1"], ["seed=2"], ["seed=2", "optim=muon"], ["name=mine"])]
    long = write_run(tmp_path, "seed=3", *(f"optim.betas=[0.9,0.{i}5]" for i in [9]), "name=" + 40 * "x" + "-end")
    labels = [run.label for run in load_runs([str(path) for path in [*paths, long]])]
    assert labels[:4] == ["adamw seed 1", "adamw seed 2", "muon", "mine"]
    assert len(labels[4]) == 36 and labels[4].endswith("x-end")
    twins = [write_run(tmp_path / folder, "name=twin") for folder in ("a", "b")]
    assert [run.label for run in load_runs([str(twin) for twin in twins])] == ["a/twin", "b/twin"]


def test_labels_of_long_automatic_names(tmp_path):
    """A hash tells nobody anything."""
    overrides = [f"data.field={letter * 60}" for letter in "xy"]
    paths = [write_run(tmp_path / folder, "optim.eps=1e-8", overrides[0], "model.n_layers=2") for folder in "ab"]
    assert len(paths[0].name) > 100
    assert load_runs([str(paths[0])])[0].label == "nano sparse stdlib adamw"
    labels = [run.label for run in load_runs([str(path) for path in paths])]
    assert [label[:16] for label in labels] == ["a/nano-sparse-st", "b/nano-sparse-st"]
    assert not any(label[-8:] in path.name[-8:] for label, path in zip(labels, paths))


def test_names_are_no_formulas(tmp_path):
    """matplotlib would take what two dollars enclose as one, and refuse it."""
    paths = [write_run(tmp_path, f"name='{name}'") for name in ("$a_{$", "$x^$ y")]
    loaded = load_runs([str(path) for path in paths])
    for plot in PLOTS:
        figure = plot.draw(loaded, LIGHT)
        assert figure is None or "$a_{$" in to_svg(figure, plot.name)


def test_a_name_that_no_font_and_no_encoding_knows(tmp_path):
    path = write_run(tmp_path, "name=x").rename(tmp_path / "a\n\x01\udcff")
    report.main([str(path), f"out={tmp_path}/report"])
    assert "<h1>a\N{REPLACEMENT CHARACTER}" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_differences_and_reference(runs):
    loaded = load_runs([str(runs)])
    assert differing_keys(loaded) == ["ffn.kind", "ffn.l1.coef"]
    assert reference_run(loaded[::-1]) is loaded[0]  # the dense one
    assert reference_run(loaded[1:]) is loaded[1]


def test_dense_relu_is_the_first_choice_of_a_reference(tmp_path):
    kinds = ["sparse", "dense_silu", "dense_relu"]
    runs = load_runs([str(write_run(tmp_path, f"ffn={kind}", f"name={kind}")) for kind in kinds])
    assert [reference_run(runs[:n]).label for n in (1, 2, 3)] == kinds
    assert "Small numbers beside validation loss and tokens/s compare with dense_relu." in page(runs, [])


def test_time_is_interpolated(runs):
    run = load_runs([str(runs)])[0]  # validation losses 3.5, 3.25, 3.1667 after 40, 80, 120 seconds
    seconds, losses = run.series("val/loss", "perf/train_seconds")
    np.testing.assert_allclose(seconds, [40, 80, 120])
    np.testing.assert_allclose(losses, [3.5, 3.25, 3 + 1 / 6])
    assert run.seconds_to_loss(3.3) == pytest.approx(72)
    assert run.seconds_to_loss(4.0) == 40 and run.seconds_to_loss(3.0) is None
    assert run.median("perf/tokens_per_second") == 1004  # without the first


def test_profiles_are_means_of_the_end(tmp_path):
    run = load_runs([str(write_run(tmp_path, "name=long", records=20))])[0]
    np.testing.assert_allclose(run.recent("sparsity/l0_part/part_"), [4, 22.5])  # of records 19 and 20
    assert not len(run.recent("sparsity/none/part_"))


def test_tokens_routes_and_flops(tmp_path):
    path = write_run(tmp_path, "name=full")
    table = {"columns": ["token", "active neurons", "times seen"], "rows": [[" <a>\n", 99.5, 1200]] * 11}
    record = {"step": 60, "tokens": 122880, "sparsity/tokens_most": table, "sparsity/tokens_fewest": {"rows": []}}
    record |= {"perf/executed_flops": 0.625, "sparsity/route/layer_00": 0, "sparsity/route/layer_01": 1}
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record))
    runs = load_runs([str(path)])
    text = page(runs, [])
    row = "<td><code>␣&lt;a&gt;\\n</code></td><td>99.5</td><td>1,200</td>"
    assert text.count(row) == 10 and "<td>62%</td>" in text and "<details open>" in text
    heatmap = next(plot for plot in PLOTS if plot.name == "heatmap").draw(runs, LIGHT)
    assert [line.get_ydata().tolist() for line in heatmap.axes[0].lines][1] == [1]


def test_targets_and_coefficients_are_drawn(tmp_path):
    path = write_run(tmp_path, "ffn.l1.target_l0=5", "ffn.l1.coef=1e-3")
    lines = (path / "metrics.jsonl").read_text().replace('"train/l1_coef": 0.001', '"train/l1_coef": 0.002', 1)
    (path / "metrics.jsonl").write_text(lines)
    run = load_runs([str(path)])
    plots = {plot.name: plot.draw(run, LIGHT) for plot in PLOTS}
    assert plots["l1"].axes[0].lines[0].get_ydata()[0] == 0.002
    assert [line.get_ydata()[0] for line in plots["l0-tokens"].axes[0].lines][1:] == [5]
    assert plots["pareto"] is None


def test_labels_move_apart():
    np.testing.assert_allclose(spread([0.5, 0.5, 0.1], 0.1), [0.45, 0.55, 0.1])
    np.testing.assert_allclose(spread([0.99, 1.0], 0.1), [0.9, 1.0])
    moved = spread([0.2, 0.21, 0.33, 0.0, 0.9], 0.1)
    assert np.diff(np.sort(moved)).min() >= 0.1 - 1e-9 and np.argsort(moved).tolist() == [3, 0, 1, 2, 4]


def test_labels_of_close_points_do_not_meet(tmp_path):
    """Nor leave the axes: five runs that end alike, one far away, and a dense one, whose label is beside the axes."""
    runs = load_runs([str(write_run(tmp_path, "name=dense", "ffn=dense_silu", loss=3.2))])
    for i in range(6):
        path = write_run(tmp_path, f"name=some-long-name-{i}", loss=3.1 + 1e-3 * i)
        append(path, {"step": 60, "tokens": 122880, "sparsity/l0_mean": 10 + 0.02 * i if i else 90})
        runs += load_runs([str(path)])
    figure = next(plot for plot in PLOTS if plot.name == "pareto").draw(runs, LIGHT)
    figure.draw_without_rendering()  # puts the labels where they belong
    (axes,) = figure.axes
    boxes = [Text.get_window_extent(text).padded(-1) for text in axes.texts]  # without the lines to the points
    assert len(boxes) == 7
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert i == 0 or (axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1 and axes.bbox.x0 < box.x0)


def test_mistakes_are_told(runs, tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="at least one run"):
        report.main(["out=x"])
    with pytest.raises(UserError, match="out=: name a folder"):
        report.main([str(runs), "out="])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out=.*file: cannot be written"):
        report.main([str(runs), f"out={tmp_path}/file"])
    report.main(["--help"])
    assert "python -m twell.report" in capsys.readouterr().out
    for name in ("figures", "plots", "page"):
        monkeypatch.delitem(sys.modules, f"twell.report.{name}")
        monkeypatch.delattr(twell.report, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[report\]'"):
        report.write_report(load_runs([str(runs)]), tmp_path)
