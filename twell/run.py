"""The run's folder: its name, what is in it, and whether a new start continues it.

runs/NAME/  config.yaml  metrics.jsonl  train.log  tokenizer/  checkpoints/  wandb/
"""

import fcntl
import hashlib
import math
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

from data.tokenizer import Tokenizer
from twell import checkpoint
from twell.config import Config, ConfigError
from twell.errors import UserError

# Overrides that do not make another experiment: they stay out of the automatic name.
NOT_IN_NAME = (
    "name", "out", "resume", "device", "profile", "wandb.", "log.", "eval.", "checkpoint.", "parallel", "stop_timeout",
    "data.workers", "data.dir",
    "data.name", "batch.micro", "recompute", "cuda_graph",
)  # fmt: skip
LONGEST_NAME = 100
# The groups are in the name already, by the preset they chose.
GROUPS = ("model", "ffn", "data")
# What a checkpoint depends on: another value would make it another run.
FIXED_ON_RESUME = (
    "model", "ffn.kind", "ffn.d_ff", "data.source", "data.paths", "data.field", "data.hf_path", "data.hf_name",
    "data.hf_split", "data.streaming", "data.tokenizer", "data.bpe_vocab_size", "data.val_fraction",
    "data.mask_documents", "batch.tokens", "optim.kind", "seed",
)  # fmt: skip


@dataclass
class Progress:
    """How far a run has come; part of every checkpoint."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # training tokens seen
    skipped: int = 0  # steps whose update was left out because something was not finite
    repeated: int = 0  # steps done again because a buffer of the sparse kernels was too small
    train_seconds: float = 0.0  # time in training steps, over all starts of the run
    val_loss: float | None = None  # of the last validation
    val_step: int | None = None
    best_loss: float | None = None  # lowest validation loss among the steps that have a checkpoint
    best_step: int | None = None

    def note_checkpoint(self) -> None:
        """Call before saving: is this the best checkpoint so far?"""
        validated = self.val_step == self.step and self.val_loss is not None and math.isfinite(self.val_loss)
        if validated and (self.best_loss is None or self.val_loss < self.best_loss):
            self.best_loss, self.best_step = self.val_loss, self.step


def run_name(cfg: Config, overrides: Sequence[str], sweep: Sequence[str] | None = None) -> str:
    """`name`, or MODEL-FFN-DATA followed by the other overrides of the command line.

    The same settings give the same name, however their values are written, so that starting them again resumes the
    run. `sweep`: see `swept_keys`; None for a single run. ConfigError if the runs of a sweep would share one name.
    """
    written = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    if cfg.name is not None:
        name = written.get("name", cfg.name).strip("'\"")  # as it is written: Hydra takes 1e5 for the number 100000.0
        if name in ("", ".", "..") or "/" in name:
            raise ConfigError(f"name={name}: must be a plain folder name; `out` says where runs lie")
        if sweep is not None and "name" not in sweep:
            raise ConfigError(f"name={name} in a sweep: its runs would share one folder; use out=runs/{name} instead")
        return name
    parts = [cfg.model.name, cfg.ffn.kind, cfg.data.name]
    for key, value in sorted(written.items()):
        if key not in GROUPS and not key.startswith(NOT_IN_NAME):
            parts.append(f"{key}={_canonical(OmegaConf.select(cfg, key), value)}")
    full = "-".join(parts)
    name = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in full)
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def _canonical(value: Any, written: str) -> str:
    """A config value as text, equal for equal values; `written` for a group, of which the text is the preset's name."""
    if value is None or isinstance(value, DictConfig):
        return written
    if isinstance(value, ListConfig):
        return f"[{','.join(_canonical(item, str(item)) for item in value)}]"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def swept_keys(arguments: Sequence[str]) -> list[str]:
    """The keys to which a sweep's command line gives several values, e.g. ["ffn.l1.coef"]."""
    parser = OverridesParser.create()
    overrides = parser.parse_overrides([a for a in arguments if "=" in a and not a.startswith("-")])
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def command_to_go_on(name: str, overrides: Sequence[str]) -> str:
    """The arguments that train a finished run further; its name is quoted for Hydra, which may read it otherwise."""
    length = ("name=", "steps=", "tokens=", "resume=")
    kept = [override for override in overrides if not override.startswith(length)]
    quoted = f'name="{name}"'
    return f"{shlex.join([*kept, quoted])} steps=N"


