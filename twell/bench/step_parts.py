"""What a step spends its time on: device time by part of the model, from one profiled step.

A kernel belongs to the operator that launched it. Operators are told apart by the shapes of their inputs (the hidden
width is found in those of the FFN alone, the vocabulary in those of the head and the embedding), fused kernels by what
the compiler named them after. "optimizer" is all that works on gradients and masters: accumulation, clipping, AdamW,
casting. Norms, rotary positions and residual additions, which the compiler fuses with whatever
is near, are "other".
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PARTS = ("ffn", "attention", "head", "optimizer", "other")

OPTIMIZER = re.compile(r"^Optimizer\.|_foreach_|_fused_adam|multi_tensor|^(accumulate|adamw)_kernel")
OUR_FFN = re.compile(r"twell::ffn_|_Eager")
ATTENTION = re.compile(r"attention|flash|fmha|sdpa|cudnn", re.IGNORECASE)
# What the names of kernels and of operators whose shapes say nothing contain.
NAMED = (
    ("head", re.compile(r"softmax|nll_loss|cross_?entropy|logsumexp|embedding", re.IGNORECASE)),
    ("ffn", re.compile(r"silu|sigmoid|relu|threshold|^(gate|compact|plan|rows|summary|weight_grad|hot|dense)_")),
)
# Whose shapes tell: operators and the kernels of the compiler, but not a whole compiled block, which has them all.
SHAPED = re.compile(r"::|^triton_")
PRODUCT = re.compile(r"aten::(addmm|mm|bmm|linear|matmul)")


@dataclass(frozen=True)
class Widths:
    """What the shapes of a model's operators are told by."""

    d_ff: int
    vocab_size: int
    flat: int  # length of the buffer of all gradients


def time_by_part(step: Callable[[], object], widths: Widths, device: torch.device) -> dict[str, float]:
    """Milliseconds of one warmed-up step by part; on a CPU those of the operators themselves.

    Profiling makes every later launch of this process cost the host more: time first.
    """
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu, record_shapes=True) as trace:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    ms = dict.fromkeys(PARTS, 0.0)
    for kernel, microseconds, operator in _work(trace.events(), on_gpu):
        ms[part_of(kernel, operator, widths)] += microseconds / 1e3
    return ms


def _work(events: list[Any], on_gpu: bool) -> Iterator[tuple[str, float, Any]]:
    """(name, microseconds, operator that launched it or None) of everything that has run."""
    operators = [event for event in events if event.device_type == DeviceType.CPU]
    if not on_gpu:
        yield from ((event.name, event.self_cpu_time_total, event) for event in operators)
        return
    unclaimed = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            unclaimed[event.name] += event.time_range.elapsed_us()
    for event in operators:
        for kernel in event.kernels:
            unclaimed[kernel.name] -= kernel.duration
            yield kernel.name, kernel.duration, event
    yield from ((name, max(0.0, microseconds), None) for name, microseconds in unclaimed.items())


def part_of(kernel: str, operator: Any, widths: Widths) -> str:
    """The part that a kernel belongs to; `operator`: the profiler's record of what launched it."""
    names, sizes, is_product = [kernel], set(), False
    while operator is not None:
        names.append(operator.name)
        if SHAPED.search(operator.name):
            sizes |= {size for shape in operator.input_shapes or [] for size in shape if isinstance(size, int)}
        is_product |= PRODUCT.match(operator.name) is not None
        operator = operator.cpu_parent
    if widths.flat in sizes or any(OPTIMIZER.search(name) for name in names):
        return "optimizer"
    if widths.vocab_size in sizes:
        return "head"
    if any(ATTENTION.search(name) for name in names):
        return "attention"
    if widths.d_ff in sizes or any(OUR_FFN.search(name) for name in names):
        return "ffn"
    if is_product:
        return "attention"
    return next((part for part, pattern in NAMED if any(pattern.search(name) for name in names)), "other")
