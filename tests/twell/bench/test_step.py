import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from tests.twell.small import build
from twell.bench import __main__ as bench
from twell.bench import fit as bench_fit
from twell.bench import step_measure as bench_step_measure
from twell.bench.step import Contender, Training
from twell.bench.step_measure import (
    Call,
    calls_in_a_turn,
    computed_neurons,
    joules_per_token,
    median_and_spread,
    take_turns,
)
from twell.bench.step_model import DenseReluL1, ModelOptions, Setup, initialise
from twell.bench.step_parts import PARTS, Widths, part_of, time_by_part
from twell.model import IGNORE

TINY = {"model": "nano", "layers": 2, "seq": 24, "micro": 2, "vocab": 300, "nnz": 20, "compile": False}
QUICK = ["rounds=2", "seconds=0.1"]


def arguments(**changes) -> list[str]:
    return [f"{key}={value}" for key, value in {**TINY, **changes}.items()]


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_step_compares_all_variants(compile, tmp_path, capsys):
    out = tmp_path / "new" / "step.json"
    assert bench.main(["step", *arguments(compile=compile, n_micro=2), *QUICK, f"out={out}"]) == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert {"date", "device", "torch", "dtype"} <= record["environment"].keys()
    (result,) = record["results"]
    assert (result["name"], result["micro"], result["n_micro"], result["forced_nnz"]) == ("nano", 2, 2, 20)
    assert [layer["mean"] for layer in result["firing"]] == pytest.approx([20, 20], rel=0.02)
    assert all(layer["mean"] < layer["p99"] <= layer["max"] for layer in result["firing"])
    assert list(result["variants"]) == ["dense_silu", "dense_relu", "relu_l1", "sparse"]
    for name, variant in result["variants"].items():
        assert f"\n{name} " in printed
        assert variant["tokens_per_second"] == pytest.approx(2 * 2 * 24 / variant["ms"] * 1e3)
        assert variant["repeats"] == 0
        assert len(variant["computed_neurons"]) == 2
        assert variant["parts_ms"]["ffn"] > 0 and variant["parts_ms"]["optimizer"] > 0
        if not torch.cuda.is_available():
            assert variant["mfu"] is variant["memory"] is variant["joules_per_token"] is None
    assert "over relu_l1  " in printed and "ms by part" in printed


def test_prefill_compares_forward_passes(tmp_path, capsys):
    out = tmp_path / "prefill.json"
    assert bench.main(["prefill", *arguments(), *QUICK, f"out={out}"]) == 0
    assert "over dense_silu" in capsys.readouterr().out
    (result,) = json.loads(out.read_text())["results"]
    assert list(result["variants"]) == ["dense_silu", "dense_relu", "sparse"]
    for variant in result["variants"].values():
        assert variant["tokens_per_second"] == pytest.approx(2 * 24 / variant["ms"] * 1e3)
        assert variant["parts_ms"]["optimizer"] == 0


def test_several_models_and_fewer_variants(tmp_path):
    out = tmp_path / "step.json"
    bench.main(
        [
            "step",
            *arguments(model="nano,nano", variants="relu_l1,sparse", layers=1),
            *QUICK,
            "profile=false",
            f"out={out}",
        ]
    )
    results = json.loads(out.read_text())["results"]
    assert [result["name"] for result in results] == ["nano", "nano"]
    assert list(results[1]["variants"]) == ["relu_l1", "sparse"]
    assert results[1]["variants"]["sparse"]["parts_ms"] is None


@pytest.mark.parametrize(
    "command, message",
    [
        (
            ["step", "variants=dense,sparse"],
            "variants=dense,sparse: 'dense' is none of dense_silu, dense_relu, relu_l1, sp",
        ),
        (["step", "run=runs/no-such"], "run=runs/no-such: no run there"),
        (["prefill", "variants=sparse_uncounted"], "'sparse_uncounted' is none of"),
        (["prefill", "variants=relu_l1"], "without gradients, relu_l1 is dense_relu"),
        (["prefill", "rounds=-1"], "rounds=-1: must be at least 1, or 0"),
        (["prefill", "seconds=-1"], "seconds=-1.0: must be at least 0"),
        (["prefill", "model=nano", "nnz=0"], "nnz=0.0: must be above 0, and at most 153.6 of 512 neurons"),
        (["prefill", "model=nano,nope"], "model=nope: there is no such preset"),
        (["prefill", "model=nano", "impl=foo"], "impl=foo: must be one of auto, triton, torch"),
        (["prefill", "model=nano", "dtype=fp16"], "dtype=fp16: must be one of auto, bf16, fp32"),
        (["prefill", "model=nano", "seq=-1"], "seq=-1: must be at least 1, or 0"),
    ],
)
def test_mistakes_are_explained(command, message, capsys):
    assert bench.main(command) == 2
    assert message in capsys.readouterr().err


