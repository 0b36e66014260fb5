"""How `python -m twell.bench step` and `prefill` compare variants of a model: time, work, memory, energy, parts."""

import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from data.loader import Batch
from twell.bench import measure
from twell.bench.energy import EnergyMeter
from twell.bench.step_model import ModelOptions, Setup
from twell.bench.step_parts import Widths, time_by_part
from twell.bench.step_report import print_environment, print_result
from twell.flops import dense_flops, executed_flops, peak_flops
from twell.memory import collecting_by_hand, explain_out_of_memory
from twell.model import Transformer

FEWEST_ROUNDS = 5
FEWEST_CALLS, TURN = 3, 0.3  # calls in a row that are timed as one, and the seconds that they take at least


@dataclass
class CompareOptions(ModelOptions):
    rounds: int = 0  # turns that each variant gets; 0 = about `seconds` worth, but at least 5
    seconds: float = 4.0  # per variant, for the timing and again for the energy
    memory: bool = True
    energy: bool = True
    profile: bool = True
    out: str = ""  # JSON file for all results, rewritten after each model


class Contender(Protocol):
    """One variant, made ready and warmed up."""

    model: Transformer
    seconds: float  # that the latest call took
    repeats: int  # calls done again so far, because a buffer of the sparse kernels was too small

    def __call__(self, i: int) -> None:
        """Do on batch i what is measured."""

    def launched(self, i: int) -> None:
        """The same without a CUDA graph, of whose insides the allocator and the profiler know nothing."""


@dataclass(frozen=True)
class Call:
    """What one call of a contender is."""

    backward: bool
    n_batches: int  # that calls take in turn
    n_tokens: int
    fixed_bytes: int  # what is in memory between calls
    flat: int = -1  # see twell.bench.step_parts.Widths


def run_models(options: CompareOptions, measure_model: Callable[[Setup, str], dict]) -> None:
    """Measure every model asked for, print it and write it down."""
    # All variants, training and not, share the compiled functions of a block, and count towards their limit.
    torch._dynamo.config.recompile_limit = 64
    results: list[dict] = []
    for name in [options.run] if options.run else options.model.split(","):
        setup = Setup(options, name)
        environment = measure.environment(setup.device) | {"dtype": str(setup.dtype).removeprefix("torch.")}
        if not results:
            print_environment(environment)
        with explain_out_of_memory(setup.cfg, setup.device), collecting_by_hand():
            results.append(measure_model(setup, name))
        print_result(results[-1])
        if options.out:  # after each model: a run that is cut short has lost only the rest
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            record = {"environment": environment, "options": asdict(options), "results": results}
            Path(options.out).write_text(json.dumps(record, indent=1) + "\n")
        release()


def compare(contenders: dict[str, Contender], call: Call, firing: list[dict], setup: Setup) -> dict[str, Any]:
    """All numbers of all variants, as they go into the JSON file. `firing`: of `firing_by_layer`."""
    options, device, peak = setup.options, setup.device, peak_flops(setup.device)
    learning = {name: contender.repeats for name, contender in contenders.items()}
    longest = max(contender.seconds * calls_in_a_turn(contender, call.n_batches) for contender in contenders.values())
    rounds = options.rounds or max(FEWEST_ROUNDS, round(options.seconds / longest))
    times = take_turns(contenders, call.n_batches, rounds, device)
    results = {}
    for name, contender in contenders.items():
        model, (median, spread) = contender.model, median_and_spread(times[name])
        speed = 1e3 * call.n_tokens / median
        neurons = computed_neurons(model, [layer["mean"] for layer in firing], call.backward)
        results[name] = {
            "ms": median,
            "spread": spread,
            "rounds": rounds,
            "tokens_per_second": speed,
            "mfu": speed * dense_flops(model, call.backward) / peak if peak else None,
            "computed_neurons": neurons,
            "executed_flops_per_token": executed_flops(model, neurons, call.backward),
            "repeats": contender.repeats - learning[name],
            "repeats_while_learning": learning[name],
            "memory": None,
            "joules_per_token": None,
            "parts_ms": None,
            "decision": decision_table(model),
        }
    for name, contender in contenders.items():
        if options.memory:
            results[name]["memory"] = memory(contender, call.fixed_bytes, device)
    for name, contender in contenders.items():
        if options.energy:
            results[name]["joules_per_token"] = joules_per_token(contender, call, options.seconds, device)
    # Last: once the profiler has been used, every later launch costs the host more.
    widths = Widths(setup.cfg.ffn.d_ff, setup.vocab_size, call.flat)
    for name, contender in contenders.items():
        if options.profile:
            results[name]["parts_ms"] = time_by_part(lambda contender=contender: contender.launched(0), widths, device)
    return results


