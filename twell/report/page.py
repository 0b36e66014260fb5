"""The report's HTML page: tables and figures in one file that needs nothing else."""

from collections.abc import Sequence
from html import escape

from twell.console import format_seconds
from twell.report.figures import DARK, LIGHT, css_variables
from twell.report.plots import Plot
from twell.report.records import printable
from twell.report.runs import Run, differing_keys, reference_run, show

STYLE = """
:root { color-scheme: light dark; %(light)s --marked: #fff0c2; }
@media (prefers-color-scheme: dark) { :root { %(dark)s --marked: #4a3c10; } }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 82rem; background: var(--background); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: 0 0 .5rem; max-width: 48rem; }
section { margin-top: 2.25rem; min-width: 0; }
.quiet, figcaption { color: var(--muted); font-size: .87rem; }
.remarks { border-left: 3px solid var(--series-1); padding: .1rem 0 .1rem .75rem; margin: 1rem 0 0; list-style: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td small { color: var(--muted); }
.differs { background: var(--marked); margin-right: -.4rem; padding: 0 .4rem; }
.key { display: inline-block; width: 1.1rem; border-top: 3px; margin-right: .5rem; vertical-align: middle; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%%), 1fr)); column-gap: 2.5rem; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem 4rem; margin: .5rem 0 1rem 1.6rem; }
summary { cursor: pointer; }
code { font-size: .95em; white-space: pre; }
.wide { grid-column: 1 / -1; }
figure { margin: 0; }
svg { width: 100%%; height: auto; display: block; font-family: system-ui, sans-serif; }
section:not(.wide) svg { max-width: 44rem; }
"""
TOKENS_SHOWN = 10
SPACE = "\N{OPEN BOX}"
LINES = ("solid", "dashed", "dotted")  # as DASHES in figures.py


def page(runs: Sequence[Run], figures: Sequence[tuple[Plot, str]]) -> str:
    """The whole document.

    Args:
        figures: plots with their SVG, in order.
    """
    variables = {
        name: " ".join(f"{variable}: {colour};" for variable, colour in css_variables(theme).items())
        for name, theme in (("light", LIGHT), ("dark", DARK))
    }
    title = printable(runs[0].path.name) if len(runs) == 1 else f"{len(runs)} runs"
    remarks = "".join(f"<li>{escape(remark)}</li>" for run in runs for remark in run.remarks)
    differences = _differences(runs)
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE % variables}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<ul class="remarks">{remarks}</ul>' if remarks else "",
        f"<section><h2>Results</h2>{_results(runs)}</section>",
        f"<section><h2>Settings that differ</h2>{differences}</section>" if differences else "",
        '<div class="plots">',
        *(_figure(plot, svg) for plot, svg in figures),
        "</div>",
        _tokens(runs),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _figure(plot: Plot, svg: str) -> str:
    wide = ' class="wide"' if plot.name == "heatmap" else ""
    label = f'<svg role="img" aria-label="{escape(plot.title)}" '
    return (
        f"<section{wide}><h2>{escape(plot.title)}</h2><figure>{svg.replace('<svg ', label, 1)}"
        f"<figcaption>{escape(plot.caption)}</figcaption></figure></section>"
    )


def _results(runs: Sequence[Run]) -> str:
    reference = reference_run(runs)
    columns = ["run", "step", "tokens", "validation loss", "active neurons", "dead", "tokens/s", "time"]
    columns += ["to same loss"] if len(runs) > 1 else []
    columns += ["FLOPs"] if any(run.last("perf/executed_flops") is not None for run in runs) else []
    columns += ["memory"]
    rows = []
    for i, run in enumerate(runs):
        cells = {
            "run": _name(i, run),
            "step": f"{run.step:,}" + (f" <small>of {run.steps:,}</small>" if run.steps else ""),
            "tokens": _scaled(run.rows[-1]["tokens"]),
            "validation loss": _compared(run, reference, run.last("val/loss"), reference.last("val/loss"), "{:.4f}"),
            "active neurons": _active(run),
            "dead": _or_dash(run.last("sparsity/dead_share"), "{:.1%}"),
            "tokens/s": _speed(run, reference),
            "time": _seconds(run.last("perf/train_seconds")),
            "to same loss": _time_to_loss(run, reference),
            "FLOPs": _or_dash(run.last("perf/executed_flops"), "{:.0%}"),
            "memory": _or_dash(run.last("perf/memory_gb"), "{:.1f} GB"),
        }
        rows.append([cells[column] for column in columns])
    note = ""
    if len(runs) > 1:
        name = escape(reference.label)
        note = f"Small numbers beside validation loss and tokens/s compare with {name}. "
        note += f"To same loss: the time to the last validation loss of {name}. "
    note += "Speed is the median over the records, memory the peak so far"
    note += ", FLOPs those executed over a dense model's." if "FLOPs" in columns else "."
    return _table(columns, rows) + f'<p class="quiet">{note}</p>'