def setup(**changes) -> Setup:
    return Setup(ModelOptions(**{**TINY, **changes}), "nano")


def test_variants_share_their_parameters_and_differ_in_the_ffn():
    made = setup()
    model = made.build()
    twins = {name: made.twin(name, model) for name in ("dense_silu", "dense_relu", "relu_l1", "sparse")}
    for twin in twins.values():
        assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    (batch,) = made.batches(1)
    with torch.no_grad():
        outputs = {name: twin(batch.tokens, batch.targets) for name, twin in twins.items()}
    assert outputs["relu_l1"].loss_sum == pytest.approx(outputs["sparse"].loss_sum)
    assert outputs["relu_l1"].loss_sum != outputs["dense_silu"].loss_sum
    assert torch.allclose(outputs["relu_l1"].l1_sum, outputs["sparse"].l1_sum)
    assert outputs["relu_l1"].stats is None


def test_the_dense_l1_counts_counted_tokens():
    ffn = DenseReluL1(8, 12)
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter)
    ffn.requires_grad_(False)
    x, counted = torch.randn(2, 3, 8), torch.tensor([[True, True, False], [False, True, True]])
    a = torch.relu(x @ ffn.w_gate.T) * (x @ ffn.w_up.T)
    assert torch.allclose(ffn(x, counted).l1, a[counted].abs().sum())
    assert torch.allclose(ffn(x, None).l1, a.abs().sum())
    assert torch.allclose(ffn(x, None).y, a @ ffn.w_down)


