import itertools
import json

import numpy as np
import pytest
import torch

from twell.bench import __main__ as bench
from twell.bench.cases import Bar, mask_cases, quick_cases, standard_cases, token_cases
from twell.bench.ffn import Dense
from twell.bench.kernels import Bench, measure_case, profile_case
from twell.bench.measure import Ceilings
from twell.bench.report import print_ceilings, print_stages
from twell.bench.stages import Work, stage_costs, work_of


@pytest.fixture
def masks(tmp_path):
    """A file like those that record real firing: packed bits of two layers, and the token ids."""
    fires = np.random.default_rng(0).random((2, 128, 64)) < 0.1
    path = tmp_path / "recorded.npz"
    np.savez(path, l10=np.packbits(fires[0], axis=1), l2=np.packbits(fires[1], axis=1), tok=np.arange(128))
    return path


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_quick(compile, masks, tmp_path, capsys):
    out = tmp_path / "new" / "results.json"
    arguments = ["kernels", "quick=true", f"compile={compile}", f"masks={masks}", "mask_d=48", f"out={out}"]
    assert bench.main(arguments) == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert {"date", "device", "torch", "triton", "dtype"} <= record["environment"].keys()
    names = [result["case"] for result in record["results"]]
    assert names[-2:] == ["masks 48x64 recorded l2", "masks 48x64 recorded l10"]
    assert all(f"  {name}" in printed for name in names)
    assert "musts missed" in printed
    for result in record["results"]:
        assert result["nnz"]["mean"] <= result["nnz"]["p99"] <= result["nnz"]["max"]
        assert result["step"]["ratio"] > 0
        assert result["step"]["dense"].startswith("relu_l1")
        assert ("relu compiled" in result["forward"]["times"]) == compile
        assert result["errors"]["sparse"].keys() == result["errors"]["dense"].keys()
        assert all(error < 1e-5 for error in result["errors"]["sparse"].values())
        assert ("dw_gate" in result["errors"]["sparse"]) == result["gated"]
        assert result.get("mask_mismatches", 0) == 0


def test_only_selects_cases(tmp_path, capsys):
    out = tmp_path / "results.json"
    bench.main(["kernels", "quick=true", "compile=false", "only=non-gated", f"out={out}"])
    (result,) = json.loads(out.read_text())["results"]
    assert not result["gated"]
    with pytest.raises(SystemExit, match="only='no such' selects no case"):
        bench.main(["kernels", "quick=true", "only=no such"])


def test_a_failing_case_loses_no_other(tmp_path, capsys, monkeypatch):
    def fail(bench, rounds):
        if not bench.case.gated:
            raise RuntimeError("out of memory")
        return measure_case(bench, rounds)

    monkeypatch.setattr("twell.bench.kernels.measure_case", fail)
    out = tmp_path / "results.json"
    bench.main(["kernels", "quick=true", "compile=false", f"out={out}"])
    printed = capsys.readouterr()
    assert "uniform 40x100 non-gated nnz 5 n 255: RuntimeError" in printed.out
    assert "out of memory" in printed.err
    assert len(json.loads(out.read_text())["results"]) == 3


