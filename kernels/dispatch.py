"""Dispatch: how long each way of running a layer would take, from its firing rates and what this machine can do.

The model is bytes over bandwidth and operations over rate, stage by stage; the rates are measured once per process. It
decides two things per layer: how many of its neurons are hot (see hot.py), and whether the whole pass runs dense. Dense
gives way, and a decision changes, only when the prediction promises more than `HYSTERESIS`.

A pass costs never less than the host needs to launch its kernels, which decides for small layers, unless it is captured
in a CUDA graph: then the host has nothing to do.
"""

import functools
import time
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.order import TILE
from kernels.products import WHOLE

HYSTERESIS = 0.03


class Rates(NamedTuple):
    """What one GPU can do; the defaults were measured on an H200 in bf16."""

    flops: float = 780e12  # dense products, FLOP/s
    epilogue: float = 2.5e12  # values that the gate product packs on top of that, per second
    gather: float = 9.5e12  # weight rows out of L2 and L1, bytes/s
    gather_far: float = 8.2e12  # the same when they do not fit in L2, a piece at a time
    l2: float = 60e6  # bytes
    tiles: float = 4.6e12  # x and dy rows gathered by the weight gradients, bytes/s
    memory: float = 4.0e12  # device memory, bytes/s
    rows: float = 1e9  # tokens compacted per second, beside their
    entries: float = 2.6e10  # non-zeros per second; as many are moved between packed and dense layouts
    launch: float = 3e-6  # device time between two small kernels, s
    host: float = 40e-6  # host time to prepare and launch one kernel, s


class Costs(NamedTuple):
    """Predicted seconds of one pass."""

    forward: float
    backward: float

    def total(self, backward: bool) -> float:
        return self.forward + (self.backward if backward else 0.0)


class Shape(NamedTuple):
    n: int
    d: int
    h: int
    gated: bool
    itemsize: int  # bytes per value


def dense_costs(shape: Shape, rates: Rates) -> Costs:
    n, d, h, gated, size = shape
    product = 2 * n * d * h / rates.flops
    matrix = n * h * size / rates.memory  # one read or write of an [n, h] matrix
    if gated:
        return Costs(3 * product + 3 * matrix + 4 * rates.launch, 6 * product + 5 * matrix + 7 * rates.launch)
    return Costs(2 * product + 2 * matrix + 3 * rates.launch, 4 * product + 3 * matrix + 5 * rates.launch)


def sparse_costs(shape: Shape, rates: Rates, rate: Tensor, n_hot: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted (forward, backward) seconds, fp64 like `n_hot`, for every candidate in n_hot int64 [k].

    rate fp64 [h]: the share of tokens on which each neuron fires, in the neuron order.
    """
    n, d, h, gated, size = shape
    row = d * size
    hot_nnz = torch.cat([rate.new_zeros(1), rate.cumsum(0)])[n_hot]
    cold_nnz = rate.sum() - hot_nnz
    tile_rate = 1 - torch.nn.functional.pad(1 - rate, (0, -h % TILE), value=1.0).view(-1, TILE).prod(1)
    first_tile = torch.cat([rate.new_zeros(1), tile_rate.cumsum(0)])[-(-n_hot // TILE)]
    blocks = n * (tile_rate.sum() - first_tile)  # as if neurons fired independently, which overestimates

    any_hot = (n_hot > 0).double()
    product = 2 * n * d * n_hot / rates.flops
    matrix = n * n_hot * size / rates.memory
    stream = n * row / rates.memory  # one read or write of an [n, d] matrix
    gathered = n * cold_nnz * row / (rates.gather if 2 * h * row <= rates.l2 else rates.gather_far)
    entries = n / rates.rows + n * rate.sum() / rates.entries
    hot_entries = n * hot_nnz / rates.entries
    inner = 2 if gated else 1  # matrices beside w_down

    forward = 2 * n * d * h / rates.flops + n * h / rates.epilogue + entries + 2 * stream + 5 * rates.launch
    forward = forward + gathered * inner + any_hot * (2 * stream + 6 * rates.launch)
    forward = forward + product * inner + matrix * (2 + inner) + hot_entries
    backward = 2 * stream + 5 * rates.launch + gathered * (1 + inner) + hot_entries
    backward = backward + blocks * 2 * row / rates.tiles + blocks * TILE * (1 + inner) * size / rates.memory
    backward = backward + any_hot * (2 * stream + 9 * rates.launch) + product * 3 * inner + matrix * (4 + 2 * inner)
    return forward, backward


def host_costs(rates: Rates, n_hot: int | None) -> Costs:
    """What the host needs to launch a sparse pass with `n_hot` hot neurons; None: a dense one."""
    launches = (7, 11) if n_hot is None else (13, 19) if n_hot else (9, 13)
    return Costs(launches[0] * rates.host, launches[1] * rates.host)


def best_n_hot(shape: Shape, rates: Rates, rate: Tensor, backward: bool) -> tuple[int, Costs]:
    """The number of hot neurons that makes a pass with or without backward fastest, and what it then costs."""
    alive = -(-int((rate > 0).sum()) // WHOLE) * WHOLE
    candidates = torch.arange(0, min(alive, shape.h) + 1, WHOLE)
    costs = sparse_costs(shape, rates, rate, candidates)
    best = int((costs[0] + costs[1] * backward).argmin())
    return int(candidates[best]), Costs(float(costs[0][best]), float(costs[1][best]))


@functools.cache
def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of this GPU (about 0.1 s, once per process); the defaults where nothing can be timed."""
    if device.type != "cuda":
        return Rates()
    from kernels.ceilings import read_rows

    default, d, h, n = Rates(), 2048, 4096, 16384
    x = torch.randn(n, d, device=device, dtype=dtype)
    w = torch.randn(h, d, device=device, dtype=dtype)
    picked = torch.randint(h, (n, 64), device=device, dtype=torch.int32)
    big = torch.empty(1 << 28, dtype=torch.int8, device=device)
    target = torch.empty_like(big)
    flops = 2 * n * d * h / _seconds(lambda: x @ w.T)
    gather = picked.numel() * d * x.element_size() / _seconds(lambda: read_rows(w, picked))
    memory = 2 * big.numel() / _seconds(lambda: target.copy_(big))
    scale = gather / default.gather
    return default._replace(
        flops=flops,
        gather=gather,
        gather_far=default.gather_far * scale,
        l2=torch.cuda.get_device_properties(device).L2_cache_size,
        tiles=default.tiles * scale,
        memory=memory,
        host=_host_seconds(lambda: read_rows(w, picked[:8])),
    )


def _host_seconds(run) -> float:
    """Time after which one call has been handed to the device, which has less to do than that."""
    start = time.perf_counter()
    for _ in range(100):
        run()
    return (time.perf_counter() - start) / 100


def _seconds(run) -> float:
    """Median time of one call among several in a row, after enough of them to raise the clocks."""
    in_a_row = 4
    for _ in range(20):
        run()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(in_a_row):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / in_a_row)
    return sorted(times)[len(times) // 2]
