"""The sparse FFN against the dense one, on this machine: time, error, memory, and each stage against its floor.

    python -m twell.bench kernels                                        the cases with a bar (minutes on an H200)
    python -m twell.bench kernels masks=a.npz,b.npz out=results/h200.json     real firing patterns too
    python -m twell.bench kernels quick=true                             a smoke test, on any machine

dense = the best of eager and compiled torch; for the step ReLU + L1, for the forward ReLU alone; SiLU is shown beside
it in the first table. Both sides take turns in one run, over rotating batches; neuron order, capacities and densities
are learnt from other batches than those timed. A step is forward + backward with the gradients of x and all weights.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.reference import ffn_backward, ffn_forward
from kernels.synthetic import MaskProblem
from twell import measure
from twell.bench_cases import Case, mask_cases, quick_cases, standard_cases, token_cases
from twell.bench_ffn import DL1, Dense, Sparse, gradients_of, leaves_of
from twell.bench_report import print_ceilings, print_header, print_row, print_stages, print_verdicts
from twell.bench_stages import stage_costs, work_of

TIMED, LEARNT_FROM = (0, 2, 4, 6), (1, 3, 5, 7)  # batch numbers


@dataclass
class Options:
    quick: bool = False  # tiny shapes and few rounds
    only: str = ""  # run only cases whose name holds this text, e.g. "2048x5632 nnz 30"
    masks: str = ""  # comma-separated .npz files with arrays l0, l1, ...: bits of the neurons that fired
    mask_d: int = 1024  # model width at which the masks are run
    impl: str = "auto"  # auto | triton | torch
    compile: bool = True  # compare with compiled dense code as well
    rounds: int = 12  # turns that each side gets over all batches
    stages: bool = True  # profile each stage and compare it with its floor
    max_seconds: float = 0  # start no further case after so long; 0 = run all
    out: str = ""  # JSON file for all results, rewritten after each case


def run(options: Options) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = [case for case in _cases(options) if options.only in case.name]
    if not cases:
        raise SystemExit(f"only={options.only!r} selects no case")
    environment = measure.environment(device) | {"dtype": str(dtype).removeprefix("torch."), "impl": options.impl}
    print_header(environment)
    started = time.perf_counter()
    done, results, failures = [], [], []
    shape, dense, ceilings = None, None, None
    for case in cases:
        if options.max_seconds and time.perf_counter() - started > options.max_seconds:
            failures.append(
                f"{len(cases) - len(done) - len(failures)} cases not run: max_seconds={options.max_seconds}"
            )
            break
        try:
            if case.shape != shape:
                shape, dense = case.shape, Dense(case.gated, options.compile)
                ceilings = measure.ceilings(case.n, case.d, case.h, dtype, device)
                print_ceilings(case, ceilings)
            results.append(measure_case(case, dense, ceilings, options, dtype, device))
        except Exception as e:  # one case must not lose the others
            traceback.print_exc()
            failures.append(f"{case.name}: {type(e).__name__}")
            continue
        done.append(case)
        print_row(case, results[-1])
        _write(options.out, environment, results)
    print_stages(results)
    print_verdicts(done, results, failures)


def _write(path: str, environment: dict, results: list[dict]) -> None:
    """All results so far, after each case: a run that is cut short has lost nothing."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")


def _cases(options: Options) -> Iterable[Case]:
    if options.quick:
        yield from quick_cases()
    else:
        yield from standard_cases()
    for path in filter(None, options.masks.split(",")):
        yield from mask_cases(Path(path), options.mask_d, **({"n": 256} if options.quick else {}))
    if not options.quick:
        yield from token_cases()