def test_initialising_on_all_cores_gives_the_same_values():
    one, other = build("sparse", seed=3), build("sparse", seed=4)
    initialise(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_leaves_the_weights_and_repeats_on_overflow(dtype, monkeypatch):
    made = setup(dtype=dtype)
    training = Training(made, n_micro=2)
    contender = Contender("sparse", training, made)
    before = {name: p.clone() for name, p in training.model.named_parameters()}
    answers = iter([True, False])
    overflowed = lambda: torch.tensor(next(answers))  # noqa: E731
    monkeypatch.setattr(contender._step, "_overflowed", overflowed)
    assert contender._step is contender._launched  # no CUDA graph on a CPU
    contender(0)
    assert contender.repeats == 1
    assert all(torch.equal(before[name], p) for name, p in training.model.named_parameters())
    moments = [t for name, t in training.state.items() if name.endswith("exp_avg")]
    assert all(t.abs().sum() > 0 for t in moments)
    sizes = training.memory()
    assert sizes["masters"] == (0 if dtype == "fp32" else 2 * sizes["weights"])
    assert sizes["optimizer"] >= 2 * sizes["gradients"] - 4096


def test_firing_is_counted_as_in_training_or_not_at_all():
    made = setup()
    training = Training(made, n_micro=1)
    counted, uncounted = (Contender(name, training, made) for name in ("sparse", "sparse_uncounted"))
    for contender in (counted, uncounted):
        contender(0)
    assert counted._meter.interval.fired.sum() > 0 and uncounted._meter.interval.fired.sum() == 0


def test_a_run_brings_its_weights_and_text(tmp_path, capsys):
    from tests.training import train_tiny

    train_tiny(tmp_path, "name=trained", "ffn=sparse", "steps=2", "compile=false")
    run, out = tmp_path / "runs" / "trained", tmp_path / "step.json"
    assert bench.main(["step", f"run={run}", "compile=false", "micro=2", "n_micro=2", *QUICK, f"out={out}"]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert result["forced_nnz"] is None and result["model"]["d_model"] == 32
    assert "firing neurons per token: mean" in capsys.readouterr().out
    assert bench.main(["step", f"run={run}", "micro=1000"]) == 2
    assert "validation text is too short" in capsys.readouterr().err


# ---- Parts


def operator(name: str, *shapes: list[int], parent=None):
    return SimpleNamespace(name=name, input_shapes=list(shapes), cpu_parent=parent)


@pytest.mark.parametrize(
    "kernel, launched_by, part",
    [
        ("nvjet_1", operator("aten::mm", [64, 32], [32, 80]), "ffn"),
        ("nvjet_1", operator("aten::mm", [64, 32], [32, 96]), "attention"),
        ("nvjet_1", operator("aten::mm", [64, 32], [32, 512]), "head"),
        ("pytorch_flash::fwd", operator("aten::_flash_attention_forward", [2, 4, 80, 8]), "attention"),
        ("rows_forward_kernel", operator("twell::ffn_forward", [64, 32]), "ffn"),
        ("nvjet_1", operator("aten::mm", [7, 7], parent=operator("twell::ffn_backward")), "ffn"),
        (
            "multi_tensor_apply",
            operator("aten::_fused_adamw_", parent=operator("Optimizer.step#AdamW.step")),
            "optimizer",
        ),
        ("vectorized_add", operator("aten::_foreach_add_"), "optimizer"),
        ("copy", operator("aten::copy_", [9999], [9999]), "optimizer"),
        ("accumulate_kernel", None, "optimizer"),
        ("adamw_kernel", operator("something_else"), "optimizer"),
        ("triton_red_fused_exp_log_softmax", operator("triton_red_fused_exp_log_softmax"), "head"),
        ("cross_entropy_kernel", operator("_LinearCrossEntropy", [64, 32]), "head"),
        ("cross_entropy_scale_kernel", operator("_LinearCrossEntropyBackward", [1]), "head"),
        ("triton_poi_fused_mul_silu_0", None, "ffn"),
        ("triton_poi_fused_mul_0", operator("triton_poi_fused_mul_0", [64, 80]), "ffn"),
        (
            "triton_poi_fused_add_1",
            operator("triton_add", [64, 32], parent=operator("CompiledFunction", [80])),
            "other",
        ),
        ("triton_red_fused_mean_rsqrt_1", None, "other"),
    ],
)
def test_kernels_find_their_part(kernel, launched_by, part):
    assert part_of(kernel, launched_by, Widths(d_ff=80, vocab_size=512, flat=9999)) == part


def test_every_kernel_of_a_trace_is_counted_once(monkeypatch):
    product = operator("aten::mm", [4, 80])
    product.device_type, product.kernels = DeviceType.CPU, [SimpleNamespace(name="nvjet", duration=3000.0)]

    def on_device(name: str, microseconds: float, annotation: bool = False):
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(name=name, device_type=DeviceType.CUDA, time_range=span, is_user_annotation=annotation)

    events = [product, on_device("nvjet", 3000.0), on_device("triton_relu", 1000.0), on_device("step", 9000.0, True)]

    class Trace:
        def __enter__(self):
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("twell.bench.step_parts.profile", lambda **_: Trace())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ms = time_by_part(lambda: None, Widths(80, 512, 1), torch.device("cuda"))
    assert ms == dict.fromkeys(PARTS, 0.0) | {"ffn": 4.0}


# ---- Work and energy


def test_computed_neurons_follow_the_route():
    model = build("sparse", n_layers=3)
    order = SimpleNamespace(n_hot=4)
    rate = torch.tensor([0.5] * 4 + [0.1] * 36)

    def state(sparse: bool):
        decision = SimpleNamespace(rate=rate, order=lambda backward: order)
        return SimpleNamespace(decision=decision, runs_sparse=lambda backward: sparse)

    model.blocks[0].ffn.state = state(True)
    model.blocks[1].ffn.state = state(False)
    assert computed_neurons(model, [6.0, 6.0, 6.0], True) == [pytest.approx(4 + 6 - 2), 40, 40]


def test_energy_is_shared_by_all_tokens(monkeypatch):
    readings = iter([100.0, 112.0])
    monkeypatch.setattr(
        bench_step_measure, "EnergyMeter", lambda device: SimpleNamespace(joules=lambda: next(readings))
    )
    calls = []
    call = Call(True, n_batches=2, n_tokens=3, fixed_bytes=0)
    joules = joules_per_token(calls.append, call, 1e-9, torch.device("cpu"))
    assert calls == [0, 1] and joules == 12 / 6


# ---- Fit


@pytest.mark.parametrize("border", [1, 2, 3, 13, 40, 500])
def test_the_search_finds_the_border(border):
    tried = []

    def peak_of(micro: int) -> int | None:
        tried.append(micro)
        return 1000 + 50 * micro if micro <= border else None

    peaks = bench_fit.search(peak_of, available=1000 + 50 * border + 60)  # fragmentation makes the guess too large
    assert max(micro for micro, peak in peaks.items() if peak is not None) == border
    assert peaks[border + 1] is None
    assert len(tried) == len(set(tried)) <= 10


def test_nothing_fits():
    assert bench_fit.search(lambda micro: None, 100) == {1: None}


def test_what_fits_is_explained(capsys):
    result = {
        "peak_bytes": {1: 30e9, 2: 40e9, 12: 140e9, 13: None}, "largest": 12, "available_bytes": 141e9,
        "fixed_bytes": {"weights": 5e9, "optimizer": 15e9}, "batch_tokens": 2**20, "model": {"seq_len": 2048},
    }  # fmt: skip
    bench_fit.print_fit(result)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["12", "140.0"] in lines and ["13", "out", "of", "memory"] in lines
    assert "weights 5.0  optimizer 15.0  activations 120.0 with 12 sequences" in printed
    assert "batch.micro=12; that divides batch.tokens=1048576: batch.micro=8" in printed
    bench_fit.print_fit(result | {"largest": 0})
    assert "Not even one sequence fits" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_fit_needs_a_gpu(capsys):
    assert bench.main(["fit"]) == 2
    assert "fit: torch sees no GPU" in capsys.readouterr().err


def test_a_dry_run_forgets_what_did_not_fit(monkeypatch):
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 77)
    dry_run = bench_fit.DryRun(setup(), "sparse")
    assert dry_run.peak(2) == 77
    assert len(dry_run.training.batches[0].tokens) == 2

    def fail(*_):
        dry_run.training.model.norm.weight.grad = torch.ones_like(dry_run.training.model.norm.weight)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_fit.Contender, "__call__", fail)
    assert dry_run.peak(3) is None
    assert dry_run.training.model.norm.weight.grad is None
    monkeypatch.setattr(bench_fit.Contender, "__call__", lambda *_: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError, match="invalid for input"):
        dry_run.peak(1)