def _differences(runs: Sequence[Run]) -> str:
    """The settings that are not the same everywhere; what the reference has not is marked."""
    keys = differing_keys(runs)
    if not keys:
        return ""
    reference = reference_run(runs)
    rows = []
    for i, run in enumerate(runs):
        cells = [_name(i, run)]
        for key in keys:
            value = escape(show(run.config[key])) if key in run.config else "–"
            differs = run.config.get(key) != reference.config.get(key)
            cells.append(f'<span class="differs">{value}</span>' if differs else value)
        rows.append(cells)
    note = f'<p class="quiet">Marked: not as in {escape(reference.label)}.</p>'
    return _table(["run", *map(escape, keys)], rows) + note


def _tokens(runs: Sequence[Run]) -> str:
    """The validation tokens with most and with fewest active neurons, for each run that has logged them."""
    parts = []
    for i, run in enumerate(runs):
        tables = []
        for name in ("most", "fewest"):
            rows = run.last_rows(f"sparsity/tokens_{name}")[:TOKENS_SHOWN]
            cells = [[f"<code>{_token(text)}</code>", f"{l0:.1f}", f"{seen:,}"] for text, l0, seen in rows]
            tables.append(_table([f"{name} active", "neurons", "times seen"], cells))
        if run.last_rows("sparsity/tokens_most"):
            opened = " open" if len(runs) == 1 else ""
            parts.append(
                f'<details{opened}><summary>{_name(i, run)}</summary><div class="pair">{"".join(tables)}</div>'
            )
            parts.append("</details>")
    note = (
        '<p class="quiet">Active neurons on such a token, mean over layers and over the validation text. '
        f"{SPACE} is a space.</p>"
    )
    return f"<section><h2>Tokens</h2>{''.join(parts)}{note}</section>" if parts else ""


def _token(text: str) -> str:
    """A token's text, so that all of it is seen."""
    return escape(repr(text)[1:-1].replace(" ", SPACE))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _name(i: int, run: Run) -> str:
    """The i-th run's label beside its colour and line."""
    n = len(LIGHT.series)
    line = f"border-top-style: {LINES[i // n % len(LINES)]}; border-color: var(--series-{i % n})"
    return f'<span title="{escape(str(run.path))}"><span class="key" style="{line}"></span>{escape(run.label)}</span>'


def _active(run: Run) -> str:
    l0, density = run.last("sparsity/l0_mean"), run.last("sparsity/density")
    if l0 is None:
        return "–"
    return f"{l0:.1f}" + (f" <small>{density:.2%}</small>" if density is not None else "")


def _speed(run: Run, reference: Run) -> str:
    value, base = run.median("perf/tokens_per_second"), reference.median("perf/tokens_per_second")
    if value is None:
        return "–"
    return f"{value:,.0f}" + (f" <small>{value / base:.2f}x</small>" if base and run is not reference else "")


def _time_to_loss(run: Run, reference: Run) -> str:
    target = reference.last("val/loss")
    if target is None or run.last("val/loss") is None:
        return "–"
    seconds = run.seconds_to_loss(target)
    return "not reached" if seconds is None else format_seconds(seconds)


def _compared(run: Run, reference: Run, value: float | None, base: float | None, form: str) -> str:
    """A number, and how much it is above or below the reference's."""
    if value is None:
        return "–"
    change = f" <small>{value / base - 1:+.1%}</small>" if base and run is not reference else ""
    return form.format(value) + change


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _seconds(value: float | None) -> str:
    return "–" if value is None else format_seconds(value)


def _scaled(value: float) -> str:
    """1234567 -> 1.23M"""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
