import json

import pytest
import torch

from twell.bench import __main__ as bench

pytestmark = pytest.mark.gpu
SMALL = ["model=124m", "layers=2", "micro=8", "seq=512", "vocab=5000", "nnz=20", "rounds=3", "seconds=1"]


@pytest.mark.parametrize("cuda_graph", ["off", "on"])
def test_step(cuda_graph, tmp_path, capsys):
    out = tmp_path / "step.json"
    assert bench.main(["step", *SMALL, "n_micro=4", f"cuda_graph={cuda_graph}", f"out={out}"]) == 0
    print(capsys.readouterr().out)
    (result,) = json.loads(out.read_text())["results"]
    assert [layer["mean"] for layer in result["firing"]] == pytest.approx([20, 20], rel=0.02)
    for name, variant in result["variants"].items():
        memory, parts = variant["memory"], variant["parts_ms"]
        assert 0 < memory["activations"] < memory["peak"]
        assert all(parts[part] > 0 for part in ("ffn", "attention", "head", "optimizer")), name
        if cuda_graph == "off":  # the kernels of a launched step take about as long as a launched step, or less
            assert 0.1 < sum(parts.values()) / variant["ms"] < 1.3, name
    sparse, dense = result["variants"]["sparse"], result["variants"]["relu_l1"]
    assert sparse["decision"].count("\n") == 2
    assert sparse["executed_flops_per_token"] <= dense["executed_flops_per_token"]


def test_prefill(tmp_path, capsys):
    out = tmp_path / "prefill.json"
    assert bench.main(["prefill", *SMALL, f"out={out}"]) == 0
    print(capsys.readouterr().out)
    (result,) = json.loads(out.read_text())["results"]
    for variant in result["variants"].values():
        assert 0 < variant["memory"]["activations"] < variant["memory"]["peak"]
        assert variant["parts_ms"]["ffn"] > 0 and variant["parts_ms"]["optimizer"] == 0


def test_fit_finds_a_border(tmp_path, capsys, monkeypatch):
    """On a GPU that seems to have 6 GB."""
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6e9 - torch.cuda.memory_reserved(device), total))
    torch.cuda.set_per_process_memory_fraction(6e9 / total)
    try:
        out = tmp_path / "fit.json"
        keys = ["model=124m", "layers=2", "seq=1024", "vocab=5000", "ffn=dense_relu", "compile=false"]
        assert bench.main(["fit", *keys, f"out={out}"]) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    result = json.loads(out.read_text())["result"]
    assert result["largest"] > 1
    assert "The largest that fits: batch.micro=" in capsys.readouterr().out
