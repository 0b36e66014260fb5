"""Runs train.py's `main` inside the test process, at a size that takes a second."""

import contextlib
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

import train
from twell.config import CONFIG_DIR, register
from twell.faults import SIGNALS
from twell.model import Transformer

TINY = [
    "data=text",
    "model.n_layers=2",
    "model.d_model=32",
    "model.n_heads=2",
    "model.n_kv_heads=1",
    "model.d_ff=64",
    "model.d_ff_nongated=96",
    "model.seq_len=32",
    "batch.tokens=256",
    "batch.micro=4",
    "optim.schedule.warmup=2",
    "ffn.l1.warmup_steps=0",
    "data.val_fraction=0.2",
    "eval.tokens=256",
    "eval.sample_tokens=4",
    "log.interval=1",
    "wandb.mode=disabled",
]

PATIENCE = 120.0  # seconds: on a busy machine several processes that start at once take half a minute


def compose_config(*overrides: str) -> DictConfig:
    """The config that `python train.py OVERRIDES` would run with; Hydra's global state knows the overrides, too."""
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = compose("config", list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def tiny_text(folder: Path, n_documents: int = 16) -> Path:
    """A folder of small text files, all different."""
    words = [
        "the",
        "sparse",
        "model",
        "reads",
        "one",
        "word",
        "after",
        "another",
        "and",
        "learns",
        "which",
        "come",
        "next",
    ]
    generator = torch.Generator().manual_seed(0)
    texts = folder / "texts"
    if texts.exists():
        return texts
    texts.mkdir()
    for i in range(n_documents):
        picks = torch.randint(len(words), (40,), generator=generator).tolist()
        (texts / f"{i:03d}.txt").write_text(f"document {i}: " + " ".join(words[k] for k in picks))
    return texts


def tiny_overrides(folder: Path, *overrides: str) -> list[str]:
    """TINY, with data and output below `folder`."""
    return [*TINY, f"data.paths=[{tiny_text(folder)}]", f"data.dir={folder}/datasets", f"out={folder}/runs", *overrides]


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """The process gets its own signal handlers back in the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_main(*overrides: str) -> None:
    """`python train.py OVERRIDES` in this process."""
    with signal_handlers_kept():
        try:
            train.main.__wrapped__(compose_config(*overrides))
        except SystemExit as end:
            assert end.code == 0


def train_tiny(folder: Path, *overrides: str) -> list[dict]:
    """Train below `folder` (same folder = same data); returns the records of metrics.jsonl.

    `name=...` must be among the overrides.
    """
    run_main(*tiny_overrides(folder, *overrides))
    return read_metrics(folder / "runs" / next(o for o in overrides if o.startswith("name=")).removeprefix("name="))


def read_metrics(run: Path) -> list[dict]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict]) -> dict[int, float]:
    """Training loss by step."""
    return {r["step"]: r["train/loss"] for r in records if "train/loss" in r}


def forward_with_nan(at_call: int) -> Callable:
    """`Transformer.forward`, but the given pass with targets returns a NaN loss, whose gradient is NaN too."""
    forward, calls = Transformer.forward, []

    def broken(self, tokens, targets=None, *args, **kwargs):
        out = forward(self, tokens, targets, *args, **kwargs)
        if targets is not None and torch.is_grad_enabled():
            calls.append(None)
            if len(calls) == at_call:
                return out._replace(loss_sum=out.loss_sum * math.nan)
        return out

    return broken


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    """Until `condition` holds; fails when `process` ends before that, or after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
