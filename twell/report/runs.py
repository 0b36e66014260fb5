"""What a report knows of its runs: series, tables and labels made of clean rows and settings (see records.py)."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from twell.errors import UserError
from twell.report.find import find_runs
from twell.report.records import CONFIG_FILE, METRICS_FILE, Row, printable, read_config, read_metrics
from twell.run import LONGEST_NAME

GROUP_KEYS = ("model.name", "ffn.kind", "data.name", "optim.kind")
LONGEST_LABEL = 36  # characters
HASH = re.compile(r"-[0-9a-f]{8}$")
# Keys that make no other experiment: they are no difference worth showing.
NOT_COMPARED = (
    "name",
    "out",
    "resume",
    "profile",
    "wandb.",
    "log.",
    "eval.",
    "checkpoint.",
    "data.workers",
    "data.dir",
)


@dataclass
class Run:
    """One run's records and settings."""

    path: Path
    rows: list[Row]  # one for each step with a record, in order
    config: dict[str, Any] = field(default_factory=dict)  # flat: {"ffn.l1.coef": 1e-4}; empty without config.yaml
    remarks: list[str] = field(default_factory=list)  # what could not be read
    label: str = ""  # short name in plots and tables; see `label_runs`

    def series(self, key: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
        """Values of metric `key` and of `x` at the same steps, float64 [n] each.

        A record of a validation has no time: `x` is interpolated over steps (tokens and seconds only ever rise).
        """
        steps, values = self._points(key)
        x_steps, x_values = self._points(x)
        if not len(x_steps):
            return np.empty(0), np.empty(0)
        return np.interp(steps, x_steps, x_values), values

    def last(self, key: str) -> float | None:
        """The latest value of a metric, None if it was never logged."""
        values = self._points(key)[1]
        return float(values[-1]) if len(values) else None

    def last_rows(self, key: str) -> list[list[Any]]:
        """The rows of a table's latest record; empty if it was never logged."""
        return next((row[key] for row in reversed(self.rows) if key in row), [])

    def median(self, key: str) -> float | None:
        """The median over all records but the first, which pays for compilation and warm-up."""
        values = self._points(key)[1]
        return float(np.median(values[1:] if len(values) > 1 else values)) if len(values) else None

    def table(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [n] and the values [k, n] of a metric that is logged k times a record, NaN where one is missing.

        name: without the number at its end, such as "sparsity/l0/layer_".
        """
        pattern = re.compile(re.escape(name) + r"(\d+)")
        keys = {int(match[1]): key for row in self.rows for key in row if (match := pattern.fullmatch(key))}
        rows = [row for row in self.rows if not row.keys().isdisjoint(keys.values())]
        table = np.full((max(keys, default=-1) + 1, len(rows)), np.nan)
        for i, key in keys.items():
            table[i] = [row.get(key, np.nan) for row in rows]
        return np.array([row["tokens"] for row in rows]), table

    def recent(self, name: str) -> np.ndarray:
        """The values [k] of such a metric, mean over the last tenth of its records."""
        values = self.table(name)[1]
        last = values[:, -max(1, values.shape[1] // 10) :]
        return np.ma.masked_invalid(last).mean(axis=1).filled(np.nan) if values.size else np.empty(0)

    def seconds_to_loss(self, loss: float) -> float | None:
        """Training time when the validation loss first was at most `loss`, interpolated; None if it never was."""
        seconds, losses = self.series("val/loss", "perf/train_seconds")
        reached = np.flatnonzero(losses <= loss)
        if not len(reached):
            return None
        i = reached[0]
        if i == 0:
            return float(seconds[0])
        share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
        return float(seconds[i - 1] + share * (seconds[i] - seconds[i - 1]))

    @property
    def step(self) -> int:
        return self.rows[-1]["step"]

    @property
    def steps(self) -> int | None:
        """Length of the run, None without a config that says so."""
        batch, tokens = self.config.get("batch.tokens"), self.config.get("tokens")
        return math.ceil(tokens / batch) if tokens and batch else self.config.get("steps")

    @cached_property
    def d_ff(self) -> float | None:
        """Hidden width, from the config or else from the metrics."""
        mean, density = self.last("sparsity/l0_mean"), self.last("sparsity/density")
        return self.config.get("ffn.d_ff") or (mean / density if mean and density else None)

    def _points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the rows that have `key`."""
        pairs = [(row["step"], row[key]) for row in self.rows if key in row]
        return tuple(np.array(pairs, dtype=np.float64).reshape(-1, 2).T)


def load_runs(arguments: Sequence[str]) -> list[Run]:
    """The runs that the arguments name (see `find_runs`), labelled; remarks on all are the first one's.

    UserError if an argument names nothing, or no run has a record.
    """
    found = [find_runs(argument) for argument in arguments]
    paths = dict.fromkeys(path.resolve() for folders, _ in found for path in folders)  # each once
    runs = [read_run(path) for path in paths]
    recorded = [run for run in runs if run.rows]
    if not recorded:
        raise UserError(f"{', '.join(arguments)}: no record yet in {METRICS_FILE}; wait for the first log line")
    remarks = [remark for _, some in found for remark in some]
    for run in runs:
        if not run.rows:
            remarks += [f"{printable(run.path.name)} is left out: it has no record yet", *run.remarks]
    recorded[0].remarks[:0] = dict.fromkeys(remarks)
    label_runs(recorded)
    return recorded


def read_run(path: Path) -> Run:
    """Read a run's folder; what cannot be read becomes a remark."""
    rows, remarks = read_metrics(path / METRICS_FILE)
    config, more = read_config(path / CONFIG_FILE)
    return Run(path, rows, config, [f"{printable(path.name)}: {remark}" for remark in remarks + more])


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """The config keys that have several values, in the order of the config.

    A run that lacks a key, because it is older than the key, does not count for it.
    """
    values: dict[str, list[Any]] = {}
    for run in runs:
        for key, value in run.config.items():
            values.setdefault(key, []).append(value)
    return [key for key, seen in values.items() if not key.startswith(NOT_COMPARED) and any(v != seen[0] for v in seen)]


def label_runs(runs: Sequence[Run]) -> None:
    """Give each run a short label: its own name if somebody chose one, else what sets it apart from the others."""
    keys = [key for key in GROUP_KEYS if key in differing_keys(runs)]
    labels = []
    for run in runs:
        peers = [other for other in runs if all(other.config.get(key) == run.config.get(key) for key in keys)]
        parts = [str(run.config.get(key)) for key in keys]
        parts += [f"{key.rpartition('.')[2]} {show(run.config.get(key))}" for key in differing_keys(peers)]
        chosen = not run.config or run.config.get("name") is not None
        parts = parts or [str(run.config[key]) for key in GROUP_KEYS if key in run.config]
        labels.append(_folder_name(run) if chosen or not parts else " ".join(parts))
    folders = [_folder_name(run) for run in runs]
    labels = _replace_twins(labels, folders)
    labels = _replace_twins(labels, [f"{run.path.parent.name}/{folder}" for run, folder in zip(runs, folders)])
    labels = [_shorten(printable(label)) for label in labels]
    labels = _replace_twins(labels, [f"{label} ({i})" for i, label in enumerate(labels, start=1)])
    for run, label in zip(runs, labels):
        run.label = label


def _folder_name(run: Run) -> str:
    """A run's name, without the hash at the end of a long automatic one."""
    return HASH.sub("", run.path.name) if len(run.path.name) > LONGEST_NAME else run.path.name


def _replace_twins(labels: Sequence[str], others: Sequence[str]) -> list[str]:
    """Each label that is not the only one of its kind gives way to the other one."""
    return [label if labels.count(label) == 1 else other for label, other in zip(labels, others)]


def _shorten(label: str) -> str:
    """At most LONGEST_LABEL characters: the end tells it from others, too."""
    if len(label) <= LONGEST_LABEL:
        return label
    half = LONGEST_LABEL // 2
    return f"{label[: half - 1].rstrip()}…{label[-half:].lstrip()}"


def show(value: Any) -> str:
    """A config value in few characters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return f"[{', '.join(map(show, value))}]" if isinstance(value, list) else str(value)


def reference_run(runs: Iterable[Run]) -> Run:
    """What the others are compared with: the first run with a dense ReLU FFN, which is what an L1 penalty
    starts from; else the first with dense SiLU, or the first of all."""
    runs = list(runs)
    kinds = [run.config.get("ffn.kind") for run in runs]
    return next((runs[kinds.index(kind)] for kind in ("dense_relu", "dense_silu") if kind in kinds), runs[0])
