"""Folders of runs to report on."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from tests.training import compose_config
from twell.report.find import find_runs
from twell.run import run_name

L0 = [8.0, 0.0, 2.0]  # of three layers; the second never fires


def write_run(folder: Path, *overrides: str, started: float = 1e9, records: int = 6, loss: float = 3.0) -> Path:
    """A run's folder as training leaves it, without checkpoints: named as train.py would name it."""
    cfg = compose_config(*overrides)
    path = folder / run_name(cfg, overrides)
    path.mkdir(parents=True)
    OmegaConf.save(cfg, path / "config.yaml", resolve=True)
    lines = []
    for i in range(1, records + 1):
        line = {"step": 10 * i, "tokens": 20480 * i, "time": started + i, "train/loss": loss + 2 / i, "train/lr": 1e-3}
        line |= {"perf/tokens_per_second": 1000.0 + i, "perf/train_seconds": 20.0 * i, "perf/memory_gb": 0.5}
        line |= {"perf/mfu": None, "train/l1_coef": cfg.ffn.l1.coef}
        if cfg.ffn.kind != "dense_silu":
            line |= {"sparsity/l0_mean": sum(L0) / 3, "sparsity/density": sum(L0) / 3 / cfg.ffn.d_ff}
            line |= {"sparsity/l0_part/part_0": 4.0, "sparsity/l0_part/part_1": 3.0 + i}
            line |= {"sparsity/dead_share": 0.1} | {f"sparsity/l0/layer_{k:02d}": l0 for k, l0 in enumerate(L0)}
        lines.append(line)
        if i % 2 == 0:  # a validation is a record of its own, which has no time in training
            lines.append({"step": 10 * i, "tokens": 20480 * i, "time": started + i, "val/loss": loss + 1 / i})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def append(run: Path, *lines: str | bytes | dict) -> None:
    """More lines at the end of a run's metrics.jsonl."""
    with open(run / "metrics.jsonl", "ab") as file:
        for line in lines:
            text = json.dumps(line) if isinstance(line, dict) else line
            file.write((text.encode() if isinstance(text, str) else text) + b"\n")


def found(argument: object) -> list[Path]:
    """The folders that an argument of a report names."""
    return find_runs(str(argument))[0]
