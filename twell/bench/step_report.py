"""The tables that `python -m twell.bench step` and `prefill` print."""

from collections.abc import Callable

GB = 1e9
BASELINES = ("relu_l1", "dense_relu", "dense_silu")


def print_environment(environment: dict) -> None:
    print("  ".join(f"{key} {value}" for key, value in environment.items()))


def print_result(result: dict) -> None:
    """All tables of one model; `result` as it goes into the JSON file."""
    shape, variants = result["model"], result["variants"]
    print(
        f"\n{result['name']}: {shape['n_layers']} layers, d_model {shape['d_model']}, d_ff {shape['d_ff']}, "
        f"{shape['parameters']:,} parameters; {result['n_micro']} x {result['micro']} x {shape['seq_len']} tokens"
    )
    print_firing(result["firing"], result["forced_nnz"])
    columns: dict[str, Callable[[dict], str]] = {
        "tokens/s": lambda v: f"{v['tokens_per_second']:,.0f}",
        "ms": lambda v: f"{v['ms']:.1f}",
        "±": lambda v: f"{50 * v['spread']:.1f}%",
        "MFU": lambda v: _or_na(v["mfu"], "{:.1%}"),
        "GFLOP/token": lambda v: f"{v['executed_flops_per_token'] / 1e9:.2f}",
        "TFLOP/s": lambda v: f"{v['executed_flops_per_token'] * v['tokens_per_second'] / 1e12:.0f}",
        "peak GB": lambda v: _or_na(v["memory"], lambda m: f"{m['peak'] / GB:.1f}"),
        "activations": lambda v: _or_na(v["memory"], lambda m: f"{m['activations'] / GB:.1f}"),
        "mJ/token": lambda v: _or_na(v["joules_per_token"], lambda joules: f"{1e3 * joules:.2f}"),
        "repeats": lambda v: str(v["repeats"]),
    }
    columns |= {f"over {base}": _ratio_to(base, variants) for base in BASELINES if base in variants}
    print_table("variant", columns, variants)
    print("MFU: dense-equivalent. GFLOP/token, TFLOP/s: executed. ±: half of 10th to 90th percentile.")
    if all(v["parts_ms"] for v in variants.values()):
        print("\nms by part, from one profiled step")
        parts = next(iter(variants.values()))["parts_ms"]
        print_table("variant", {part: lambda v, part=part: f"{v['parts_ms'][part]:.1f}" for part in parts}, variants)
    for name, variant in variants.items():
        if variant["decision"]:
            print(f"\n{name}\n{variant['decision']}")
    print(flush=True)


def print_firing(layers: list[dict], forced: float | None) -> None:
    """Neurons that fire per token: mean over layers, and the layers that differ most."""
    means = [layer["mean"] for layer in layers]
    print(
        f"firing neurons per token{'' if forced is None else f', forced to {forced:g}'}: "
        f"mean {sum(means) / len(means):.1f} (layers {min(means):.1f} to {max(means):.1f}), "
        f"p99 {max(layer['p99'] for layer in layers):.0f}, max {max(layer['max'] for layer in layers):.0f}"
    )


def print_table(corner: str, columns: dict[str, Callable[[dict], str]], rows: dict[str, dict]) -> None:
    """One line per row, every column as wide as it must be."""
    cells = [[corner, *columns], *([name, *(cell(row) for cell in columns.values())] for name, row in rows.items())]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        )
        print("  ".join([first, *rest]))


def _ratio_to(base: str, variants: dict[str, dict]) -> Callable[[dict], str]:
    return lambda variant: f"{variants[base]['ms'] / variant['ms']:.3f}"


def _or_na(value: object, show: str | Callable) -> str:
    if value is None:
        return "n/a"
    return show.format(value) if isinstance(show, str) else show(value)
