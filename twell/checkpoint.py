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
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from twell import parallel
from twell.errors import UserError, first_line

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
    """meta.json of one checkpoint; CheckpointError if it is damaged or a newer version of this code wrote it."""
    path = folder(run, step)
    try:
        meta = json.loads((path / META).read_text())
        written_by = meta["format"]
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(run, step, error) from error
    if written_by > FORMAT:
        raise CheckpointError(f"{path}: format {written_by} is newer than this code's {FORMAT}; update the code")
    return meta


def save(run: Path, step: int, tensors: dict[str, Tensor], meta: dict) -> None:
    """Write the checkpoint of `step`; every rank calls this with its own tensors.

    Tensors of the same name on several ranks are taken to be equal and are written once. Returns when the checkpoint
    is complete on disk. Raises CheckpointError when it cannot be written (a full disk); earlier checkpoints stay.
    """
    final = folder(run, step)
    unfinished = final.with_name(UNFINISHED + final.name)
    try:
        if parallel.is_main():
            _remove(unfinished)
            unfinished.mkdir(parents=True)
            _check_space(unfinished, tensors)
        parallel.barrier()
        writer = dcp.FileSystemWriter(unfinished, sync_files=True)
        with _quiet_dcp():
            dcp.save(tensors, storage_writer=writer, no_dist=not parallel.is_distributed())
        if parallel.is_main():
            with open(unfinished / META, "w") as file:
                json.dump({**meta, "format": FORMAT, "step": step}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            _remove(final)
            os.replace(unfinished, final)
            _sync_folder(final.parent)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        free = shutil.disk_usage(run).free / 1e9
        reason = first_line(error)
        raise CheckpointError(f"{final}: cannot be written ({reason}; {free:.1f} GB free on that disk)") from error
    parallel.barrier()


def _check_space(path: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse before writing what the disk cannot hold."""
    needed, free = sum(t.nbytes for t in tensors.values()), shutil.disk_usage(path).free
    if needed > free:
        raise OSError(f"{needed / 1e9:.1f} GB needed")


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for step in valid_steps(run)[:-keep]:
        if step != best_step:
            _remove(folder(run, step))


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
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling a damaged file raises
        raise _damaged(run, step, error) from error
    for name, tensor in tensors.items():
        entry = stored.get(name)
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            raise CheckpointError(f"{path}: {name} is {list(entry.size)} there and {list(tensor.shape)} in this model")
    wanted = {name: tensor for name, tensor in tensors.items() if name in stored}
    try:
        with _quiet_dcp():
            dcp.load(wanted, storage_reader=reader, no_dist=not parallel.is_distributed())
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        raise _damaged(run, step, error) from error
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
    elif which.isdecimal():
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


def _damaged(run: Path, step: int, error: Exception) -> CheckpointError:
    earlier = [s for s in valid_steps(run) if s < step]
    advice = f"delete it to continue from step {earlier[-1]}" if earlier else "there is no earlier one"
    return CheckpointError(f"{folder(run, step)}: damaged ({first_line(error)}); {advice}")


def _remove(path: Path) -> None:
    """Delete a checkpoint's folder; a kill in the middle leaves nothing that looks like a valid one."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    if path.exists():
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


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