def test_targets_are_all_counted_with_random_tokens():
    (batch,) = setup().batches(1)
    assert batch.tokens.shape == (2, 24) and (batch.targets != IGNORE).all()
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


# ---- Timing


def test_contenders_take_turns(monkeypatch):
    """An untimed call, then several as one: at least three, all batches equally often, more of the short ones."""
    events = []
    monkeypatch.setattr(bench_step_measure.measure, "synchronize", lambda device: events.append("wait"))

    class Fake:
        def __init__(self, name: str, seconds: float):
            self.name, self.seconds = name, seconds

        def __call__(self, i: int) -> None:
            events.append(f"{self.name}{i}")

    fakes = {"a": Fake("a", 0.9), "b": Fake("b", 0.055)}
    times = take_turns(fakes, n_batches=2, rounds=2, device=torch.device("cpu"))
    of_a, of_b = ["wait", *["a0", "a1"] * 2, "wait"], ["wait", *["b0", "b1"] * 3, "wait"]
    assert events == ["a0", *of_a, "b0", *of_b] * 2
    assert all(len(own) == 2 and min(own) > 0 for own in times.values())


def test_a_turn_has_one_time_for_all_of_its_calls():
    contender = SimpleNamespace(seconds=0.08)
    assert calls_in_a_turn(contender, 1) == 4 and calls_in_a_turn(contender, 3) == 6


def test_median_and_spread():
    assert median_and_spread([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 1.0)  # between the smallest and the second largest
    assert median_and_spread([2.0]) == (2.0, 0.0)


def test_a_graph_is_recorded_before_the_clock_starts(monkeypatch):
    events = []

    class Recorder:
        def __init__(self, device: torch.device):
            pass

        def run(self, work) -> None:
            events.append("launch")
            work()

        def record(self, work):
            events.append("record")
            return lambda: (events.append("replay"), work())

    monkeypatch.setattr("twell.step.CudaRecorder", Recorder)
    monkeypatch.setattr("twell.bench.step.graphs.wanted", lambda *_: True)
    made = setup()
    contender = Contender("sparse", Training(made, n_micro=2), made)
    contender.warm_up()
    assert events[-4:] == ["replay"] * 4 and events.count("record") == 1
    del events[:]
    contender.launched(0)
    assert not events
    contender(0)
    assert events == ["replay", "replay"]
