"""What a report knows of its runs: metrics.jsonl and config.yaml, read forgivingly.

A run may still be written, or have been damaged: what cannot be read is left out, and remarked on.
"""

import glob
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from twell.config import CONFIG_DIR, register
from twell.errors import UserError, first_line
from twell.run import run_name

METRICS_FILE = "metrics.jsonl"
SWEEP_FILE = "multirun.yaml"  # Hydra writes it into the folder of a sweep's runs
GROUP_KEYS = ("model.name", "ffn.kind", "data.name", "optim.kind")
LONGEST_LABEL = 36  # characters
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
    rows: list[dict[str, Any]]  # one for each step with a record, in order: training and validation records joined
    config: dict[str, Any] = field(default_factory=dict)  # flat: {"ffn.l1.coef": 1e-4}; empty without config.yaml
    remarks: list[str] = field(default_factory=list)  # what could not be read
    label: str = ""  # short name in plots and tables; see `label_runs`

    def series(self, key: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
        """Finite values of metric `key` and of `x` at the same steps, float64 [n] each.

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
        tables = [row[key] for row in self.rows if isinstance(row.get(key), dict)]
        return tables[-1].get("rows", []) if tables else []

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
        rows = [row for row in self.rows if any(_number(row.get(key)) for key in keys.values())]
        table = np.full((max(keys, default=-1) + 1, len(rows)), np.nan)
        for i, key in keys.items():
            table[i] = [row[key] if _number(row.get(key)) else np.nan for row in rows]
        return np.array([row["tokens"] for row in rows], dtype=np.float64), table

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
        return -(-tokens // batch) if tokens and batch else self.config.get("steps")

    @property
    def is_dense(self) -> bool:
        return str(self.config.get("ffn.kind", "")).startswith("dense")

    @cached_property
    def d_ff(self) -> float | None:
        """Hidden width, from the config or else from the metrics."""
        mean, density = self.last("sparsity/l0_mean"), self.last("sparsity/density")
        return self.config.get("ffn.d_ff") or (mean / density if mean and density else None)

    def _points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of the rows that have a finite number under `key`."""
        pairs = [(row["step"], row[key]) for row in self.rows if _number(row.get(key))]
        return tuple(np.array(pairs, dtype=np.float64).reshape(-1, 2).T)


def load_runs(arguments: Sequence[str]) -> list[Run]:
    """The runs that the arguments name, labelled; UserError if one names nothing or no run has a record.

    An argument is a run's folder, a folder of runs, a multirun.yaml (the runs of that sweep), or a glob of these.
    """
    paths = dict.fromkeys(path.resolve() for argument in arguments for path in find_runs(argument))  # each once
    runs = [read_run(path) for path in paths]
    recorded = [run for run in runs if run.rows]
    if not recorded:
        raise UserError(f"{', '.join(arguments)}: no record yet in {METRICS_FILE}; wait for the first log line")
    for run in runs:
        if not run.rows:
            recorded[0].remarks.append(f"{run.path.name} is left out: it has no record yet")
            recorded[0].remarks.extend(run.remarks)
    label_runs(recorded)
    return recorded


def find_runs(argument: str) -> list[Path]:
    """The folders of the runs that one argument names; see `load_runs`."""
    path = Path(argument)
    if not path.exists():
        matches = [Path(match) for match in glob.glob(argument)]
        found = [run for match in sorted(matches) if match.is_dir() for run in _runs_in(match)]
        if not found:
            raise UserError(f"{argument}: no run there; name a run's folder, a folder of runs or a {SWEEP_FILE}")
        return _by_start(found)
    if path.name == SWEEP_FILE:
        return _runs_of_sweep(path)
    found = _runs_in(path) if path.is_dir() else []
    if not found:
        raise UserError(
            f"{argument}: neither a run (it has no {METRICS_FILE}), nor a folder of runs, nor a {SWEEP_FILE}"
        )
    return _by_start(found)


def _runs_in(folder: Path) -> list[Path]:
    """`folder` itself if it is a run, else the runs in it."""
    if (folder / METRICS_FILE).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{METRICS_FILE}"))


def _by_start(folders: list[Path]) -> list[Path]:
    """In the order in which they were started: the one the user had in mind, unlike that of long names."""

    def start(folder: Path) -> float:
        with open(folder / METRICS_FILE, "rb") as file:
            return (_record(file.readline()) or {}).get("time", np.inf)

    return sorted(folders, key=start)


def _runs_of_sweep(path: Path) -> list[Path]:
    """The runs of a `train.py -m` command, named as train.py names them."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(OmegaConf.load(path).hydra.overrides.task))
    except (OmegaConfBaseException, YAMLError, AttributeError) as error:
        raise UserError(f"{path}: not a file that Hydra wrote for a sweep ({first_line(error)})") from error
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [f"{o.get_key_element()}={o.get_value_element_as_str()}"]
        for o in overrides
    ]
    register()
    names = []
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        for job in itertools.product(*choices):
            names.append(run_name(compose("config", list(job)), job))
    runs = [path.parent / name for name in names]
    present = [run for run in runs if (run / METRICS_FILE).exists()]
    if not present:
        raise UserError(f"{path}: none of its {len(runs)} runs has started; the first would be {runs[0]}")
    return present


def read_run(path: Path) -> Run:
    """Read a run's folder; lines and files that cannot be read become remarks."""
    rows: dict[int, dict[str, Any]] = {}
    remarks = []
    content = (path / METRICS_FILE).read_bytes()
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _record(line)
        if record is not None:
            rows.setdefault(record["step"], {}).update(record)
        elif number == len(lines):
            remarks.append(f"{path.name}: the last line of {METRICS_FILE} is still being written, or was cut short")
        else:
            remarks.append(f"{path.name}: line {number} of {METRICS_FILE} is not a record and is skipped")
    config = {}
    try:
        config = flatten(OmegaConf.to_container(OmegaConf.load(path / "config.yaml"), resolve=True))
    except FileNotFoundError:
        remarks.append(f"{path.name}: no config.yaml, so its settings are not known")
    except (OSError, UnicodeError, ValueError, YAMLError, OmegaConfBaseException, AttributeError) as error:
        remarks.append(f"{path.name}: config.yaml cannot be read ({first_line(error)})")
    return Run(path, [rows[step] for step in sorted(rows)], config, remarks)


def _record(line: bytes) -> dict[str, Any] | None:
    """A line's record, None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int) and _number(record.get("tokens"))
    return record if whole else None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


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
        labels.append(run.path.name if chosen or not parts else " ".join(parts))
    names = [label if labels.count(label) == 1 else run.path.name for run, label in zip(runs, labels)]
    for run, name in zip(runs, names):
        if names.count(name) > 1:  # two folders of one name
            name = f"{run.path.parent.name}/{name}"
        if len(name) > LONGEST_LABEL:  # the end of an automatic name is what tells it from others
            name = f"{name[: LONGEST_LABEL // 2]}…{name[-LONGEST_LABEL // 2 :]}"
        run.label = name


def show(value: Any) -> str:
    """A config value in few characters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return f"[{', '.join(map(show, value))}]" if isinstance(value, list) else str(value)


def reference_run(runs: Iterable[Run]) -> Run:
    """What the others are compared with: the first dense run, or the first of all."""
    runs = list(runs)
    return next((run for run in runs if run.is_dense), runs[0])