def open_run(
    cfg: Config, name: str, tokenizer: Tokenizer, log: Callable[[str], None], closing: ExitStack
) -> tuple[Path, dict | None]:
    """Make or find the run's folder (call it on the main rank only), and keep other processes out of it.

    Returns the folder and the meta of the checkpoint to continue from, None for a fresh start. `resume=never` moves
    an existing folder of that name aside. Of a run to continue, nothing is changed: see `describe_run`. The folder is
    locked until `closing` is closed. Raises a UserError if it cannot be used, or holds another experiment or an
    imported model.
    """
    run = Path(cfg.out) / name
    try:
        if cfg.resume == "never" and run.exists():
            _lock(run).close()
            aside = next(p for i in range(1, 10_000) if not (p := run.with_name(f"{name}.old-{i}")).exists())
            os.replace(run, aside)
            log(f"resume=never: the earlier run is now {aside}")
        run.mkdir(parents=True, exist_ok=True)
        closing.enter_context(_lock(run))
        checkpoint.clean_up(run, log)
    except OSError as error:
        raise UserError(
            f"out={cfg.out}: cannot use {run} ({error.strerror}); choose another `out` or `name`"
        ) from error
    steps = checkpoint.valid_steps(run)
    meta = checkpoint.read_meta(run, steps[-1]) if steps else None
    if meta is not None:
        if meta.get("imported"):
            raise UserError(f"{run} holds an imported model; train on from it with init={run} and another name=...")
        _compare_configs(run, meta["config"], OmegaConf.to_container(cfg, resolve=True), log)
        if meta["tokenizer"] != tokenizer.identity:
            raise UserError(
                f"data.tokenizer={cfg.data.tokenizer}: {run} was trained with another one (has its text changed?); "
                "give this experiment another name=..., or start over with resume=never"
            )
    return run, meta


def start_from(run: Path, tensors: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Fill a model's `tensors` with the newest weights of another run; every rank calls this with its own.

    Raises a UserError if the model has another shape there, or the run another tokenizer than the data.
    """
    try:
        step = checkpoint.find(run, "latest")
    except checkpoint.CheckpointError as error:
        raise UserError(f"init={error}") from error
    if checkpoint.read_meta(run, step)["tokenizer"] != tokenizer.identity:
        raise UserError(f"init={run}: has another tokenizer than the data; use data.tokenizer={run / 'tokenizer'}")
    if missing := checkpoint.load(run, step, tensors):
        raise UserError(f"init={run}: has no {', '.join(sorted(missing))}; it is another kind of model")


def describe_run(run: Path, cfg: Config, tokenizer: Tokenizer) -> None:
    """Write the config and the tokenizer into the run's folder, once everything has been accepted."""
    OmegaConf.save(cfg, run / "config.yaml", resolve=True)
    tokenizer.save(run / "tokenizer")


def _lock(run: Path) -> IO:
    """Hold the run until the result is closed (or the process dies); UserError if another process does."""
    file = open(run / ".lock", "a")  # noqa: SIM115 - held as long as the run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{run} is in use by another process; wait for it, or give this run another name=...") from None
    return file


def _compare_configs(run: Path, before: dict, now: dict, log: Callable[[str], None]) -> None:
    """Refuse to continue another experiment's checkpoint; report what else has changed."""
    old, new = _flat(before), _flat(now)
    changed = [key for key in new if old.get(key) != new[key]]
    for key in changed:
        if key in FIXED_ON_RESUME or key.split(".")[0] in FIXED_ON_RESUME:
            raise ConfigError(
                f"{key}={new[key]}: {run} was started with {old.get(key)}; "
                "give this experiment another name=..., or start over with resume=never"
            )
    shown = [key for key in changed if not key.startswith(NOT_IN_NAME)]
    if shown:
        log("changed since the checkpoint: " + ", ".join(f"{key} {old.get(key)} -> {new[key]}" for key in shown))


def _flat(tree: dict, prefix: str = "") -> dict:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
