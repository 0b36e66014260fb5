"""The sparse FFN against the dense one, on this machine: time, error, memory, and each stage against its floor.

    python -m twell.bench kernels                                        the cases with a bar (minutes on an H200)
    python -m twell.bench kernels masks=a.npz,b.npz out=results/h200.json     real firing patterns too
    python -m twell.bench kernels quick=true                             a smoke test, on any machine

dense = the best of eager and compiled torch; for the step ReLU + L1, for the forward ReLU alone; SiLU is shown beside
it in the first table. On a GPU the compiled dense code and the sparse code are timed twice, launched by the host and as
captured CUDA graphs, and each side's best time counts: a slow host would otherwise decide about small shapes. Both
sides take turns in one run, over rotating batches; neuron order, capacities and densities are learnt from other batches
than those timed. A step is forward + backward with the gradients of x and all weights; a forward is y alone.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.reference import ffn_backward, ffn_forward
from kernels.synthetic import MaskProblem
from twell.bench import measure
from twell.bench.cases import Case, mask_cases, quick_cases, standard_cases, token_cases
from twell.bench.ffn import DL1, Dense, Sparse, gradients_of, leaves_of
from twell.bench.report import (
    print_ceilings,
    print_header,
    print_row,
    print_stages,
    print_stages_header,
    print_verdicts,
)
from twell.bench.stages import stage_costs, work_of

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
    results: dict[Case, dict] = {}
    ceilings: dict[tuple, measure.Ceilings] = {}
    failures: list[str] = []

    def time_it(bench: Bench) -> None:
        results[bench.case] = measure_case(bench, 2 if options.quick else options.rounds)
        print_row(bench.case, results[bench.case])

    def profile_it(bench: Bench) -> None:
        case = bench.case
        if case.shape not in ceilings:
            ceilings[case.shape] = measure.ceilings(case.n, case.d, case.h, dtype, device)
            print_ceilings(case, ceilings[case.shape])
        results[case] |= profile_case(bench, results[case]["step"]["dense"], ceilings[case.shape])
        print_stages(results[case])

    def visit(cases: list[Case], action: Callable[[Bench], None]) -> None:
        """Make every case ready and act on it; one that fails loses no other."""
        shape, dense = None, None
        for i, case in enumerate(cases):
            if options.max_seconds and time.perf_counter() - started > options.max_seconds:
                failures.append(f"{len(cases) - i} cases not run to the end: max_seconds={options.max_seconds}")
                return
            try:
                if case.shape != shape:
                    shape, dense = case.shape, Dense(case.gated, options.compile)
                action(Bench(case, dense, options.impl, dtype, device))
            except Exception as e:
                traceback.print_exc()
                failures.append(f"{case.name}: {type(e).__name__}")
            _write(options.out, environment, list(results.values()))

    visit(cases, time_it)
    if options.stages and device.type == "cuda":
        # After all timings: once the profiler has been used, every later launch costs the host more.
        print_stages_header()
        visit([case for case in results if case.table == "uniform"], profile_it)
    print_verdicts(results, failures)


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


class Bench:
    """A case made ready: its batches, and a sparse layer that has learnt from other batches."""

    def __init__(self, case: Case, dense: Dense, impl: str, dtype: torch.dtype, device: torch.device):
        self.case, self.dense, self.device = case, dense, device
        self.problem = case.problem(dtype, device)
        self.weights = self.problem.weights
        self.batches = [self.problem.batch(case.n, number) for number in TIMED]
        self.leaves = [leaves_of(x, self.weights) for x, _ in self.batches]
        learnt_from = [self.problem.batch(case.n, number) for number in LEARNT_FROM]
        self.sparse, self.repeats = self._learnt("bitmap", impl, learnt_from)
        self.twell = self._learnt("twell", "triton", learnt_from)[0] if case.twell and device.type == "cuda" else None

    def _learnt(self, packing: str, impl: str, batches: list[tuple]) -> tuple[Sparse, int]:
        """(a sparse layer that has learnt from `batches`, how often the timed ones made it enlarge its buffers)."""
        sparse = Sparse(impl, self.case.h, self.device, packing)
        sparse.learn(batches, self.weights)
        return sparse, sparse.repair(self.batches, self.weights)

    def capturing(self) -> ExitStack:
        """The context in which passes are captured."""
        stack = ExitStack()
        for side in filter(None, (self.sparse, self.twell)):
            stack.enter_context(side.capturing())
        return stack

    def step(self, ffn: Callable) -> Callable[[int], tuple]:
        return lambda i: gradients_of(ffn(*self.leaves[i]), self.leaves[i], self.batches[i][1])

    def forward(self, ffn: Callable) -> Callable[[int], tuple]:
        return torch.no_grad()(lambda i: ffn(*self.leaves[i]))


def measure_case(bench: Bench, rounds: int) -> dict:
    """Times (ms), errors and memory (bytes) of one case, as they go into the JSON file."""
    case, dense, sparse = bench.case, bench.dense, bench.sparse
    silu = {}
    if case.table == "uniform":  # says nothing new in the other tables
        silu = {name: f for name, f in dense.variants("silu").items() if not (bench.dense.compiled and "eager" in name)}
    ours = {"sparse": sparse} | ({"twell": bench.twell} if bench.twell else {})
    infer = {name: side.infer for name, side in ours.items()}
    steps = {name: bench.step(f) for name, f in (dense.variants("relu_l1") | silu | ours).items()}
    forwards = {name: bench.forward(f) for name, f in (dense.variants("relu") | silu | infer).items()}
    nnz = torch.cat([sparse.full(x, *bench.weights).nnz for x, _ in bench.batches])
    result = {
        "case": case.name,
        "n": case.n,
        "d": case.d,
        "h": case.h,
        "gated": case.gated,
        "nnz": _distribution(nnz),
        "step": _compare(_time(bench, steps, rounds), "relu_l1"),
        "forward": _compare(_time(bench, forwards, rounds), "relu"),
        "errors": errors(bench.batches[0], bench.weights, sparse, dense.eager["relu_l1"]),
        "memory": {name: _memory(bench, f) for name, f in (dense.variants("relu_l1") | {"sparse": sparse}).items()},
        "decision": sparse.decision(),
        "repeats": bench.repeats,
        "overflowed": sparse.overflowed(),
    }
    if isinstance(bench.problem, MaskProblem):
        result["mask_mismatches"] = bench.problem.mismatches
    return result


def profile_case(bench: Bench, rival: str, ceilings: measure.Ceilings) -> dict:
    """Each stage's time beside its floor, and the time of all kernels, also of the dense `rival`: what would be left of
    both sides if the host cost nothing."""
    rival = rival.removesuffix(" captured")
    dense, sparse = (bench.step(f) for f in (bench.dense.variants("relu_l1")[rival], bench.sparse))
    with bench.capturing():
        for i in range(len(TIMED)):
            dense(i), sparse(i)
        kernels = measure.time_by_kernel(sparse, len(TIMED), 3)
    work = work_of(bench.batches[0][0], bench.weights, *bench.sparse.layout(bench.case.h))
    all_dense = sum(measure.time_by_kernel(dense, len(TIMED), 3).values())
    return {
        "stages": stage_costs(kernels, work, ceilings),
        "kernels_ms": {"dense": all_dense, "sparse": sum(kernels.values())},
    }


def _distribution(nnz: Tensor) -> dict[str, float]:
    ordered = nnz.float().sort().values
    return {"mean": ordered.mean().item(), "p99": ordered[int(0.99 * len(ordered))].item(), "max": ordered[-1].item()}


def _time(bench: Bench, contenders: dict[str, Callable], rounds: int) -> dict[str, measure.Timing]:
    """Each contender as the host launches it and, on a GPU, as a captured graph, in turns."""
    if bench.device.type == "cuda":
        for name, contender in list(contenders.items()):
            if not name.endswith("eager"):
                with bench.capturing():
                    contenders[f"{name} captured"] = measure.captured(contender, len(TIMED))
    return measure.alternate(contenders, len(TIMED), rounds, bench.device)


def _compare(times: dict[str, measure.Timing], baseline: str) -> dict:
    """The contenders' timings, and the ratio of the best dense `baseline` and of the best SiLU to the sparse one."""
    sparse = min(timing.median for name, timing in times.items() if name.split()[0] == "sparse")
    comparison = {"times": {name: asdict(timing) for name, timing in times.items()}}
    for key, ffn in (("", baseline), ("_silu", "silu")):
        rivals = {name: timing.median for name, timing in times.items() if name.split()[0] == ffn}
        comparison[f"dense{key}"] = min(rivals, key=rivals.get, default=None)
        comparison[f"ratio{key}"] = min(rivals.values()) / sparse if rivals else None
    return comparison


def _memory(bench: Bench, ffn: Callable) -> dict | None:
    leaves, (_, dy) = bench.leaves[0], bench.batches[0]
    memory = measure.memory(lambda: ffn(*leaves), lambda outputs: gradients_of(outputs, leaves, dy), bench.device)
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
