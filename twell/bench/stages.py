"""Each stage of the sparse FFN beside its floor: the least time that its bytes and FLOPs allow for on this device."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kernels.format import Entries, NeuronTiles
from kernels.order import TILE
from twell.bench.measure import Ceilings

SECTOR = 32  # bytes, the smallest piece of device memory that moves

# Stages of a step by the names of their kernels; whatever is not here counts as "other".
STAGES = {
    "gate": ("gate_",),
    "compact": ("compact_",),
    "plan": ("plan_",),
    "rows dot": ("rows_dot",),
    "rows forward": ("rows_forward",),
    "rows backward": ("rows_backward",),
    "rows reduce": ("rows_reduce",),
    "summary": ("summary_",),
    "weight gradients": ("weight_grad",),
    "hot": ("hot_",),
    "dense": ("dense_",),
    "products": ("nvjet", "sm80_", "sm90_", "sm100_", "cutlass", "void cutlass", "ampere_", "cublas"),
}


@dataclass(frozen=True)
class Work:
    """What one step over n tokens computes; hot neurons run as dense products, cold ones by gathering rows."""

    n: int
    d: int
    h: int
    gated: bool
    itemsize: int
    n_hot: int
    entries: float  # non-zeros
    cold: float  # of these, the ones of cold neurons
    blocks: float  # (tile of cold neurons, token) pairs


def work_of(x: Tensor, weights: Iterable[Tensor | None], order: Tensor, n_hot: int) -> Work:
    """The work of a batch x [n, d] when the first n_hot neurons of `order` int32 [h] are hot."""
    w_gate, w_up, _ = weights
    fires = F.linear(x, w_up if w_gate is None else w_gate) > 0  # [n, h]
    cold = fires[:, order[n_hot:].long()]
    blocks = int(NeuronTiles.pack(Entries.of(cold)).offsets[-1]) if cold.shape[1] else 0
    entries, cold_entries = int(fires.sum()), int(cold.sum())
    return Work(*x.shape, len(w_up), w_gate is not None, x.element_size(), n_hot, entries, cold_entries, blocks)


def floors(work: Work, dense: bool, dots: bool) -> dict[str, dict[str, float]]:
    """Arguments of `Ceilings.floor_ms` by stage.

    dense: the whole step ran as dense products. dots: dot products were a stage of their own.

    Bytes are what a stage must read and write once; weight rows that it gathers come out of the L2 cache, and a value
    read or written alone moves a whole sector.
    """
    n, d, h, size = work.n, work.d, work.h, work.itemsize
    row, words, tile = d * size, n * -(-h // 32) * 4, TILE * size
    inner = 2 if work.gated else 1  # weight matrices before the activation
    entry = 4 + size  # a neuron's number and a value
    if dense:
        return {
            "products": {"flops": 6 * (1 + inner) * n * d * h},
            "dense": {"memory_bytes": (9 if work.gated else 5) * n * h * size},
        }
    apart = int(dots)
    return {
        "gate": {"flops": 2 * n * d * h, "memory_bytes": (n + h) * row + words + work.entries * SECTOR},
        "compact": {"memory_bytes": words + work.entries * (SECTOR + entry)},
        "plan": {"memory_bytes": n * -(-(h - work.n_hot) // TILE) + work.blocks * (4 + tile * (1 + inner))},
        "rows dot": {"gathered_bytes": work.cold * inner * row, "memory_bytes": 2 * n * row + 2 * work.cold * entry},
        "rows forward": {
            "gathered_bytes": work.cold * (inner - apart * (inner - 1)) * row,
            "memory_bytes": 2 * n * row + work.cold * (entry + size),
        },
        "rows backward": {
            "gathered_bytes": work.cold * (1 + inner - apart) * row,
            "memory_bytes": 2 * n * row + work.cold * (entry + size + (1 + inner) * SECTOR),
        },
        "weight gradients": {
            "flops": 2 * work.blocks * TILE * d * (1 + inner),
            "memory_bytes": h * row * (1 + inner) + work.blocks * tile * (1 + inner),
            "gathered_bytes": work.blocks * 2 * row,
        },
        # Gated: u, y; da, dx and dW twice each. The gate's own product is counted above.
        "products": {"flops": 2 * n * d * work.n_hot * (8 if work.gated else 5)},
        "hot": {"memory_bytes": n * work.n_hot * size * (6 if work.gated else 4)},
    }


def stage_costs(kernels: dict[str, float], work: Work, ceilings: Ceilings) -> dict[str, dict]:
    """Milliseconds by stage from those by kernel name, each beside its floor (None: no floor is known)."""
    ran = {name: any(kernel.startswith(name) for kernel in kernels) for name in ("gate_", "rows_dot")}
    floor = floors(work, dense=not ran["gate_"], dots=ran["rows_dot"])
    costs = {}
    for kernel, ms in kernels.items():
        stage = next((name for name, prefixes in STAGES.items() if kernel.startswith(prefixes)), "other")
        cost = costs.setdefault(stage, {"ms": 0.0, "kernels": {}})
        cost["ms"] += ms
        cost["kernels"][kernel[:80]] = ms
    for stage, cost in costs.items():
        cost["floor_ms"] = ceilings.floor_ms(**floor[stage]) if stage in floor else None
    return dict(sorted(costs.items(), key=lambda item: [*STAGES, "other"].index(item[0])))
