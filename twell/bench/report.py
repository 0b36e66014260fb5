"""The tables that `python -m twell.bench kernels` prints."""

from twell.bench.cases import Bar, Case
from twell.bench.measure import MB, Ceilings

ERROR_LIMIT = 2.0  # times the error of the dense implementation in the same dtype
MEMORY_CASE = "uniform 2048x5632 nnz 30"
MEMORY_LIMITS = {"held": 90 * MB, "transient": 350 * MB}


def print_header(environment: dict) -> None:
    print("  ".join(f"{key} {value}" for key, value in environment.items()))


def print_stages_header() -> None:
    print("\nms of all kernels, dense / sparse: of each stage / its floor from bytes and FLOPs at the ceilings named")


def print_ceilings(case: Case, ceilings: Ceilings) -> None:
    print(
        f"n {case.n}  d {case.d}  h {case.h}{'' if case.gated else '  non-gated'}: "
        f"copy {ceilings.copy / 1e12:.2f} TB/s, gathered rows {ceilings.gather / 1e12:.2f} TB/s, "
        f"product {ceilings.product / 1e12:.0f} TFLOP/s"
    )


def print_row(case: Case, result: dict) -> None:
    """One line per pass: progress, and the detail behind the verdicts."""
    nnz = result["nnz"]
    print(f"  {case.name:<34} nnz mean {nnz['mean']:.1f} p99 {nnz['p99']:.0f} max {nnz['max']:.0f}", end="")
    print(f"  {result['mask_mismatches']} mask bits missed" if result.get("mask_mismatches") else "")
    for name in ("step", "forward"):
        times = result[name]["times"].items()
        print(
            f"    {name:<8}",
            "  ".join(f"{key} {timing['median']:.3f} ±{50 * timing['spread']:.0f}%" for key, timing in times),
            f"  host {result[name]['times']['sparse']['host']:.2f} ms",
        )
    errors = result["errors"]
    print(
        "    error   ",
        "  ".join(f"{name} {error:.1e} ({errors['dense'][name]:.1e})" for name, error in errors["sparse"].items()),
        "  (dense)",
    )
    repeats = f"    {result['repeats']} repeats with larger buffers" if result["repeats"] else ""
    print("   ", result["decision"].replace("\n", "\n    ") + repeats, flush=True)


def print_stages(result: dict) -> None:
    cells = (
        f"{name} {cost['ms']:.3f}" + (f"/{cost['floor_ms']:.3f}" if cost["floor_ms"] else "")
        for name, cost in result["stages"].items()
    )
    total = result["kernels_ms"]
    print(f"  {result['case']:<34} {total['dense']:.3f} / {total['sparse']:.3f}: ", "  ".join(cells), flush=True)


def print_verdicts(results: dict[Case, dict], failures: list[str]) -> None:
    print("\nspeed-up over the best dense ReLU (+ L1 in the step), and over the best SiLU; must and aim; verdict")
    print(
        f"  {'case':<34} {'nnz':>6} | {'step':>5} {'must':>5} {'aim':>5} {'':8} {'silu':>5} "
        f"| {'fwd':>5} {'must':>5} {'aim':>5} {'':8} {'silu':>5} | {'error':>6} | held, transient MB (dense)"
    )
    missed = list(failures)
    for case, result in results.items():
        verdicts = {name: getattr(case, name).verdict(result[name]["ratio"]) for name in ("step", "forward")}
        error = result["errors"]["worst_ratio"]
        held = _memory(result)
        missed += [f"{case.name}: {name}" for name, verdict in verdicts.items() if verdict == "MISS"]
        missed += [f"{case.name}: error"] * (not error <= ERROR_LIMIT)
        missed += [f"{case.name}: overflow"] * result["overflowed"]
        missed += [f"{case.name}: {name}" for name in _memory_misses(case, result)]
        print(
            f"  {case.name:<34} {result['nnz']['mean']:6.1f} | {_cells(case.step, result['step'], verdicts['step'])} "
            f"| {_cells(case.forward, result['forward'], verdicts['forward'])} | {error:5.2f}x | {held}"
        )
    _print_packings(results)
    print(f"\n{len(missed)} musts missed" + "".join(f"\n  {name}" for name in missed))


def _print_packings(results: dict[Case, dict]) -> None:
    """How the two packings of the gate product compare where both were timed, in ms."""
    both = [result for result in results.values() if "twell" in result["step"]["times"]]
    if both:
        print(f"\n  {'packing, ms (best of launched, captured)':<44} step bitmap  TwELL   forward bitmap  TwELL")
    for result in both:
        cells = (
            f"{min(t['median'] for name, t in result[part]['times'].items() if name.split()[0] == side):.3f}"
            for part in ("step", "forward")
            for side in ("sparse", "twell")
        )
        print(f"  {result['case']:<44} {'{:>11}  {:>5}   {:>14}  {:>5}'.format(*cells)}")


def _cells(bar: Bar, comparison: dict, verdict: str) -> str:
    must, aim, silu = ("-" if x is None else f"{x:.2f}" for x in (bar.must, bar.aim, comparison["ratio_silu"]))
    return f"{comparison['ratio']:5.2f} {must:>5} {aim:>5} {verdict:<8} {silu:>5}"


def _memory(result: dict) -> str:
    sparse = result["memory"]["sparse"]
    if sparse is None:
        return "n/a"
    dense = min((m for name, m in result["memory"].items() if name != "sparse"), key=lambda m: m["held"])
    return (
        f"{sparse['held'] / MB:.0f}, {sparse['transient'] / MB:.0f} "
        f"({dense['held'] / MB:.0f}, {dense['transient'] / MB:.0f})"
    )


def _memory_misses(case: Case, result: dict) -> list[str]:
    sparse = result["memory"]["sparse"]
    if case.name != MEMORY_CASE or sparse is None:
        return []
    return [f"{name} {sparse[name] / MB:.0f} MB" for name, limit in MEMORY_LIMITS.items() if sparse[name] > limit]
