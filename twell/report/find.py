"""Which runs an argument of a report names."""

import glob
import itertools
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from twell.config import CONFIG_DIR, explain, register
from twell.errors import UserError, first_line
from twell.report.records import METRICS_FILE, YAML_ERRORS, listed, read_record
from twell.run import run_name

SWEEP_FILE = "multirun.yaml"  # Hydra writes it into the folder of a sweep's runs
MOVED_ASIDE = re.compile(r".*\.old-\d+")  # what resume=never makes of an earlier run's name


def find_runs(argument: str) -> tuple[list[Path], list[str]]:
    """The folders of the runs that one argument names, and remarks on what is left out.

    An argument is a run's folder, a folder of runs, a multirun.yaml (the runs of that sweep), or a glob of these. Of
    several runs, those that resume=never has moved aside are left out. UserError if there is none.
    """
    path = Path(argument)
    if not os.path.exists(argument):
        matches = [Path(match) for match in sorted(glob.glob(argument))]
        found = [run for match in matches if match.is_dir() for run in _runs_in(match)]
        if not found:
            raise UserError(f"{argument}: no run there; name a run's folder, a folder of runs or a {SWEEP_FILE}")
        return _those_in_place(found)
    if path.name == SWEEP_FILE:
        return _runs_of_sweep(path)
    if is_run(path):
        return [path], []
    found = _runs_in(path) if path.is_dir() else []
    if not found:
        raise UserError(
            f"{argument}: neither a run (it has no {METRICS_FILE}), nor a folder of runs, nor a {SWEEP_FILE}"
        )
    return _those_in_place(found)


def is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file()


def _runs_in(folder: Path) -> list[Path]:
    """`folder` itself if it is a run, else the runs in it."""
    return [folder] if is_run(folder) else [path for path in sorted(folder.glob("*")) if is_run(path)]


def _those_in_place(folders: list[Path]) -> tuple[list[Path], list[str]]:
    """Without those that were moved aside, unless there are no others; in the order of their start."""
    aside = [folder for folder in folders if MOVED_ASIDE.fullmatch(folder.name)]
    if len(aside) in (0, len(folders)):
        return _by_start(folders), []
    remark = f"left out, since resume=never has moved them aside: {listed(folder.name for folder in aside)}"
    return _by_start(folder for folder in folders if folder not in aside), [remark]


def _by_start(folders: Iterable[Path]) -> list[Path]:
    """In the order in which they were started: the one the user had in mind, unlike that of long names."""

    def start(folder: Path) -> float:
        try:
            with open(folder / METRICS_FILE, "rb") as file:
                row, _ = read_record(file.readline())
        except OSError:  # said where the rest is read
            row = None
        return (row or {}).get("time", math.inf)

    return sorted(folders, key=start)


def _runs_of_sweep(path: Path) -> tuple[list[Path], list[str]]:
    """The runs of a `train.py -m` command, named as train.py names them."""
    folders, remarks, refused = [], [], []
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        for job in _jobs_of_sweep(path):
            try:
                folders.append(path.parent / run_name(compose("config", list(job)), job))
            except (UserError, HydraException, OmegaConfBaseException) as error:
                refused.append(f"{' '.join(job)} ({explain(error)})")
    if refused:
        remarks.append(f"left out, since train.py refuses them: {listed(refused)}")
    started = [folder for folder in folders if is_run(folder)]
    waiting = [folder.name for folder in folders if folder not in started]
    if waiting:
        remarks.append(f"left out, since they have not started: {listed(waiting)}")
    if not started:
        raise UserError(f"{path}: none of its {len(folders) + len(refused)} runs can be shown; {'; '.join(remarks)}")
    return started, remarks


def _jobs_of_sweep(path: Path) -> list[tuple[str, ...]]:
    """The overrides of each job of a sweep, in order; UserError for a file that tells of none."""
    try:
        tasks = OmegaConf.select(OmegaConf.load(path), "hydra.overrides.task")
        if not OmegaConf.is_list(tasks) or not all(isinstance(task, str) for task in tasks):
            raise ValueError("hydra.overrides.task is no list of overrides")
        choices = [
            [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
            if o.is_sweep_override()
            else [f"{o.get_key_element()}={o.get_value_element_as_str()}"]
            for o in OverridesParser.create().parse_overrides(list(tasks))
        ]
    except (*YAML_ERRORS, HydraException) as error:
        raise UserError(f"{path}: not a file that Hydra wrote for a sweep ({first_line(error)})") from error
    return list(itertools.product(*choices))
