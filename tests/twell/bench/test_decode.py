import json

import pytest
import torch

from twell.bench import __main__ as bench
from twell.bench.decode import cut
from twell.greedy_check import Comparison

TINY = ["model=nano", "layers=2", "vocab=300", "seq=64", "micro=2", "prompt=12", "nnz=20", "compile=false"]


def test_compares_all_variants_at_every_batch_size(tmp_path, capsys):
    out = tmp_path / "new" / "decode.json"
    assert bench.main(["decode", *TINY, "rows=1,3", "rounds=2", "seconds=0.1", f"out={out}"]) == 0
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    assert {"date", "device", "torch", "dtype"} <= record["environment"].keys() and record["forced_nnz"] == 20
    assert [result["rows"] for result in record["results"]] == [1, 3]
    for result in record["results"]:
        assert f"batch {result['rows']}: " in printed
        assert 5 < result["firing"]["mean"] <= result["firing"]["union"] < 512
        assert list(result["variants"]) == ["dense_silu", "dense_relu", "sparse"]
        for variant in result["variants"].values():
            assert variant["tokens_per_second"] == pytest.approx(1e3 * result["rows"] / variant["ms"])
            assert variant["ffn_ms"] > 0
            assert variant["joules_per_token"] is None or torch.cuda.is_available()
    assert record["results"][0]["firing"]["mean"] == record["results"][0]["firing"]["union"]


def test_checks_greedy_text(capsys, monkeypatch):
    arguments = ["decode", *TINY, "rows=2", "check=3", "impl=triton"]
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("\nprompt 0: 3 tokens, identical\nprompt 1: 3 tokens, identical\n")
    assert "\nmaking the weights of nano: 2 layers, d_model 128, d_ff 512" in printed
    tie, fault = Comparison(3, True, 12.0, 11.9375), Comparison(3, True, 12.0, 11.0)
    monkeypatch.setattr("twell.bench.decode.compare_greedy", lambda *_: [tie, fault])
    assert bench.main(arguments) == 2
    printed = capsys.readouterr()
    assert "prompt 0: 3 tokens identical, then a tie" in printed.out and "prompt 1: 3 tokens identical" in printed.out
    assert printed.err == "error: check=3: 1 of 2 texts differ by more than a tie\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows=many"], "rows=many: must be numbers"),
        (["rows=0"], "rows=0: must be numbers of at least 1"),
        (["rows=1,-1"], "rows=1,-1: must be numbers of at least 1"),
        (["prompt=0"], "prompt=0: must be at least 1"),
        (["prompt=-3"], "prompt=-3: must be at least 1"),
        (["rounds=0"], "rounds=0: must be at least 1"),
        (["seconds=-1"], "seconds=-1.0: must be at least 0"),
        (["check=-1"], "check=-1: must be at least 1, or 0"),
        (["nnz=0"], "nnz=0.0: must be above 0, and at most 153.6 of 512 neurons"),
        (["nnz=-1"], "nnz=-1.0: must be above 0"),
        (["nnz=100000"], "nnz=100000.0: must be above 0, and at most 153.6"),
        (["model=nope"], "model=nope: there is no such preset, but 0p5b, 124m"),
        (["impl=foo"], "impl=foo: must be one of auto, triton, torch"),
        (["micro=-1"], "micro=-1: must be at least 1, or 0 for the preset's"),
        (["layers=-1"], "layers=-1: must be at least 1, or 0 for the preset's"),
        (["vocab=0"], "vocab=0: must be at least 1"),
        (["spread=-1"], "spread=-1.0: must be at least 0"),
        (["variants=relu_l1"], "variants=relu_l1: without gradients"),
        (["prompt=60"], "prompt=60: leaves no 8 of seq_len=64"),
        (["check=60"], "check=60: with prompt=12 that is more than seq_len=64"),
        (["check=5", "rows=65"], "check=5: rows=65 would run dense here"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys):
    assert bench.main(["decode", *TINY, *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_text_is_used_again_where_it_is_too_short():
    assert cut(torch.arange(6).view(2, 3), 3, 4).tolist() == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
