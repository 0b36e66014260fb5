"""How training gets faster with the GPUs of this host: tokens/s, memory, communication, links, cost of a checkpoint.

    python -m twell.bench scale out=results/scale.json          all GPUs there are, in under ten minutes
    python -m twell.bench scale ranks=1,2 models=1p5b           less of it
    python -m twell.bench scale models=nano layers=2 vocab=300 micro=2 seq=32 strong_tokens=512    on any machine

Each row is a model, an FFN and a way of sharing it on so many GPUs; it has processes of its own, so that one failure
loses one row. Rows on different GPUs run at the same time, the largest numbers of GPUs last: what `minutes` does not
suffice for is left out, and said. In each row the step of `twell.bench step` is timed with 4 micro-batches a GPU (weak
scaling), with 1, and with as many as make up strong_tokens. The weights are forced to fire `nnz` neurons a token.

communication: device time of collectives in one profiled step with 4 micro-batches; exposed: the part of it during
which nothing else ran. links: what an all-reduce, an all-gather and a reduce-scatter of 512 MiB get through a second.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from twell.arguments import whole_numbers
from twell.bench import measure
from twell.bench.step_report import GB, print_environment, print_table
from twell.errors import UserError

LARGE = 4e9  # parameters (as the presets are called) from which a model is divided in any case
SHORTEST_ROW = 30.0  # seconds
FAILED_LINES = 12  # of a failed row's stderr that are kept


@dataclass
class Options:
    models: str = "1p5b,8b"  # presets of configs/model
    variants: str = "dense_silu,sparse"  # FFNs: dense_silu | dense_relu | relu_l1 | sparse
    modes: str = "ddp,fsdp"  # ddp | zero1 | fsdp; large models: fsdp, and on 4 and more also in two copies (hsdp)
    ranks: str = ""  # numbers of GPUs, or on a CPU of processes; empty = 1, 2, 4, ... as many as there are
    nnz: float = 30.0  # neurons that fire per token
    micro: int = 0  # sequences of a micro-batch; 0 = 8, of large models 4
    seq: int = 0  # tokens of a sequence; 0 = the preset's
    layers: int = 0  # 0 = the preset's
    vocab: int = 50257
    strong_tokens: int = 524288  # tokens a step over all ranks
    seconds: float = 4.0  # of steps that are timed, each time
    checkpoint: bool = True  # also save in the background, into a folder in `disk`, and see how long steps get
    disk: str = "."
    minutes: float = 9.5  # for all rows: the last ones are left out if it does not suffice, a running one is ended
    row_timeout: int = 240  # seconds
    dtype: str = "auto"
    compile: bool | None = None
    out: str = ""  # JSON file for the results, rewritten after each row


@dataclass(frozen=True)
class Row:
    """What one group of processes does."""

    kind: str  # links | train | checkpoint
    ranks: int
    model: str = ""
    variant: str = ""
    mode: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.model, self.variant, self.mode, f"x{self.ranks}")))


def rows_for(options: Options, available: int) -> list[Row]:
    """All rows, those on few ranks first; UserError if `ranks` are no numbers."""
    if options.ranks:
        numbers = sorted(whole_numbers(options, "ranks"))
    else:
        numbers = [n for n in (1, 2, 4, 8, 16) if n <= available]
    models, rows = options.models.split(","), []
    for ranks in numbers:
        if ranks > 1:
            rows.append(Row("links", ranks))
        if options.checkpoint and ranks == numbers[-1]:  # before what may be left out
            rows.append(Row("checkpoint", ranks, models[0], options.variants.split(",")[-1], "ddp"))
        for model in models:
            large = is_large(model)
            if not large:
                modes = options.modes.split(",") if ranks > 1 else ["ddp"]
            else:  # its masters and optimizer state would not fit one GPU
                modes = ["fsdp"] * (ranks >= 2) + ["hsdp"] * (ranks >= 4)
            variants = options.variants.split(",")
            rows += [Row("train", ranks, model, variant, mode) for variant in variants for mode in modes]
    return rows


def is_large(preset: str) -> bool:
    digits = preset.removesuffix("b").replace("p", ".")
    return preset.endswith("b") and digits.replace(".", "").isdigit() and float(digits) * 1e9 >= LARGE


class Running:
    """A row whose processes run, on GPUs of their own."""

    def __init__(self, row: Row, gpus: list[int], options: Options, folder: Path):
        self.row, self.gpus, self._options = row, gpus, options
        self._result = folder / f"{row.name.replace(' ', '-')}.json"
        self._errors = open(self._result.with_suffix(".err"), "w+")  # noqa: SIM115 - closed by `result`
        self._started = time.monotonic()
        job = json.dumps({"row": asdict(row), "options": asdict(options), "result": str(self._result)})
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={row.ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
        if torch.cuda.device_count():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        self._process = subprocess.Popen(
            [sys.executable, *torchrun, "-m", "twell.bench.scale_row", job],
            env=environment, stdout=self._errors, stderr=self._errors, start_new_session=True,
        )  # fmt: skip

    def ended(self, end: float) -> bool:
        """Whether it has; at `end`, or after row_timeout, it must."""
        if self._process.poll() is None and time.monotonic() > min(end, self._started + self._options.row_timeout):
            self.stop()
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the row: torchrun ends its processes, by force if it must."""
        self._process.terminate()
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def result(self) -> dict:
        """What the row measured, or the last lines of what went wrong."""
        record = {"row": asdict(self.row), "seconds": round(time.monotonic() - self._started, 1)}
        self._errors.seek(0)
        lines = self._errors.read().splitlines()
        self._errors.close()
        if self._process.returncode == 0 and self._result.exists():
            print(f"{self.row.name}: {record['seconds']:.0f} s", flush=True)
            return record | json.loads(self._result.read_text())
        print(f"{self.row.name}: FAILED after {record['seconds']:.0f} s", flush=True)
        said = [line for line in lines if "Error" in line or "error:" in line][:FAILED_LINES]
        return record | {"error": said or lines[-FAILED_LINES:] or [f"exit code {self._process.returncode}"]}


