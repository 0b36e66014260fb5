"""Checkpoints: atomic, complete, resumable, on any number of ranks and in any parallel mode.

    python -m twell.checkpoint run=runs/NAME out=model.safetensors     # the model of the latest one in a single file
    python -m twell.checkpoint run=runs/NAME out=model.pt checkpoint=best dtype=bf16

One checkpoint is one folder, runs/NAME/checkpoints/step-00001000/, written by torch.distributed.checkpoint: every
tensor of the run under a flat name, own-00000.pt ... with what only that rank remembers, and meta.json with everything
else. It is written under a temporary name and renamed when it is complete and on disk, so a folder with its final name
is valid; what a killed save leaves behind is reported and removed at the next start, and a folder that has lost files
since is set aside. twell/saver.py writes them while training goes on.

Tensor names: model.<parameter>, optim.<parameter>.<state>, sparsity.<counter>, rng.<generator>.rank<r>.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from twell import parallel
from twell.arguments import parse_arguments, run_command
from twell.errors import UserError, first_line
from twell.sharded import local_rows

# Its remark that no process group exists, which is normal on one process.
warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")

FORMAT = 1  # raised when the layout changes in a way that older code cannot read
RESERVE = 16e6  # bytes that stay free for logs and metrics
META = "meta.json"
OWN = "own-{:05d}.pt"
UNFINISHED, TORN = ".unfinished-", ".torn-"


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


def save(run: Path, step: int, tensors: dict[str, Tensor], meta: dict, own: Any = None) -> None:
    """Write the checkpoint of `step`; every rank calls this with its own tensors.

    Tensors of the same name on several ranks are taken to be equal and are written once; DTensors are written by
    shares. `own` is whatever else this rank wants to find again, see `load_own`. Returns when the checkpoint is
    complete on disk. Raises CheckpointError, on all ranks, when it cannot be written (a full disk); earlier ones stay.
    """
    final = folder(run, step)
    unfinished = final.with_name(UNFINISHED + final.name)
    group = parallel.saving_group()
    try:
        n_bytes = sum(parallel.gather(sum(local_rows(t)[0].nbytes for t in tensors.values()), group))
        _together(lambda: _begin(unfinished, n_bytes))
        writer = dcp.FileSystemWriter(unfinished, sync_files=True)
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        _together(lambda: _write_own(unfinished, own))
        _together(lambda: _complete(unfinished, final, {**meta, "format": FORMAT, "step": step}))
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        free = shutil.disk_usage(run).free / 1e9
        reason = first_line(error)
        raise CheckpointError(f"{final}: cannot be written ({reason}; {free:.1f} GB free on that disk)") from error


def _together(action: Callable[[], None]) -> None:
    """Do `action` on every rank; what fails on one fails on all, so that nobody waits for it."""
    problem = None
    try:
        action()
    except (OSError, RuntimeError) as error:
        problem = first_line(error)
    for rank, each in enumerate(parallel.gather(problem, parallel.saving_group())):
        if each is not None:
            raise OSError(f"rank {rank}: {each}" if parallel.is_distributed() else each)


def _begin(unfinished: Path, n_bytes: int) -> None:
    """Make the folder, unless the disk cannot hold what comes."""
    if not parallel.is_main():
        return
    _remove(unfinished)
    unfinished.mkdir(parents=True)
    needed = 1.02 * n_bytes + RESERVE
    if needed > shutil.disk_usage(unfinished).free:
        raise OSError(f"{needed / 1e9:.1f} GB needed")


def _write_own(unfinished: Path, own: Any) -> None:
    if own is None:
        return
    with open(unfinished / OWN.format(parallel.rank()), "wb") as file:
        torch.save(own, file)
        file.flush()
        os.fsync(file.fileno())


def _complete(unfinished: Path, final: Path, meta: dict) -> None:
    """Write meta.json, with the size of every file, and give the folder its name."""
    if not parallel.is_main():
        return
    written = {entry.relative_path for entry in dcp.FileSystemReader(unfinished).read_metadata().storage_data.values()}
    files = {path.name: path.stat().st_size for path in unfinished.iterdir()}
    if not written <= files.keys():
        raise OSError(f"{', '.join(sorted(written - files.keys()))} not there: `out` must be one disk for all nodes")
    with open(unfinished / META, "w") as file:
        json.dump({**meta, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _remove(final)
    os.replace(unfinished, final)
    _sync_folder(final.parent)


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    for step in valid_steps(run)[:-keep]:
        if step != best_step:
            _remove(folder(run, step))


def clean_up(run: Path, log: Callable[[str], None]) -> None:
    """Delete what a killed save left behind, and set torn checkpoints aside, saying so."""
    for path in sorted((run / "checkpoints").glob(f"{UNFINISHED}*")):
        log(f"removing {path}: a save that did not finish")
        shutil.rmtree(path)
    for step in valid_steps(run):
        path = folder(run, step)
        if problem := _torn(path):
            aside = path.with_name(f"{TORN}{path.name}")
            log(f"ignoring {path}: {problem}; it is now {aside.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)


def _torn(path: Path) -> str | None:
    """What is missing from a checkpoint (a copy of the folder was cut short, a disk lost files); None if nothing is."""
    try:
        files = json.loads((path / META).read_text()).get("files", {})
    except (OSError, ValueError):
        return f"{META} cannot be read"
    for name, size in files.items():
        if not (path / name).exists():
            return f"{name} is missing"
        if (path / name).stat().st_size != size:
            return f"{name} has {(path / name).stat().st_size} of its {size} bytes"
    return None


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
        group = parallel.saving_group()
        dcp.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        raise _damaged(run, step, error) from error
    return tensors.keys() - wanted.keys()


def find(run: Path, which: str) -> int:
    """The step of a checkpoint of `run`: "latest", "best" (lowest validation loss) or a step number."""
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
    return step


def load_model(run: Path, model: nn.Module, which: str = "latest") -> dict:
    """Fill `model`'s parameters from a checkpoint of `run`, named as for `find`, and return its meta."""
    step = find(run, which)
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


