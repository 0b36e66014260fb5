import json

import pytest

from twell.bench import __main__ as bench
from twell.bench.scale import Options, Row, is_large, report, rows_for
from twell.bench.scale_row import _union


def test_rows_begin_with_few_ranks_and_divide_large_models_only():
    rows = rows_for(Options(), available=4)
    assert [row.ranks for row in rows] == sorted(row.ranks for row in rows)
    assert {row.mode for row in rows if row.model == "1p5b" and row.ranks == 4} == {"ddp", "fsdp"}
    assert {(row.ranks, row.mode) for row in rows if row.model == "8b"} == {(2, "fsdp"), (4, "fsdp"), (4, "hsdp")}
    of_four = [row for row in rows if row.ranks == 4]
    assert of_four[:2] == [Row("links", 4), Row("checkpoint", 4, "1p5b", "sparse", "ddp")]
    assert [row.kind for row in rows].count("checkpoint") == 1
    assert rows_for(Options(models="nano", variants="sparse", checkpoint=False), 1) == [
        Row("train", 1, "nano", "sparse", "ddp")
    ]


@pytest.mark.parametrize("ranks", ["x", "2,", "0"])
def test_ranks_are_numbers(ranks: str, capsys):
    assert bench.main(["scale", f"ranks={ranks}"]) == 2
    assert capsys.readouterr().err == f"error: ranks={ranks}: must be numbers of at least 1 with commas between them\n"


def test_sizes_are_read_off_the_presets_names():
    assert [is_large(name) for name in ("nano", "124m", "0p5b", "2b", "8b")] == [False, False, False, False, True]


def test_time_is_counted_once():
    assert _union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert _union([]) == []


def trained(variant: str, ranks: int, speed: float) -> dict:
    row = {"kind": "train", "ranks": ranks, "model": "nano", "variant": variant, "mode": "ddp"}
    steps = {"weak": {"tokens_per_second": speed}}
    return {"row": row, "steps": steps, "mfu": None, "peak_bytes": None, "communication": None}


def test_the_report_compares_with_one_rank_and_with_dense(capsys):
    results = [trained("dense_silu", 1, 100), trained("sparse", 1, 150), trained("dense_silu", 2, 194)]
    results += [trained("sparse", 2, 291), {"row": results[0]["row"], "error": ["no more memory"]}]
    report(results)
    lines = capsys.readouterr().out.splitlines()
    sparse = next(line for line in lines if line.startswith("nano sparse ddp x2"))
    assert "0.970 of x1" in sparse and "1.500" in sparse
    assert any("FAILED" in line for line in lines) and "no more memory" in "".join(lines)


@pytest.mark.slow
def test_all_rows_run_and_one_that_fails_loses_only_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "scale.json"
    tiny = ["models=nano", "layers=2", "vocab=300", "micro=2", "seq=32", "strong_tokens=512", "seconds=0.2", "nnz=20"]
    command = [
        "scale",
        *tiny,
        "variants=sparse,unheard_of",
        "modes=fsdp",
        "ranks=1,2",
        f"disk={tmp_path}",
        f"out={out}",
    ]
    assert bench.main(command) == 0
    results = {Row(**r["row"]).name: r for r in json.loads(out.read_text())["results"]}
    assert {name for name, r in results.items() if "error" in r} == {
        "train nano unheard_of ddp x1", "train nano unheard_of fsdp x2", "checkpoint nano unheard_of ddp x2",
    }  # fmt: skip
    assert results["links x2"]["links"]["all_reduce"] > 0
    steps = results["train nano sparse fsdp x2"]["steps"]
    assert steps["strong"]["n_micro"] == 4 and steps["one"]["tokens_per_second"] > 0
    assert "FAILED" in capsys.readouterr().out and list(tmp_path.iterdir()) == [out]
