import types

import pytest
import torch

from twell.bench import measure

CPU = torch.device("cpu")


def test_contenders_take_turns():
    calls = []
    contenders = {name: lambda i, name=name: calls.append((name, i)) for name in "ab"}
    timings = measure.alternate(contenders, batches=2, rounds=3, device=CPU)
    assert set(timings) == {"a", "b"}
    assert calls[-12:] == 3 * [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_times_are_milliseconds_of_one_call(monkeypatch):
    clock = [100.0]  # seconds

    def work(_):
        clock[0] += 0.004

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    timing = measure.alternate({"work": work}, batches=2, rounds=3, device=CPU)["work"]
    assert (timing.median, timing.host) == (pytest.approx(4), pytest.approx(4))


def test_one_outlier_moves_neither_median_nor_spread():
    timing = measure._timing([1.0] * 19 + [50.0], host=0.0)
    assert (timing.median, timing.spread) == (1.0, 0.0)


def test_a_floor_is_the_dearest_resource():
    ceilings = measure.Ceilings(copy=1e12, gather=4e12, product=1e15)
    assert ceilings.floor_ms(memory_bytes=1e9, gathered_bytes=1e9, flops=1e10) == pytest.approx(1.0)
    assert ceilings.floor_ms(memory_bytes=1e6, gathered_bytes=8e9, flops=1e10) == pytest.approx(2.0)
    assert ceilings.floor_ms(flops=3e12) == pytest.approx(3.0)


def test_environment_names_versions_and_date():
    environment = measure.environment(CPU)
    assert environment["torch"] == torch.__version__
    assert environment["date"].startswith("20")
    assert environment["device"]


def test_without_a_gpu_there_is_no_memory_and_no_ceiling():
    assert measure.memory(lambda: (), lambda outputs: (), CPU) is None
    assert measure.ceilings(1, 1, 1, torch.float32, CPU) is None


def test_memory_held_and_at_once(monkeypatch):
    """A make-believe allocator: the forward takes 50 and keeps 30, 8 of these in its result; the backward takes 70."""
    memory = {"now": 100, "peak": 100}
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda _: memory.update(peak=memory["now"]))
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: memory["now"])
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: memory["peak"])

    def forward():
        memory.update(now=130, peak=150)
        return (torch.zeros(2),)

    def backward(outputs):
        memory.update(peak=200)
        return outputs

    assert measure.memory(forward, backward, torch.device("cuda")) == measure.Memory(held=22, transient=70)