def load_own(run: Path, step: int, rank: int) -> Any:
    """What `rank` gave to `save` as its own; for a rank that was not there, what the first one gave. None: nothing."""
    path = folder(run, step) / OWN.format(rank)
    if not path.exists():
        path = path.with_name(OWN.format(0))
    return torch.load(path, weights_only=True) if path.exists() else None


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


@dataclass
class SingleFile:
    run: str = ""  # the run's folder
    out: str = ""  # the file to write: .safetensors (needs the extra `export`) or .pt (a dict of tensors)
    checkpoint: str = "latest"  # latest | best | a step
    dtype: str = "fp32"  # fp32 | bf16


def write_single_file(options: SingleFile) -> Path:
    """Gather the model's tensors of one checkpoint into one file, under the model's own names."""
    run, out = Path(options.run), Path(options.out)
    if out.suffix not in (".safetensors", ".pt"):
        raise CheckpointError(f"out={options.out}: must end in .safetensors or .pt")
    if options.dtype not in ("fp32", "bf16"):
        raise CheckpointError(f"dtype={options.dtype}: must be fp32 or bf16")
    step = find(run, options.checkpoint)
    stored = dcp.FileSystemReader(folder(run, step)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size) for name, entry in stored.items() if name.startswith("model.")}
    load(run, step, tensors)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    tensors = {name.removeprefix("model."): tensor.to(dtype) for name, tensor in tensors.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(UNFINISHED + out.name)
    if out.suffix == ".pt":
        torch.save(tensors, unfinished)
    else:
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise CheckpointError("out=*.safetensors needs safetensors: pip install -e '.[export]'") from error
        save_file(tensors, unfinished, metadata={"step": str(step)})
    os.replace(unfinished, out)
    return out


def main(arguments: Sequence[str]) -> None:
    print(write_single_file(parse_arguments(arguments, SingleFile, __doc__)))


if __name__ == "__main__":
    run_command(main)
