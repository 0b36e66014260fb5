"""Where the numbers of a run go: console, metrics.jsonl (always), wandb (when it can).

METRICS documents every key; a key that is not there cannot be logged. A number that cannot be known (MFU on unknown
hardware) is logged as null, so that runs of one kind of FFN have the same keys.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from twell.config import Config
from twell.errors import first_line
from twell.wandb_run import start_wandb

METRICS = {
    "step": "optimizer steps done",
    "tokens": "training tokens seen: the x-axis of every wandb panel",
    "train/loss": "cross-entropy in nats per counted token, mean since the last record",
    "train/l1": "L1 of the FFN activations as ffn.l1.norm defines it, mean since the last record (0 for dense kinds)",
    "train/l1_coef": "coefficient of the L1 term at this step, mean over layers",
    "train/l1_coef/layer_{i}": "the same of layer i, with ffn.l1.layer_weights or ffn.l1.per_layer",
    "train/l1_at_bound": "share of layers whose coefficient stands at a bound of the controller, with ffn.l1.target_l0",
    "train/lr": "learning rate of AdamW at this step",
    "train/grad_norm": "global gradient norm before clipping, at this step",
    "train/epoch": "passes over the training split",
    "train/skipped_steps": "steps skipped so far because the loss or the gradient norm was not finite",
    "train/repeated_steps": "steps done again so far, with larger buffers, because a sparse kernel ran out of room",
    "val/loss": "cross-entropy in nats per token on the fixed validation windows",
    "val/perplexity": "exp(val/loss)",
    "val/bits_per_byte": "the same loss in bits per byte of text: comparable between tokenizers",
    "val/unigram_loss": "what a unigram count of the training tokens reaches on the same windows, nats per token",
    "val/order3_bits_per_byte": "what a byte count table with three bytes of context reaches there (bytes tokenizer)",
    "val/sample": "text sampled from the model at the validation",
    "sparsity/l0_mean": "active neurons per token, mean over layers, since the last record",
    "sparsity/l0_max": "most active neurons of any token in any layer since the last record",
    "sparsity/density": "sparsity/l0_mean / d_ff",
    "sparsity/dead_share": "share of all neurons that are dead: silent for ffn.dead.after_tokens or more",
    "sparsity/revived": "neurons so far that were dead at one check and not at the next (see twell/neurons.py)",
    "sparsity/reinitialized": "rows of dead neurons reinitialised so far, each time counted",
    "sparsity/hottest_1pct": "share of a layer's firings that its hottest 1 % of neurons have, mean over layers",
    "sparsity/hottest_5pct": "the same for 5 %",
    "sparsity/hottest_10pct": "the same for 10 %",
    "sparsity/l0_heatmap": "active neurons per token by layer, as a histogram: wandb draws layers against tokens",
    "sparsity/tokens_most": "the validation tokens with most active neurons, mean over layers, as a table",
    "sparsity/tokens_fewest": "those with fewest",
    "sparsity/l0_part/part_{i}": "active neurons per token in eighth i of the sequence, from 0, mean over layers",
    "sparsity/l0/layer_{i}": "active neurons per token in layer i, counted from 00",
    "sparsity/l0_p50/layer_{i}": "active neurons in layer i that half of the tokens do not exceed",
    "sparsity/l0_p99/layer_{i}": "active neurons in layer i that 99 % of the tokens do not exceed",
    "sparsity/l0_max/layer_{i}": "most active neurons of any token in layer i",
    "sparsity/l0_histogram/layer_{i}": "validation tokens by the number of active neurons in layer i, as a histogram",
    "sparsity/dead_share/layer_{i}": "share of dead neurons in layer i",
    "sparsity/route/layer_{i}": "1 where layer i computes only the non-zeros, 0 where it runs dense (sparse kinds)",
    "perf/tokens_per_second": "over all ranks, validation and checkpoints not counted",
    "perf/step_ms": "milliseconds per optimizer step, likewise",
    "perf/mfu": "model FLOPs utilisation: dense-equivalent FLOPs over the peak of the GPUs; null on unknown hardware",
    "perf/executed_flops": "FLOPs over those of the dense model; layers that run sparse count only active neurons",
    "perf/data_wait_share": "share of step time spent waiting for data",
    "perf/host_read_share": "share of step time between the end of the device's work and the host's answer to it",
    "perf/memory_gb": "peak memory of the GPU allocator on rank 0, or resident memory of the process on CPU, 1e9 bytes",
    "perf/train_seconds": "seconds spent in training steps since the run was first started",
}

LONGEST_TAG = 64  # characters, of which wandb takes no more
WANDB_FINISH = 60  # seconds to wait at the end for what it has not received


class Histogram(NamedTuple):
    """A metric: `counts[i]` things from `edges[i]` up to below `edges[i + 1]`; at most 512."""

    counts: list[float]
    edges: list[float]


class Table(NamedTuple):
    """A metric: rows with one value a column."""

    columns: list[str]
    rows: list[list[Any]]


class StopWatch:
    """Adds up the time of training steps; what happens between `stop` and `start` is not counted."""

    def __init__(self):
        self._started = 0.0
        self._seconds, self._steps = 0.0, 0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._started
        self._steps += 1

    def take(self) -> tuple[float, int]:
        """Seconds and steps since the last call."""
        taken = self._seconds, self._steps
        self._seconds, self._steps = 0.0, 0
        return taken


class Tracker:
    """Writes records on the main rank; on the other ranks every method does nothing."""

    def __init__(
        self,
        cfg: Config,
        run: Path,
        *,
        is_main: bool,
        total_steps: int,
        wandb_id: str | None,
        step: int,
        swept: Sequence[str] = (),
    ):
        """Open the run's files, dropping records later than `step`, which a resumed run will write again.

        swept: the keys that a sweep sets to several values; they become tags of its runs.
        """
        self.run = run
        self.is_main = is_main
        self.total_steps = total_steps
        self.wandb = None
        self.wandb_id = wandb_id
        if not is_main:
            return
        self._log_file = open(run / "train.log", "a")  # noqa: SIM115 - open as long as the run
        self._bar_shown = self._disk_failed = False
        self._metrics_file = _open_metrics(run / "metrics.jsonl", step, self.print)
        tags = [cfg.model.name, cfg.ffn.kind, cfg.data.name, cfg.optim.kind, *cfg.wandb.tags]
        tags += [f"sweep:{key}"[:LONGEST_TAG] for key in swept]
        self.wandb = start_wandb(cfg, run, wandb_id, tags, self.print)
        if self.wandb is not None:
            self.wandb_id = self.wandb.id

    def print(self, text: str) -> None:
        """One line on the console and in train.log."""
        if not self.is_main:
            return
        self._clear_bar()
        print(text, flush=True)
        self._append(self._log_file, text)

    def record(self, step: int, tokens: int, values: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl and wandb; keys are those of METRICS."""
        if not self.is_main:
            return
        unknown = [key for key in values if _documented_name(key) not in METRICS]
        if unknown:
            raise KeyError(f"{unknown}: not in twell.tracking.METRICS; document a metric before logging it")
        line = {"step": step, "tokens": tokens, "time": round(time.time(), 3), **values}
        self._append(self._metrics_file, json.dumps(_for_json(line)))
        self._with_wandb(lambda run: run.log(_for_wandb(line)))

    def progress(self, step: int) -> None:
        """Redraw the progress bar, on a terminal only."""
        if not self.is_main or not sys.stdout.isatty():
            return
        width = max(10, min(40, shutil.get_terminal_size().columns - 30))
        done = round(width * step / self.total_steps)
        sys.stdout.write(f"\r[{'█' * done}{' ' * (width - done)}] {step}/{self.total_steps} ")
        sys.stdout.flush()
        self._bar_shown = True

    def close(self) -> None:
        """Flush and close everything."""
        if not self.is_main:
            return
        self._clear_bar()
        # In a thread: a server that does not answer must not keep a finished run. What it did not get lies in wandb/.
        finishing = threading.Thread(target=self._with_wandb, args=(lambda run: run.finish(),), daemon=True)
        finishing.start()
        finishing.join(WANDB_FINISH)
        for file in (self._metrics_file, self._log_file):
            with contextlib.suppress(OSError):
                file.close()

    def _append(self, file: TextIO, line: str) -> None:
        """A line at the end of `file`; a full disk must not end the run."""
        try:
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            if not self._disk_failed:
                print(f"{file.name}: cannot be written ({error.strerror}); training goes on", flush=True)
            self._disk_failed = True

    def _with_wandb(self, action: Callable[[Any], None]) -> None:
        """Do something with the wandb run, if there is one; when it fails, go on without wandb."""
        if self.wandb is None:
            return
        try:
            action(self.wandb)
        except Exception as error:  # a dashboard must not cost the run
            self.wandb = None
            self.print(f"wandb: lost ({first_line(error)}); metrics.jsonl goes on")

    def _clear_bar(self) -> None:
        if self._bar_shown:
            sys.stdout.write("\r\033[K")
            self._bar_shown = False