def test_a_time_limit_is_kept(tmp_path, capsys):
    out = tmp_path / "results.json"
    bench.main(["kernels", "quick=true", "compile=false", "max_seconds=1e-9", f"out={out}"])
    assert "4 cases not run to the end: max_seconds=1e-09" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "Benchmarks: python -m twell.bench COMMAND"),
        (["kernel"], "Benchmarks: python -m twell.bench COMMAND"),
        (["kernels", "quik=true"], "quik=true: expected KEY=VALUE with KEY one of quick, only"),
        (["kernels", "rounds=many"], "rounds: Value 'many' of type 'str' could not be converted to Integer"),
        (["step", "cuda_graph=off", "micro=-1"], "micro=-1: must be at least 1"),  # off is no boolean
    ],
)
def test_wrong_commands_are_explained(arguments, message, capsys):
    assert bench.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_help_lists_the_keys(capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(["kernels", "--help"])
    assert exit.value.code == 0
    assert "rounds=12" in capsys.readouterr().out


def test_a_file_without_masks_is_refused(tmp_path):
    np.savez(tmp_path / "empty.npz", tok=np.arange(3))
    with pytest.raises(ValueError, match="no arrays named l0, l1"):
        list(mask_cases(tmp_path / "empty.npz", 64))


def test_verdicts():
    assert [Bar(2.0, 3.0).verdict(ratio) for ratio in (1.9, 2.0, 3.0)] == ["MISS", "must", "aim"]
    assert Bar(0.98).verdict(1.0) == "aim"
    assert Bar().verdict(0.1) == "measured"


def test_names_are_unique_and_shapes_stay_together():
    cases = [*standard_cases(), *token_cases()]
    assert len({case.name for case in cases}) == len(cases)
    shapes = [case.shape for case in cases]
    changes = sum(a != b for a, b in itertools.pairwise(shapes))
    assert changes == len(set(shapes)) - 1  # each shape is compiled once


def test_a_profile_sets_stages_beside_floors(monkeypatch, capsys):
    times = {"gate_kernel": 2.0, "Memset (Device)": 0.5}
    monkeypatch.setattr("twell.bench.measure.time_by_kernel", lambda step, batches, repeats: step(0) and times)
    case = next(quick_cases())
    bench = Bench(case, Dense(True, compiled=False), "auto", torch.float32, torch.device("cpu"))
    ceilings = Ceilings(copy=1e15, gather=1e15, product=2e6 * case.n * case.d * case.h)
    result = profile_case(bench, "relu_l1 eager", ceilings)
    assert result["kernels_ms"] == {"dense": 2.5, "sparse": 2.5}
    assert result["stages"]["gate"] == {"ms": 2.0, "kernels": {"gate_kernel": 2.0}, "floor_ms": pytest.approx(1e-3)}
    print_ceilings(case, ceilings)
    print_stages(result | {"case": case.name})
    printed = capsys.readouterr().out
    assert "n 256  d 48  h 160: copy 1000.00 TB/s" in printed
    assert "2.500 / 2.500:  gate 2.000/0.001  other 0.500" in printed


def test_work_is_counted():
    fires = torch.tensor([[1, 0, 1], [0, 0, 1]])
    x, w_gate = torch.eye(2), (2.0 * fires - 1).T  # x w_gate^T > 0 where it fires
    work = work_of(x, (w_gate, w_gate, w_gate), torch.tensor([2, 0, 1], dtype=torch.int32), n_hot=1)
    assert (work.n, work.d, work.h, work.gated, work.itemsize) == (2, 2, 3, True, 4)
    assert (work.entries, work.cold, work.blocks) == (3, 1, 1)  # neuron 2 is hot; one token touches the cold tile
    everything_hot = work_of(x, (None, w_gate, w_gate), torch.arange(3, dtype=torch.int32), n_hot=3)
    assert (everything_hot.gated, everything_hot.cold, everything_hot.blocks) == (False, 0, 0)


def test_stages_are_told_by_kernel_name():
    n, d, h = 16384, 2048, 5632
    work = Work(n, d, h, gated=True, itemsize=2, n_hot=512, entries=30 * n, cold=13 * n, blocks=15 * n)
    ceilings = Ceilings(copy=4e12, gather=8e12, product=7e14)
    kernels = {"gate_kernel": 0.6, "rows_forward_kernel": 0.4, "nvjet_tst_128x256": 0.1, "Memset (Device)": 0.01}
    costs = stage_costs(kernels, work, ceilings)
    assert list(costs) == ["gate", "rows forward", "products", "other"]
    assert costs["gate"]["floor_ms"] == pytest.approx(1e3 * 2 * n * d * h / 7e14)
    assert costs["rows forward"]["floor_ms"] == pytest.approx(1e3 * n * 13 * 2 * 4096 / 8e12)
    assert costs["products"]["floor_ms"] == pytest.approx(1e3 * 8 * 2 * n * d * 512 / 7e14)
    assert costs["other"]["floor_ms"] is None

    dense = stage_costs({"nvjet_tst_128x256": 4.0, "dense_forward_kernel": 0.2}, work, ceilings)
    assert dense["products"]["floor_ms"] == pytest.approx(1e3 * 9 * 2 * n * d * h / 7e14)