def run(options: Options) -> None:
    on_gpu = torch.cuda.device_count() > 0
    available = torch.cuda.device_count() if on_gpu else os.cpu_count() or 1
    rows = rows_for(options, available)
    if any(row.ranks > available for row in rows) and on_gpu:
        raise UserError(f"ranks={options.ranks}: torch sees {available} GPUs")
    environment = measure.environment(torch.device("cuda" if on_gpu else "cpu")) | {"gpus": available if on_gpu else 0}
    print_environment(environment)
    free = list(range(max(available, *(row.ranks for row in rows))))
    results = measure_rows(rows, free, options, lambda results: _write(options, environment, results))
    report(results)


def measure_rows(rows: list[Row], free: list[int], options: Options, note: Callable[[list[dict]], None]) -> list[dict]:
    """Run all rows, as many at a time as the `free` GPUs allow; `note` gets the results so far."""
    order = {row: i for i, row in enumerate(rows)}
    end = time.monotonic() + 60 * options.minutes
    waiting, running, results = list(rows), [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                if time.monotonic() > end - SHORTEST_ROW:
                    reason = f"left out: too little was left of minutes={options.minutes:g}"
                    results += [{"row": asdict(row), "seconds": 0.0, "error": [reason]} for row in waiting]
                    waiting = []
                while waiting and waiting[0].ranks <= len(free) and _may_share([r.row for r in running], waiting[0]):
                    row = waiting.pop(0)
                    running.append(Running(row, [free.pop(0) for _ in range(row.ranks)], options, Path(folder)))
                for each in [each for each in running if each.ended(end)]:
                    running.remove(each)
                    free = sorted(free + each.gpus)
                    results.append(each.result())
                    results.sort(key=lambda result: order[Row(**result["row"])])
                    note(results)
                time.sleep(0.2)
        finally:
            for each in running:
                each.stop()
    note(results)
    return results


def _may_share(running: list[Row], row: Row) -> bool:
    """Whether `row` may run beside others: links and disks are measured alone."""
    return not running or all(each.kind == "train" for each in [*running, row])


def _write(options: Options, environment: dict, results: list[dict]) -> None:
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment, "options": asdict(options), "results": results}
        Path(options.out).write_text(json.dumps(record, indent=1) + "\n")


def report(results: list[dict]) -> None:
    """The tables. scaling: tokens/s a GPU over those of the same model and FFN on the fewest GPUs; gain: tokens/s over
    those of the first FFN, the rest being equal."""
    good = [r for r in results if "error" not in r]
    links = {f"{r['row']['ranks']} ranks": r["links"] for r in good if r["row"]["kind"] == "links"}
    if links:
        print("\nlinks, GB/s of the buffer")
        names = next(iter(links.values()))
        print_table("", {name: lambda r, name=name: f"{r[name]:.0f}" for name in names}, links)
    trained = {Row(**r["row"]).name.removeprefix("train "): r for r in good if r["row"]["kind"] == "train"}
    if trained:
        print("\ntokens/s")
        first = {}  # the fewest ranks of each model and FFN, of any mode
        for r in trained.values():
            first.setdefault((r["row"]["model"], r["row"]["variant"]), r)
        columns = {
            name: lambda r, name=name: f"{r['steps'][name]['tokens_per_second']:,.0f}" if name in r["steps"] else "-"
            for name in ("weak", "one", "strong")
        }
        columns["scaling"] = lambda r: _scaling(r, first[r["row"]["model"], r["row"]["variant"]])
        columns["gain"] = lambda r: _gain(r, trained)
        columns |= {
            "MFU": lambda r: "n/a" if r["mfu"] is None else f"{r['mfu']:.1%}",
            "peak GB": lambda r: "n/a" if r["peak_bytes"] is None else f"{r['peak_bytes'] / GB:.1f}",
            "comm. ms": lambda r: _ms(r, "communication"),
            "exposed": lambda r: _ms(r, "exposed"),
        }
        print_table("row", columns, trained)
    for r in good:
        if r["row"]["kind"] == "checkpoint":
            print(
                f"\ncheckpoint of {r['bytes'] / GB:.2f} GB in the background, {r['written_seconds']:.1f} s: the "
                f"longest step took {r['longest_ms']:.0f} ms, the median one {r['median_ms']:.0f} ms"
            )
    for r in results:
        if "error" in r:
            print(f"\n{Row(**r['row']).name} FAILED\n  " + "\n  ".join(r["error"]))


def _scaling(result: dict, first: dict) -> str:
    speed, base = (r["steps"]["weak"]["tokens_per_second"] / r["row"]["ranks"] for r in (result, first))
    return f"{speed / base:.3f} of x{first['row']['ranks']}"


def _gain(result: dict, trained: dict[str, dict]) -> str:
    alike = (r for r in trained.values() if all(r["row"][k] == result["row"][k] for k in ("model", "mode", "ranks")))
    speed, base = (r["steps"]["weak"]["tokens_per_second"] for r in (result, next(alike)))
    return f"{speed / base:.3f}"


def _ms(result: dict, key: str) -> str:
    return "n/a" if result["communication"] is None else f"{result['communication'][key]:.1f}"