def calls_in_a_turn(contender: Contender, n_batches: int) -> int:
    """How many calls are timed as one: all batches equally often."""
    wanted = max(FEWEST_CALLS, math.ceil(TURN / contender.seconds))
    return math.ceil(wanted / n_batches) * n_batches


def take_turns(
    contenders: dict[str, Contender], n_batches: int, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of a call, one number a turn.

    The calls of a turn follow each other as in training: nobody waits for the end of one, so that the host may launch
    the next while the device still works. A GPU lowers its clock under the power that dense products draw, and takes a
    while to raise it again: an untimed call lets that pass.
    """
    times = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            contender(0)
            n_calls = calls_in_a_turn(contender, n_batches)
            measure.synchronize(device)
            started = time.perf_counter()
            for i in range(n_calls):
                contender(i % n_batches)
            measure.synchronize(device)
            times[name].append(1e3 * (time.perf_counter() - started) / n_calls)
    return times


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """The median, and the distance from 10th to 90th percentile as a share of it."""
    ordered, last = sorted(times), len(times) - 1
    median = statistics.median(ordered)
    return median, (ordered[math.floor(0.9 * last)] - ordered[math.floor(0.1 * last)]) / median


@torch.no_grad()
def firing_by_layer(model: Transformer, batch: Batch) -> list[dict[str, float]]:
    """Mean, 99th percentile and maximum over tokens of the neurons that fire, for every layer of a ReLU model."""
    layers: list[dict[str, float]] = []

    def note(_ffn: object, _inputs: object, out: Any) -> None:
        ordered = out.nnz.float().sort().values
        p99 = ordered[int(0.99 * len(ordered))]
        layers.append({"mean": ordered.mean().item(), "p99": p99.item(), "max": ordered[-1].item()})

    hooks = [block.ffn.register_forward_hook(note) for block in model.blocks]
    model(batch.tokens, batch.targets, batch.doc_ids)
    for hook in hooks:
        hook.remove()
    return layers


def computed_neurons(model: Transformer, firing: list[float], backward: bool) -> list[float]:
    """Neurons per token that each layer really computes: those that fire, and on every token the hot ones; all of them
    where it runs dense. `firing`: the mean number that fire, by layer."""
    counts = []
    for block, nnz in zip(model.blocks, firing):
        ffn, state = block.ffn, getattr(block.ffn, "state", None)
        h = ffn.w_up.shape[0]
        if state is None or state.decision.rate is None:
            counts.append(h)
            continue
        decision = state.decision
        n_hot = decision.order(backward).n_hot
        sparse = state.runs_sparse(backward)
        hot_firing = float(decision.rate[:n_hot].sum())
        counts.append(n_hot + max(0.0, nnz - hot_firing) if sparse else h)
    return counts


def decision_table(model: Transformer) -> str:
    """How the sparse layers decided to run; empty without any that the kernels remember something of."""
    states = [state for block in model.blocks if (state := getattr(block.ffn, "state", None)) is not None]
    if not states:
        return ""
    from kernels.state import table  # needs triton

    return table(states)


def memory(contender: Contender, fixed: int, device: torch.device) -> dict[str, int] | None:
    """Bytes: the peak of a call, `fixed`, and the difference. None on a CPU."""
    if device.type != "cuda":
        return None
    release()
    torch.cuda.reset_peak_memory_stats(device)
    contender.launched(0)
    measure.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return {"peak": peak, "fixed": fixed, "activations": peak - fixed}


def joules_per_token(contender: Contender, call: Call, seconds: float, device: torch.device) -> float | None:
    """Energy of the whole card over at least `seconds` of calls; None where it cannot be read."""
    meter = EnergyMeter(device)
    measure.synchronize(device)
    before, started, n_calls = meter.joules(), time.perf_counter(), 0
    if before is None:
        return None
    while n_calls == 0 or time.perf_counter() - started < seconds:
        for i in range(call.n_batches):
            contender(i)
        n_calls += call.n_batches
        measure.synchronize(device)
    return (meter.joules() - before) / (n_calls * call.n_tokens)


def release() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