def _documented_name(key: str) -> str:
    return key.rstrip("0123456789") + "{i}" if "/layer_" in key or "/part_" in key else key


def _for_json(record: dict[str, Any]) -> dict[str, Any]:
    """Histograms and tables as objects. JSON knows no NaN and no infinity: null, so that any reader can parse it."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value._asdict() if isinstance(value, Histogram | Table) else value

    return {key: plain(value) for key, value in record.items()}


def _for_wandb(record: dict[str, Any]) -> dict[str, Any]:
    """Histograms and tables as wandb's own, which it draws over tokens; without the wall-clock time, it has its own."""
    import wandb

    def drawn(value: Any) -> Any:
        if isinstance(value, Histogram):
            return wandb.Histogram(np_histogram=(value.counts, value.edges))
        return wandb.Table(columns=value.columns, data=value.rows) if isinstance(value, Table) else value

    return {key: drawn(value) for key, value in record.items() if key != "time"}


def _open_metrics(path: Path, step: int, log: Callable[[str], None]) -> TextIO:
    """Open metrics.jsonl for appending, keeping only whole records up to `step`."""
    if path.exists():
        lines = path.read_bytes().splitlines()
        steps = [_step_of(line) for line in lines]
        if unreadable := steps.count(None):
            log(f"{path}: {unreadable} of {len(lines)} lines are no records and are left out")
        replacement = path.with_suffix(".tmp")
        kept = (line + b"\n" for line, its_step in zip(lines, steps) if its_step is not None and its_step <= step)
        replacement.write_bytes(b"".join(kept))
        os.replace(replacement, path)
    return open(path, "a")


def _step_of(line: bytes) -> int | None:
    """The step of a record, None for a line that is none: a kill may have cut it short."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
