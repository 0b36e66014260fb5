"""The border of a report: metrics.jsonl and config.yaml become clean values here, or are left out with a remark.

A run may still be written, or have been damaged. Whatever passes has the types and bounds written below, so that tables
and plots need not doubt it; what is never shown is not read. There is one remark for each kind of damage, not for each
place of it.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from twell.config import Config
from twell.errors import first_few, first_line

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
LARGEST = 1e30  # of any number; none is negative
NUMBERS = {
    "time", "train/loss", "train/l1_coef", "val/loss", "sparsity/l0_mean", "sparsity/density", "sparsity/dead_share",
    "perf/tokens_per_second", "perf/train_seconds", "perf/memory_gb", "perf/executed_flops",
}  # fmt: skip
NUMBERED = re.compile(r"sparsity/(?:l0/layer|route/layer|l0_part/part)_(\d+)")
MOST_DIGITS = 3  # of such a number: no model has 1000 layers, and a table gets a row for each
TABLES = {"sparsity/tokens_most", "sparsity/tokens_fewest"}
LONGEST_LISTED = 80  # characters of a thing that a remark names
# Whatever reading a YAML file raises, from the disk to the depth of its nesting
YAML_ERRORS = (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException)

Row = dict[str, Any]  # "step": int, "tokens" and metrics: float, tables: list of (token, active neurons, times seen)


def is_number(value: Any) -> bool:
    """Whether a value can be drawn; not so for NaN, and for integers that no float can hold."""
    return type(value) in (int, float) and 0 <= value <= LARGEST


def is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


SETTINGS: dict[str, Callable[[Any], bool]] = {  # those that are computed with; others are only shown
    "batch.tokens": is_count,
    "tokens": is_count,
    "steps": is_count,
    "ffn.d_ff": is_count,
    "ffn.l1.target_l0": is_number,
}


def read_metrics(path: Path) -> tuple[list[Row], list[str]]:
    """One row for each step with a record, in order, training and validation records joined; and remarks."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        return [], [f"{path.name} cannot be read ({error.strerror})"]
    rows: dict[int, Row] = {}
    skipped: list[int] = []
    unfit: dict[str, int] = {}  # the line where a key first had a value that does not fit
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row, left_out = read_record(line)
        for key in left_out:
            unfit.setdefault(key, number)
        if row is None:
            skipped.append(number)
        else:
            rows.setdefault(row["step"], {}).update(row)
    remarks = []
    if skipped and skipped[-1] == len(lines):
        skipped.pop()
        remarks.append(f"the last line of {path.name} is still being written, or was cut short")
    if skipped:
        remarks.append(f"lines of {path.name} that are no records are skipped: {listed(skipped)}")
    if unfit:
        places = [f"{key} (line {number})" for key, number in unfit.items()]
        remarks.append(f"values of {path.name} that do not fit their names are left out: {listed(places)}")
    return [rows[step] for step in sorted(rows)], remarks


def read_record(line: bytes) -> tuple[Row | None, list[str]]:
    """A line's row, None if it is no record; and the keys whose values do not fit. null stands for no value."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None, []
    if not isinstance(record, dict) or not is_number(record.get("tokens")):
        return None, []
    step = record.get("step")
    if type(step) is not int or not is_number(step):
        return None, []
    row: Row = {"step": step, "tokens": float(record["tokens"])}
    unfit = []
    for key, value in record.items():
        if value is None:
            continue
        if key in TABLES:
            row[key] = _token_rows(value)
            fits = isinstance(value, dict) and row[key] == value.get("rows")
        elif key in NUMBERS or (match := NUMBERED.fullmatch(key)):
            fits = is_number(value) and (key in NUMBERS or len(match[1]) <= MOST_DIGITS)
            if fits:
                row[key] = float(value)
        else:
            continue
        if not fits:
            unfit.append(key)
    return row, unfit


def _token_rows(table: Any) -> list[list[Any]]:
    """The rows [token, active neurons, times seen] of a table that are such rows."""
    rows = table.get("rows") if isinstance(table, dict) else None
    return [row for row in rows if _is_token_row(row)] if isinstance(rows, list) else []


def _is_token_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and all(map(is_number, row[1:]))


def read_config(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A run's settings, flat ({"ffn.l1.coef": 1e-4}), empty if they cannot be read; and remarks."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        if not isinstance(tree, dict) or not tree.keys() & {field.name for field in dataclasses.fields(Config)}:
            return {}, [f"{path.name} holds no settings"]
        settings = flatten(tree)
    except FileNotFoundError:
        return {}, [f"no {path.name}, so the settings are not known"]
    except YAML_ERRORS as error:
        return {}, [f"{path.name} cannot be read ({printable(first_line(error))})"]
    unfit = [key for key, fits in SETTINGS.items() if settings.get(key) is not None and not fits(settings[key])]
    for key in unfit:
        del settings[key]
    return settings, [f"settings of {path.name} that cannot be are left out: {listed(unfit)}"] if unfit else []


def flatten(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def printable(text: str) -> str:
    """`text` on one line that any terminal, page and font can take."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def listed(things: Iterable[Any]) -> str:
    """The first of some things, each cut to a length that can be read, and how many more there are."""
    texts = [printable(str(thing)) for thing in things]
    return first_few([text if len(text) <= LONGEST_LISTED else f"{text[:LONGEST_LISTED]}…" for text in texts])
