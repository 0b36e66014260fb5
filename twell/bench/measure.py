"""Measuring: alternating timings with their spread, memory, time by kernel, the device's ceilings, what it ran on."""

import datetime
import importlib.metadata
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

MB = 1e6
SETTLE, REST = 0.015, 0.03  # seconds
CACHE = 1 << 28  # bytes, more than any cache holds


def environment(device: torch.device) -> dict[str, str | int]:
    """Hardware, versions and date, for the head of a results file."""
    installed = {package.metadata["Name"].lower(): package.version for package in importlib.metadata.distributions()}
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed.get("triton", "not installed"),
    }
    if device.type != "cuda":
        return record | {"device": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id=GPU-{properties.uuid}"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return record | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mb": round(properties.total_memory / MB),
        "cuda": torch.version.cuda,
        "driver": driver,
    }


@dataclass(frozen=True)
class Timing:
    median: float  # ms
    spread: float  # (90th - 10th percentile) / median
    host: float = 0.0  # ms that the host needs to enqueue one call on an idle device


def alternate(
    contenders: dict[str, Callable[[int], object]], batches: int, rounds: int, device: torch.device, warmup: int = 1
) -> dict[str, Timing]:
    """Time contender(i) for i in range(batches), all contenders taking turns in each of `rounds` rounds.

    Taking turns lets drifts touch all alike; several batches keep one's data from staying in the caches. On a GPU this
    follows `triton.testing.do_bench`: a turn begins with `SETTLE` of untimed calls, and each timed call begins with an
    empty cache, as a layer of a model finds it. Nothing waits between calls: the host runs ahead, as in training,
    and events time the device. Before each turn the GPU has a `REST`: it lowers its clock under the power that dense
    products draw, and whoever came after them would be timed at that clock.
    """
    for contender in contenders.values():
        for i in range(batches * warmup):
            contender(i % batches)
    host = {name: _host_time(contender, batches, device) for name, contender in contenders.items()}
    settling = {name: _calls_in(SETTLE, contender, batches, device) for name, contender in contenders.items()}
    cache = torch.empty(CACHE if device.type == "cuda" else 0, dtype=torch.int8, device=device)
    spans = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            _rest(device)
            for i in range(settling[name]):
                contender(i % batches)
            for i in range(batches):
                cache.zero_()
                start = _now(device)
                contender(i)
                spans[name].append((start, _now(device)))
    synchronize(device)
    return {name: _timing([_elapsed(*span) for span in spans[name]], host[name]) for name in contenders}


def captured(contender: Callable[[int], object], batches: int) -> Callable[[int], object]:
    """`contender` as CUDA graphs, one a batch: what it takes when launching costs the host nothing.

    All graphs work in one pool of memory, so only the results of the latest call are there.
    """
    side = torch.cuda.Stream()  # capturing begins on a stream that has seen every lazy initialization
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(batches):
            contender(i)
    torch.cuda.current_stream().wait_stream(side)
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for i in range(batches):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[i], pool=pool):
            contender(i)
    return lambda i: graphs[i].replay()


def _timing(times: list[float], host: float) -> Timing:
    times.sort()
    median = statistics.median(times)
    return Timing(median, (times[int(0.9 * (len(times) - 1))] - times[int(0.1 * (len(times) - 1))]) / median, host)


def _calls_in(seconds: float, contender: Callable[[int], object], batches: int, device: torch.device) -> int:
    """How many calls fill so much of the device's time; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    start = _now(device)
    for i in range(batches):
        contender(i)
    end = _now(device)
    synchronize(device)
    return math.ceil(1e3 * seconds * batches / _elapsed(start, end))


def _host_time(contender: Callable[[int], object], batches: int, device: torch.device) -> float:
    times = []
    for i in range(batches):
        synchronize(device)
        start = time.perf_counter()
        contender(i)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _rest(device: torch.device) -> None:
    if device.type == "cuda":
        synchronize(device)
        time.sleep(REST)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _now(device: torch.device) -> "torch.cuda.Event | float":
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


@dataclass(frozen=True)
class Memory:
    """Bytes. `held`: alive between forward and backward beside inputs and results. `transient`: the most that either
    pass allocates at once, its results included."""

    held: int
    transient: int


def memory(forward: Callable[[], tuple], backward: Callable[[tuple], tuple], device: torch.device) -> Memory | None:
    """`forward` returns a tuple of results, `backward` takes it and returns the gradients; None without a GPU."""
    if device.type != "cuda":
        return None

    def run(f: Callable, *arguments) -> tuple[tuple, int, int]:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = f(*arguments)
        return results, torch.cuda.memory_allocated(device) - before, torch.cuda.max_memory_allocated(device) - before

    outputs, kept, forward_peak = run(forward)
    _, _, backward_peak = run(backward, outputs)
    held = kept - sum(t.numel() * t.element_size() for t in outputs)
    return Memory(held, max(forward_peak, backward_peak))


def time_by_kernel(step: Callable[[int], object], batches: int, repeats: int) -> dict[str, float]:
    """Device milliseconds of one step by kernel name, from the profiler; the step must have been warmed up."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for i in range(batches * repeats):
            step(i % batches)
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 for event in trace.key_averages()}
    return {name: ms / (batches * repeats) for name, ms in times.items() if ms > 0}


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best: bytes and FLOPs per second."""

    copy: float  # device memory, read + written
    gather: float  # random weight rows, out of the L2 cache
    product: float  # dense matrix product

    def floor_ms(self, memory_bytes: float = 0, gathered_bytes: float = 0, flops: float = 0) -> float:
        """No stage that moves and computes this much can take less."""
        return 1e3 * max(memory_bytes / self.copy, gathered_bytes / self.gather, flops / self.product)


def ceilings(n: int, d: int, h: int, dtype: torch.dtype, device: torch.device) -> Ceilings | None:
    """Measured for an FFN of this shape: its own product, and rows of its width. None without a GPU."""
    if device.type != "cuda":
        return None
    from kernels.ceilings import read_rows  # needs triton

    x, w = (torch.randn(rows, d, device=device, dtype=dtype) for rows in (n, h))
    in_cache = min(h, int(16 * MB) // (d * dtype.itemsize))  # so many rows surely stay in the cache
    rows = torch.randint(0, in_cache, (n, 64), device=device, dtype=torch.int32)
    source = torch.empty(1 << 30, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    calls = {
        "copy": lambda _: target.copy_(source),
        "gather": lambda _: read_rows(w, rows),
        "product": lambda _: x @ w.T,
    }
    ms = {name: timing.median for name, timing in alternate(calls, 1, 10, device, warmup=3).items()}
    work = {"copy": 2 * source.numel(), "gather": rows.numel() * d * dtype.itemsize, "product": 2 * n * d * h}
    return Ceilings(**{name: 1e3 * work[name] / ms[name] for name in calls})