def measure_case(
    case: Case,
    dense: Dense,
    ceilings: measure.Ceilings | None,
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
) -> dict:
    """Everything about one case, as it goes into the JSON file. Times in ms, memory in bytes."""
    problem = case.problem(dtype, device)
    weights = problem.weights
    sparse = Sparse(options.impl, case.h, device)
    sparse.learn([problem.batch(case.n, number) for number in LEARNT_FROM], weights)
    batches = [problem.batch(case.n, number) for number in TIMED]
    leaves = [leaves_of(x, weights) for x, _ in batches]
    repeats = sparse.repair(batches, weights)

    def step(ffn: Callable) -> Callable[[int], tuple]:
        return lambda i: gradients_of(ffn(*leaves[i]), leaves[i], batches[i][1])

    def forward(ffn: Callable) -> Callable[[int], tuple]:
        return torch.no_grad()(lambda i: ffn(*leaves[i]))

    rounds = 2 if options.quick else options.rounds
    silu = dense.variants("silu") if case.table == "uniform" else {}  # says nothing new in the other tables
    steps = dense.variants("relu_l1") | silu | {"sparse": sparse}
    forwards = dense.variants("relu") | silu | {"sparse": sparse}
    step_times = measure.alternate({name: step(f) for name, f in steps.items()}, len(TIMED), rounds, device)
    forward_times = measure.alternate({name: forward(f) for name, f in forwards.items()}, len(TIMED), rounds, device)

    result = {"case": case.name, "n": case.n, "d": case.d, "h": case.h, "gated": case.gated}
    result["nnz"] = _distribution(torch.cat([sparse.full(x, *weights).nnz for x, _ in batches]))
    if isinstance(problem, MaskProblem):
        result["mask_mismatches"] = problem.mismatches
    for name, times, best in (("step", step_times, "relu_l1"), ("forward", forward_times, "relu")):
        result[name] = _compare(times, best)
    result["errors"] = errors(batches[0], weights, sparse, dense.eager["relu_l1"])
    candidates = dense.variants("relu_l1") | {"sparse": sparse}
    result["memory"] = {name: _memory(f, leaves[0], batches[0][1], device) for name, f in candidates.items()}
    result |= {"decision": sparse.decision(), "repeats": repeats, "overflowed": sparse.overflowed()}
    if options.stages and device.type == "cuda":
        kernels = measure.time_by_kernel(step(sparse), len(TIMED), 3)
        result["stages"] = stage_costs(kernels, work_of(batches[0][0], weights, *sparse.layout(case.h)), ceilings)
        # The kernels' own time, on both sides: what would be left if the host cost nothing.
        rival = measure.time_by_kernel(step(steps[result["step"]["dense"]]), len(TIMED), 3)
        result["device_ms"] = {"sparse": sum(kernels.values()), "dense": sum(rival.values())}
    return result


def _distribution(nnz: Tensor) -> dict[str, float]:
    ordered = nnz.float().sort().values
    return {"mean": ordered.mean().item(), "p99": ordered[int(0.99 * len(ordered))].item(), "max": ordered[-1].item()}


def _compare(times: dict[str, measure.Timing], baseline: str) -> dict:
    """The contenders' timings, and the ratio of the best dense `baseline` and of the best SiLU to the sparse one."""
    sparse = times["sparse"].median
    comparison = {"times": {name: asdict(timing) for name, timing in times.items()}}
    for key, ffn in (("", baseline), ("_silu", "silu")):
        rivals = {name: timing.median for name, timing in times.items() if name.split()[0] == ffn}
        comparison[f"dense{key}"] = min(rivals, key=rivals.get, default=None)
        comparison[f"ratio{key}"] = min(rivals.values()) / sparse if rivals else None
    return comparison


def _memory(ffn: Callable, leaves: list[Tensor | None], dy: Tensor, device: torch.device) -> dict | None:
    memory = measure.memory(lambda: ffn(*leaves), lambda outputs: gradients_of(outputs, leaves, dy), device)
    return None if memory is None else asdict(memory)


def errors(batch: tuple[Tensor, Tensor], weights: Iterable[Tensor | None], sparse: Callable, dense: Callable) -> dict:
    """Relative errors |result - exact| / |exact| (Frobenius) of both sides, against fp64."""
    x, dy = batch
    exact_inputs = [None if t is None else t.double() for t in (x, *weights)]
    exact = [*ffn_forward(*exact_inputs)[:2], *ffn_backward(*exact_inputs, dy.double(), DL1)]
    exact = [t for t in exact if t is not None]
    del exact_inputs
    names = ["y", "l1", "dx", *(["dw_gate"] if len(exact) == 6 else []), "dw_up", "dw_down"]
    table = {}
    for side, ffn in (("sparse", sparse), ("dense", dense)):
        leaves = leaves_of(x, weights)
        outputs = ffn(*leaves)
        results = [*outputs, *gradients_of(outputs, leaves, dy)]
        table[side] = {
            name: ((got.double() - want).norm() / want.norm().clamp(min=1e-300)).item()
            for name, got, want in zip(names, results, exact, strict=True)
        }
    floor = torch.finfo(torch.float32).eps  # an l1 that dense happens to hit exactly is no measure
    table["worst_ratio"] = max(table["sparse"][name] / max(table["dense"][name], floor) for name in names)
    return table
