"""How the figures of a report look: colours for light and dark pages, axes, labels, and SVG that follows the page."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from twell.report.runs import Run


@dataclass(frozen=True)
class Theme:
    """Colours of a background. Any two of `series` differ by a CIE76 distance of at least 20 to people who lack the
    long, middle or short cones, and from the background by a contrast of at least 3.5."""

    background: str
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


LIGHT = Theme(
    background="#fefefe",
    ink="#1b1f24",
    muted="#667078",
    grid="#e3e6e9",
    series=("#1f78d8", "#e0600f", "#00604a", "#b8408f", "#5f4f0a", "#101c4a"),
)
DARK = Theme(
    background="#15181c",
    ink="#e6e9ec",
    muted="#98a2ab",
    grid="#2d3238",
    series=("#4f8dff", "#ffa53d", "#0fae5c", "#ff54a8", "#fff3a0", "#a6f3ff"),
)
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))  # the next round of colours
HEIGHT, WIDTH = 3.5, 6.4  # inches
LINE_HEIGHT = 0.15  # inches, of a label
LABEL_POINTS = 11  # height of a label in points
CHARACTER = 0.073  # inches, generously


def styled(runs: Sequence[Run], theme: Theme) -> list[tuple[Run, dict]]:
    """Each run with the style that it has in every plot."""
    n = len(theme.series)
    return [
        (run, {"color": theme.series[i % n], "linestyle": DASHES[i // n % len(DASHES)], "linewidth": 1.6})
        for i, run in enumerate(runs)
    ]


def new_figure(runs: Sequence[Run], theme: Theme) -> tuple[Figure, Axes]:
    """Axes with room for the labels on their right."""
    longest = max(len(run.label) for run in runs) if len(runs) > 1 else 0
    room = min(0.25 + CHARACTER * longest, 0.45 * WIDTH)
    height = max(HEIGHT, LINE_HEIGHT * len(runs) / 0.8)
    figure = Figure(figsize=(WIDTH, height), facecolor=theme.background)
    axes = figure.add_axes((0.11, 0.15, 0.87 - room / WIDTH, 0.81))
    style_axes(axes, theme)
    return figure, axes


def style_axes(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.background)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.grid(True, axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", color=theme.muted, labelcolor=theme.ink, labelsize=9, left=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(theme.ink)
        axis.label.set_fontsize(9)


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]], runs: Sequence[Run], theme: Theme) -> None:
    """Write labels (x, y, text, colour) beside the axes at the heights of their points, moved apart where they meet.

    A single run needs none.
    """
    if len(runs) == 1:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [to_axes.transform((x, y)).clip(0, 1) for x, y, _, _ in ends]  # 0 lies far below a logarithmic axis
    heights = spread([place[1] for place in places], LINE_HEIGHT * axes.figure.dpi / axes.bbox.height)
    for (x, y), height, (_, _, text, colour) in zip(places, heights, ends):
        axes.annotate(
            text,
            (x, y),
            (1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            parse_math=False,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": theme.muted,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def label_points(axes: Axes, points: list[tuple[float, float, str, str]]) -> None:
    """Write labels (x, y, text, colour) beside points, where they cover nothing: near, or else further off and with a
    line to the point."""
    point = axes.figure.dpi / 72  # pixels
    places = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [(x - 6 * point, y - 6 * point, x + 6 * point, y + 6 * point) for x, y in places]  # left, low, right, high
    right_end = axes.bbox.x1 if axes.texts else axes.figure.bbox.x1  # beside the axes others may be written
    for (x, y), (at_x, at_y, text, colour) in zip(places, points):
        half = (CHARACTER * len(text) * axes.figure.dpi / 2, LABEL_POINTS * point / 2)
        for offset in _offsets(half[0] / point):  # of the label's centre, in points
            centre = (x + offset[0] * point, y + offset[1] * point)
            box = (centre[0] - half[0], centre[1] - half[1], centre[0] + half[0], centre[1] + half[1])
            inside = axes.bbox.x0 < box[0] and box[2] < right_end and axes.bbox.y0 < box[1] and box[3] < axes.bbox.y1
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        far = abs(offset[1]) > LABEL_POINTS + 3
        axes.annotate(
            text,
            (at_x, at_y),
            offset,
            textcoords="offset points",
            color=colour,
            fontsize=9,
            parse_math=False,
            ha="center",
            va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 4} if far else None,
        )


def _offsets(half_width: float) -> Iterator[tuple[float, float]]:
    """Where the centre of a label that is 2 half_width points wide may lie, in points from its point: best first."""
    beside = half_width + 7
    for row in range(12):
        for height in (row * LABEL_POINTS, -row * LABEL_POINTS):
            yield beside, height
            yield -beside, height
        yield 0, (row + 1) * LABEL_POINTS + 2
        yield 0, -(row + 1) * LABEL_POINTS - 2


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether two boxes (left, bottom, right, top) meet."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights apart until neighbours are at least `gap` away: clusters stay around their mean, within 0 and 1."""
    clusters = [[i] for i in np.argsort(heights, kind="stable")]

    def centre(cluster: list[int]) -> float:
        margin = min(gap * (len(cluster) - 1) / 2, 0.5)
        return float(np.clip(sum(heights[i] for i in cluster) / len(cluster), margin, 1 - margin))

    merged: list[list[int]] = []
    for cluster in clusters:
        merged.append(cluster)
        while len(merged) > 1:
            below, above = merged[-2:]
            if centre(above) - centre(below) >= gap * (len(above) + len(below)) / 2:
                break
            merged[-2:] = [below + above]
    result = [0.0] * len(heights)
    for cluster in merged:
        for place, i in enumerate(cluster):
            result[i] = centre(cluster) + gap * (place - (len(cluster) - 1) / 2)
    return result


def nice_steps(unit: float) -> MaxNLocator:
    """Ticks at round numbers of `unit`."""

    class Locator(MaxNLocator):
        def tick_values(self, low: float, high: float) -> np.ndarray:
            return super().tick_values(low / unit, high / unit) * unit

    return Locator(6)


class _LogTicks(LogLocator):
    """1, 2 and 5 of each decade; more where the axis spans hardly one."""

    def tick_values(self, low: float, high: float) -> np.ndarray:
        self.set_params(subs=(1, 2, 5) if high > 12 * low else (1, 1.5, 2, 3, 4, 5, 7))
        return super().tick_values(low, high)


def log_ticks(axis: Axis, form: Callable[[float, int], str] | None = None) -> None:
    """Plain numbers (or those that `form` writes) on a logarithmic axis."""
    axis.set_major_locator(_LogTicks())
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(form or plain))


def plain(value: float, _: int | None) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def percent(value: float, _: int | None) -> str:
    return f"{100 * value:.3g} %"


def save_png(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=160, metadata={"Software": None})


def to_svg(figure: Figure, name: str) -> str:
    """SVG to stand inside a page: drawn in LIGHT, its colours become CSS variables, its ids start with `name`."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", dpi=160, metadata={"Date": None, "Creator": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', "", svg, count=1)  # the page decides
    svg = re.sub(r'id="', f'id="{name}-', svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for variable, colour in css_variables(LIGHT).items():
        svg = svg.replace(colour, f"var({variable})")
    return svg


def css_variables(theme: Theme) -> dict[str, str]:
    """The names under which a page knows a theme's colours."""
    named = {f"--{name}": getattr(theme, name) for name in ("background", "ink", "muted", "grid")}
    return named | {f"--series-{i}": colour for i, colour in enumerate(theme.series)}
