"""A report on runs, from their metrics.jsonl and config.yaml alone.

    python -m twell.report RUN ... [out=report]

    python -m twell.report runs/A runs/B          # two runs
    python -m twell.report runs/l1                # all runs in a folder, such as the `out` of a sweep
    python -m twell.report runs/multirun.yaml     # the runs of the last sweep there
    python -m twell.report 'runs/nano-sparse-*'   # those that match

Writes OUT/index.html, one file that needs nothing else, and each plot as PNG for light and for dark pages. Runs are
compared with the first dense ReLU one among them, else the first dense one, else the first. A run that is still being
written is read as far as it has come; what cannot be is left out, and said. Needs matplotlib:
pip install -e '.[report]'.
"""

from collections.abc import Sequence
from pathlib import Path

from twell.arguments import run_command
from twell.errors import UserError
from twell.report.runs import Run, load_runs


def write_report(runs: Sequence[Run], out: Path) -> Path:
    """Write the page and the PNGs into the folder `out`; returns the page's path."""
    try:
        from twell.report import figures as theme
        from twell.report import page, plots
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        raise UserError("reports need matplotlib: pip install -e '.[report]'") from error
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = []
        for plot in plots.PLOTS:
            light = plot.draw(runs, theme.LIGHT)
            if light is None:  # no run has what it shows
                continue
            figures.append((plot, theme.to_svg(light, plot.name)))
            theme.save_png(light, out / f"{plot.name}.png")
            theme.save_png(plot.draw(runs, theme.DARK), out / f"{plot.name}-dark.png")
        path = out / "index.html"
        path.write_text(page.page(runs, figures), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"out={out}: cannot be written ({error.strerror}); choose another folder") from error
    return path


def main(arguments: Sequence[str]) -> None:
    if not arguments or {"-h", "--help", "help=true"} & set(arguments):
        print(__doc__.strip())
        return
    out, names = "report", []
    for argument in arguments:  # a run's name may hold a "=", too
        if argument.startswith("out="):
            out = argument.removeprefix("out=")
        else:
            names.append(argument)
    if not names:
        raise UserError("name at least one run, e.g. python -m twell.report runs/NAME")
    if not out:
        raise UserError("out=: name a folder for the page, e.g. out=report")
    runs = load_runs(names)
    for run in runs:
        for remark in run.remarks:
            print(remark)
    path = write_report(runs, Path(out))
    print(f"{path}: {', '.join(run.label for run in runs)}")


if __name__ == "__main__":
    run_command(main)
