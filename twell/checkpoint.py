"""Checkpoints: atomic, complete, resumable.

One checkpoint is one folder, runs/NAME/checkpoints/step-00001000/, written by torch.distributed.checkpoint: every
tensor of the run under a flat name, and meta.json with everything that is not a tensor. It is written under a
temporary name and renamed when it is complete and on disk, so a folder with its final name is valid; what a killed
save leaves behind is reported and removed at the next start.

Tensor names: model.<parameter>, optim.<parameter>.<state>, sparsity.<counter>, rng.<generator>.rank<r>.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from twell.errors import UserError

FORMAT = 1  # raised when the layout changes in a way that older code cannot read
META = "meta.json"
UNFINISHED = ".unfinished-"


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names it and says why."""


def folder(run: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def valid_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints of `run`, ascending."""
    return sorted(int(meta.parent.name.split("-")[1]) for meta in (run / "checkpoints").glob(f"step-*/{META}"))


def read_meta(run: Path, step: int) -> dict:
    """meta.json of one checkpoint; CheckpointError if a newer version of this code wrote it."""
    path = folder(run, step) / META
    meta = json.loads(path.read_text())
    if meta["format"] > FORMAT:
        raise CheckpointError(
            f"{path.parent}: format {meta['format']} is newer than this code's {FORMAT}; update the code"
        )
    return meta


def save(run: Path, step: int, tensors: dict[str, Tensor], meta: dict) -> None:
    """Write the checkpoint of `step`; every rank calls this with its own tensors.

    Tensors of the same name on several ranks are taken to be equal and are written once. Returns when the checkpoint
    is complete on disk.
    """
    final = folder(run, step)
    unfinished = final.with_name(UNFINISHED + final.name)
    if _is_main():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    _barrier()
    with _quiet_dcp():
        dcp.save(
            tensors, storage_writer=dcp.FileSystemWriter(unfinished, sync_files=True), no_dist=not dist.is_initialized()
        )
    if _is_main():
        with open(unfinished / META, "w") as file:
            json.dump({**meta, "format": FORMAT, "step": step}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        _sync_folder(final.parent)
    _barrier()


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for step in valid_steps(run)[:-keep]:
        if step != best_step:
            shutil.rmtree(folder(run, step))


def remove_unfinished(run: Path, log: Callable[[str], None]) -> None:
    """Delete what a killed save left behind, saying so."""
    for path in sorted((run / "checkpoints").glob(f"{UNFINISHED}*")):
        log(f"removing {path}: a save that did not finish")
        shutil.rmtree(path)


def load(run: Path, step: int, tensors: dict[str, Tensor]) -> set[str]:
    """Fill `tensors` in place from the checkpoint of `step`.

    Returns the names that the checkpoint does not have (they are left as they were). Raises CheckpointError when a
    tensor has another shape there: it is the checkpoint of another model.
    """
    path = folder(run, step)
    reader = dcp.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            raise CheckpointError(f"{path}: {name} is {list(entry.size)} there and {list(tensor.shape)} in this model")
    wanted = {name: tensor for name, tensor in tensors.items() if name in stored}
    with _quiet_dcp():
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    return tensors.keys() - wanted.keys()


def load_model(run: Path, model: nn.Module, which: str = "latest") -> dict:
    """Fill `model`'s parameters from a checkpoint of `run` and return its meta.

    Args:
        which: "latest", "best" (lowest validation loss) or a step number.
    """
    steps = valid_steps(run)
    if not steps:
        raise CheckpointError(f"{run}: no checkpoint there; train first, or name another run")
    if which == "latest":
        step = steps[-1]
    elif which == "best":
        step = read_meta(run, steps[-1])["progress"]["best_step"]
        if step is None:
            raise CheckpointError(f"{run}: no best checkpoint, since none was validated; use latest or a step")
    elif which.isdigit():
        step = int(which)
    else:
        raise CheckpointError(f"checkpoint {which!r}: must be latest, best or a step; there are {_listed(steps)}")
    if step not in steps:
        raise CheckpointError(f"{run}: no checkpoint of step {step}; there are {_listed(steps)}")
    missing = load(run, step, model_tensors(model))
    if missing:
        raise CheckpointError(
            f"{folder(run, step)}: has no {', '.join(sorted(missing))}; it is the checkpoint of another model"
        )
    return read_meta(run, step)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers under their checkpoint names."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """The state of this rank's random generators."""
    state = {f"rng.cpu.rank{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"rng.cuda.rank{rank}"] = torch.cuda.get_rng_state(device)
    return state


def restore(run: Path, step: int, tensors: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Fill `tensors` and set this rank's random generators from the checkpoint of `step`.

    A rank that the saving run did not have keeps the generators it was seeded with. Raises CheckpointError when a
    tensor is missing.
    """
    rng = rng_tensors(rank, device)
    if missing := load(run, step, tensors | rng) - rng.keys():
        raise CheckpointError(f"{folder(run, step)}: has no {', '.join(sorted(missing))}; it is that of another model")
    torch.set_rng_state(rng[f"rng.cpu.rank{rank}"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(rng[f"rng.cuda.rank{rank}"], device)


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _sync_folder(path: Path) -> None:
    """Make a rename in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class _quiet_dcp(warnings.catch_warnings):
    """Drops DCP's remark that no process group exists, which is normal on one process."""

    def __enter__(self):
        log = super().__enter__()
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        return log
