"""The plots of a report: what a run lost, what it took, and where it is sparse.

Each plot is a function of the runs and a theme that returns a matplotlib Figure, or None when no run has what it shows.
Lines carry their labels at their right end, so that nobody needs to match colours with a legend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, MaxNLocator

from twell.report.figures import (
    WIDTH,
    Theme,
    label_ends,
    label_points,
    log_ticks,
    new_figure,
    nice_steps,
    percent,
    plain,
    style_axes,
    styled,
)
from twell.report.runs import Run


@dataclass(frozen=True)
class Plot:
    """A figure of the report; `caption` says what is seen."""

    name: str
    title: str
    caption: str
    draw: Callable[[Sequence[Run], Theme], Figure | None]


def loss_over_tokens(runs: Sequence[Run], theme: Theme) -> Figure | None:
    return _loss(runs, theme, "tokens", "training tokens", EngFormatter(sep=""))


def loss_over_time(runs: Sequence[Run], theme: Theme) -> Figure | None:
    longest = max((run.last("perf/train_seconds") or 0.0 for run in runs), default=0.0)
    units = (("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, seconds = next((name, size) for name, size in units if longest >= 3 * size or size == 1)
    formatter = FuncFormatter(lambda value, _: f"{value / seconds:g}")
    return _loss(runs, theme, "perf/train_seconds", f"{unit} of training", formatter, unit_size=seconds)


def speed(runs: Sequence[Run], theme: Theme) -> Figure | None:
    return _lines(runs, theme, "perf/tokens_per_second", "tokens per second", EngFormatter(sep=""))


def active_neurons(runs: Sequence[Run], theme: Theme) -> Figure | None:
    """With a dotted line where a controller was told to go."""
    targets = [run.config.get("ffn.l1.target_l0") for run in runs]
    label = "active neurons per token"
    return _lines(runs, theme, "sparsity/l0_mean", label, FuncFormatter(plain), log=True, goals=targets)


def coefficient(runs: Sequence[Run], theme: Theme) -> Figure | None:
    if all(np.ptp(run.series("train/l1_coef")[1]) == 0 for run in runs if run.last("train/l1_coef") is not None):
        return None
    return _lines(runs, theme, "train/l1_coef", "L1 coefficient", FuncFormatter(plain))


def dead_share(runs: Sequence[Run], theme: Theme) -> Figure | None:
    if not any(run.series("sparsity/dead_share")[1].any() for run in runs):
        return None
    return _lines(runs, theme, "sparsity/dead_share", "dead neurons", FuncFormatter(percent))


def by_layer(runs: Sequence[Run], theme: Theme) -> Figure | None:
    return _profile(runs, theme, "sparsity/l0/layer_", "layer", log=True)


def by_position(runs: Sequence[Run], theme: Theme) -> Figure | None:
    return _profile(runs, theme, "sparsity/l0_part/part_", "eighth of the sequence, from 0", log=False)


def heatmaps(runs: Sequence[Run], theme: Theme) -> Figure | None:
    """Layer by tokens, one panel for each run with sparsity, all on one scale."""
    panels = [(run, *_densities(run)) for run in runs]
    panels = [panel for panel in panels if panel[2].size]
    if not panels:
        return None
    columns = min(2, len(panels))
    n_rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2 * WIDTH, 0.5 + 2.2 * n_rows), facecolor=theme.background, layout="constrained")
    grid = figure.subplots(n_rows, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.remove()
    grid = grid[: len(panels)]
    positive = np.concatenate([density[density > 0] for _, _, density in panels])
    low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
    norm = LogNorm(low, high if high > low else 2 * low)
    for axes, panel in zip(grid, panels):
        image = _heatmap(axes, *panel, norm, theme)
    for axes in grid[::columns]:
        axes.set_ylabel("layer")
    for axes in grid[-columns:]:
        axes.set_xlabel("training tokens")
    in_percent = all(run.d_ff for run, _, _ in panels)
    bar = figure.colorbar(image, ax=list(grid), fraction=0.025, pad=0.01)
    bar.set_label("active neurons" if in_percent else "active neurons per token", color=theme.ink)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=theme.muted, labelcolor=theme.ink)
    log_ticks(bar.ax.yaxis, percent if in_percent else plain)
    return figure


def _heatmap(
    axes: Axes, run: Run, tokens: np.ndarray, density: np.ndarray, norm: LogNorm, theme: Theme
) -> ScalarMappable:
    """density [layers, n] at `tokens` [n]; where nothing fires, which has no logarithm, gets the lowest colour."""
    style_axes(axes, theme)
    axes.grid(False)
    edges = np.concatenate([[0], (tokens[1:] + tokens[:-1]) / 2, tokens[-1:]])
    layers = np.arange(len(density) + 1) - 0.5
    shown = np.where(np.isnan(density), np.nan, density.clip(min=norm.vmin))
    image = axes.pcolormesh(edges, layers, shown, norm=norm, cmap="viridis", rasterized=True)
    routed_at, routes = run.table("sparsity/route/layer_")
    for layer, route in enumerate(routes):
        axes.plot(routed_at, np.where(route == 1, layer, np.nan), color="white", linewidth=1.2)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_title(run.label, color=theme.ink, fontsize=10, loc="left", parse_math=False)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return image


def pareto(runs: Sequence[Run], theme: Theme) -> Figure | None:
    """Validation loss against active neurons; runs without sparsity are lines across."""
    losses = [(run, run.last("val/loss"), run.last("sparsity/l0_mean"), style) for run, style in styled(runs, theme)]
    losses = [entry for entry in losses if entry[1] is not None]
    points = [entry for entry in losses if entry[2]]
    if len(losses) < 2 or not points:
        return None
    figure, axes = new_figure(runs, theme)
    best, front = np.inf, []
    for _, loss, l0, _ in sorted(points, key=lambda entry: entry[2]):  # sparsest first; each must lose less
        if loss < best:
            best = loss
            front.append((l0, loss))
    axes.plot(*zip(*front), color=theme.muted, linewidth=1, zorder=1)
    for _, loss, l0, style in points:
        axes.plot(l0, loss, marker="o", markersize=7, color=style["color"], zorder=3)
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.15)
    ends = []
    for run, loss, l0, style in losses:
        if not l0:
            axes.axhline(loss, zorder=2, **style)
            ends.append((axes.get_xlim()[1], loss, run.label, style["color"]))
    axes.set_xlim(axes.get_xlim())  # as it is: the labels must not move it
    log_ticks(axes.xaxis)
    axes.set_xlabel("active neurons per token, mean over layers")
    axes.set_ylabel("validation loss, nats per token")
    label_ends(axes, ends, runs, theme)
    label_points(axes, [(l0, loss, run.label, style["color"]) for run, loss, l0, style in points])
    return figure


PLOTS = (
    Plot(
        "loss-tokens",
        "Loss over tokens",
        "Validation loss (dots) over training loss (thin). The first tenth of a run may lie above the plot.",
        loss_over_tokens,
    ),
    Plot(
        "loss-time",
        "Loss over time",
        "The same losses over the time spent in training steps; validation and checkpoints are not counted.",
        loss_over_time,
    ),
    Plot("speed", "Speed", "Training tokens per second over all GPUs.", speed),
    Plot(
        "pareto",
        "What sparsity costs",
        "Validation loss and active neurons at the end of each run: lower and further left is better. The line joins "
        "the runs that no sparser run beats.",
        pareto,
    ),
    Plot(
        "l0-tokens",
        "Sparsity over tokens",
        "Active neurons per token, mean over layers. Dotted: what ffn.l1.target_l0 asked for.",
        active_neurons,
    ),
    Plot("l0-layers", "Sparsity by layer", "Mean over the last tenth of each run's records.", by_layer),
    Plot(
        "l0-position",
        "Sparsity by position",
        "Along the training sequences, mean over layers and the last tenth of each run's records.",
        by_position,
    ),
    Plot("l1", "L1 coefficient", "The weight of the L1 term in the loss.", coefficient),
    Plot("dead", "Dead neurons", "Share of all neurons that have not fired for long.", dead_share),
    Plot(
        "heatmap",
        "Sparsity by layer and time",
        "Share of the layer's neurons that are active on a token. Layer 0 reads the embedding. White lines: where a "
        "layer computed only the non-zeros.",
        heatmaps,
    ),
)


def _loss(
    runs: Sequence[Run], theme: Theme, x: str, x_label: str, x_format: Formatter, unit_size: float = 1.0
) -> Figure | None:
    figure, axes = new_figure(runs, theme)
    ends, seen = [], []
    for run, style in styled(runs, theme):
        train_x, train = run.series("train/loss", x)
        val_x, val = run.series("val/loss", x)
        axes.plot(train_x, train, **{**style, "linewidth": 0.9, "alpha": 0.5})
        axes.plot(val_x, val, marker="o", markersize=3, **style)
        for xs, ys in ((train_x, train), (val_x, val)):
            seen.append(ys[xs >= 0.1 * max(xs, default=0)])
        for xs, ys in ((val_x, val), (train_x, train)):
            if len(xs):
                ends.append((xs[-1], ys[-1], run.label, style["color"]))
                break
    if not ends:
        return None
    settled = np.concatenate(seen)
    pad = 0.04 * np.ptp(settled) or 0.1
    axes.set_ylim(settled.min() - pad, settled.max() + pad)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(nice_steps(unit_size))
    axes.xaxis.set_major_formatter(x_format)
    axes.set_xlabel(x_label)
    axes.set_ylabel("loss, nats per token")
    label_ends(axes, ends, runs, theme)
    return figure


def _lines(
    runs: Sequence[Run],
    theme: Theme,
    key: str,
    y_label: str,
    y_format: Formatter,
    *,
    log: bool = False,
    goals: Sequence[float | None] = (),
) -> Figure | None:
    """A metric over tokens, from 0 unless logarithmic; `goals` are dotted lines across, one for each run."""
    figure, axes = new_figure(runs, theme)
    ends = []
    for run, style in styled(runs, theme):
        tokens, values = run.series(key)
        if len(tokens):
            axes.plot(tokens, values, **style)
            ends.append((tokens[-1], values[-1], run.label, style["color"]))
    if not ends:
        return None
    for goal, (_, style) in zip(goals, styled(runs, theme)):
        if goal:
            axes.axhline(goal, color=style["color"], linestyle=":", linewidth=1)
    if log:
        _log_y(axes)
    else:
        axes.set_ylim(0, max(1.08 * axes.dataLim.y1, 1e-3))
        axes.yaxis.set_major_formatter(y_format)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("training tokens")
    axes.set_ylabel(y_label)
    label_ends(axes, ends, runs, theme)
    return figure


def _profile(runs: Sequence[Run], theme: Theme, name: str, x_label: str, *, log: bool) -> Figure | None:
    """Active neurons at the end of the runs, by layer or by something else that is numbered."""
    figure, axes = new_figure(runs, theme)
    ends = []
    for run, style in styled(runs, theme):
        values = run.recent(name)
        known = np.flatnonzero(np.isfinite(values))
        if len(known):
            axes.plot(known, values[known], marker="o", markersize=3, **style)
            ends.append((known[-1], values[known[-1]], run.label, style["color"]))
    if not ends:
        return None
    if log:
        _log_y(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x_label)
    axes.set_ylabel("active neurons per token")
    label_ends(axes, ends, runs, theme)
    return figure


def _log_y(axes: Axes) -> None:
    """Make the y-axis logarithmic, if a line has anything to show there."""
    if any((np.asarray(line.get_ydata()) > 0).any() for line in axes.lines):
        axes.set_yscale("log")
        log_ticks(axes.yaxis)


def _densities(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n] and density [layers, n] of a run; active neurons instead when its width is not known."""
    tokens, l0 = run.table("sparsity/l0/layer_")
    return tokens, l0 / (run.d_ff or 1)
