"""One row of `python -m twell.bench scale`: what each of its processes runs. The first one writes the result."""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from twell import parallel
from twell.bench.measure import synchronize
from twell.bench.scale import Options, Row, is_large
from twell.bench.step import COUNTED
from twell.bench.step_model import ModelOptions, Setup
from twell.bench.step_parts import Widths, time_by_part
from twell.config import ParallelConfig
from twell.flops import peak_flops
from twell.forced import force_firing
from twell.model import Transformer
from twell.optim import build_optimizer, optimizer_state, set_lr
from twell.parallel import Ranks
from twell.routing import Routing
from twell.saver import Saver
from twell.sharded import ShardedWeights
from twell.sparsity import SparsityMeter
from twell.step import Step
from twell.weights import Weights

LINK_BYTES = 512 << 20  # on a CPU a hundredth
WEAK, LEARNING = 4, 4  # micro-batches of a step; steps before the clock starts
STEPS_AROUND_A_SAVE = 8


class Training:
    """A model on this rank, ready to take steps."""

    def __init__(self, row: Row, options: Options, ranks: Ranks):
        large = is_large(row.model)
        keys = {key: getattr(options, key) for key in ("nnz", "seq", "layers", "vocab", "dtype", "compile")}
        micro = options.micro or (4 if large else 8)
        self.setup = setup = Setup(ModelOptions(**keys, micro=micro), row.model)
        self.ranks = ranks
        whole = setup.build()
        common = setup.batches(WEAK)
        if row.variant != "dense_silu":
            force_firing(whole, options.nnz, common[0].tokens)
            _make_equal(whole)
        setup.options.seed += ranks.rank  # each has tokens of its own
        self.batches = setup.batches(WEAK)
        self.model: Transformer = setup.twin(row.variant, whole)
        del whole
        if row.mode == "ddp" or ranks.world_size == 1:
            self.weights = Weights(self.model, setup.dtype)
        else:
            mode, copies = ("fsdp", 2) if row.mode == "hsdp" else (row.mode, 1)
            share = ParallelConfig(mode, ranks.world_size // copies, shard_gradients=large)
            self.weights = ShardedWeights(self.model, setup.dtype, share, ranks)
        if setup.compiled:
            self.model.compile_parts()
        self.routing = Routing(self.model, setup.device, setup.dtype)
        self.optimizers = build_optimizer(self.weights.masters, setup.cfg.optim, ranks.device, self.weights.flat)
        set_lr(self.optimizers, 0.0)
        self.state = self.weights.whole_state(optimizer_state(self.weights.masters, self.optimizers))
        n_layers = setup.cfg.model.n_layers
        coef = 0.0 if row.variant.startswith("dense") else setup.cfg.ffn.l1.coef
        self._l1_weight = torch.full((n_layers,), coef / n_layers, device=ranks.device)
        self._meter = SparsityMeter(n_layers, setup.cfg.ffn.d_ff, setup.cfg.model.seq_len, ranks.device)
        self._count = self._meter.add if row.variant in COUNTED else None  # as in training

    @property
    def micro_tokens(self) -> int:
        return self.batches[0].tokens.numel()

    def step(self, n_micro: int, before_update: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """A step of `n_micro` micro-batches, repeated while a buffer is too small, as in train.py."""
        batches = [self.batches[i % WEAK] for i in range(n_micro)]
        step = Step(
            self.model,
            self.weights,
            self.optimizers,
            l1_weight=self._l1_weight,
            batch_tokens=n_micro * self.micro_tokens * self.ranks.world_size,
            clip=self.setup.cfg.optim.clip,
            overflowed=self.routing.overflowed,
            count=self._count,
        )

        def take() -> None:
            while True:
                self._meter.drop()
                step.gradients(batches)
                word = step.finish()
                if not word.overflowed:
                    break
                self.routing.update()
            if word.nonfinite:
                raise RuntimeError("the loss or the gradient norm is not finite")
            before_update()
            step.update()
            self._meter.accept()

        return take

    def time(self, take: Callable[[], None], at_least: float) -> float:
        """Seconds of one step: the median of `at_least` seconds' worth, the same on all ranks."""
        synchronize(self.ranks.device)
        seconds, until = [], time.perf_counter() + at_least
        while True:
            started = time.perf_counter()
            take()
            synchronize(self.ranks.device)
            seconds.append(time.perf_counter() - started)
            if not parallel.from_main(time.perf_counter() < until):
                return parallel.from_main(statistics.median(seconds))


def _make_equal(model: Transformer) -> None:
    """Forcing counts on each GPU by itself and may end a little apart: take the first rank's."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def train(row: Row, options: Options, ranks: Ranks) -> dict:
    training = Training(row, options, ranks)
    n_tokens = training.micro_tokens * ranks.world_size
    weak = training.step(WEAK)
    for _ in range(LEARNING):
        weak()
        training.routing.update()
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(ranks.device)
    steps = {}
    for name, n_micro in (("weak", WEAK), ("one", 1), ("strong", options.strong_tokens // n_tokens)):
        if n_micro > 0:
            take = training.step(n_micro)
            seconds = training.time(take, options.seconds)
            steps[name] = {"n_micro": n_micro, "ms": 1e3 * seconds, "tokens_per_second": n_micro * n_tokens / seconds}
    peak, model = peak_flops(ranks.device), training.model
    speed = steps["weak"]["tokens_per_second"]
    cfg = training.setup.cfg
    widths = Widths(cfg.ffn.d_ff, training.setup.vocab_size, training.weights.grad.numel())
    return {
        "steps": steps,
        "parameters": model.n_params,
        "micro": cfg.batch.micro,
        "seq_len": cfg.model.seq_len,
        "mfu": speed * model.flops_per_token() / (peak * ranks.world_size) if peak else None,
        "peak_bytes": torch.cuda.max_memory_allocated(ranks.device) if on_gpu else None,
        "communication": communication(weak, ranks.device) if on_gpu else None,
        "parts_ms": time_by_part(weak, widths, ranks.device),  # collectives count as "other"
    }


def communication(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Milliseconds of a step in which collectives ran, and of them those in which nothing else did."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize(device)
    kernels = [e for e in trace.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name.lower()) for e in kernels]
    collective = _union([(start, end) for start, end, is_nccl in spans if is_nccl])
    others = _union([(start, end) for start, end, is_nccl in spans if not is_nccl])
    total = sum(end - start for start, end in collective)
    hidden = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in collective for b in others)
    return {"communication": total / 1e3, "exposed": (total - hidden) / 1e3}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps."""
    joined: list[list[float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return [(start, end) for start, end in joined]


def links(row: Row, options: Options, ranks: Ranks) -> dict:
    """1e9 bytes a second that collectives get through: of the whole buffer, whatever crosses the links for it."""
    n_bytes = LINK_BYTES if ranks.device.type == "cuda" else LINK_BYTES // 100
    whole = torch.zeros(n_bytes // 4 // ranks.world_size * ranks.world_size, device=ranks.device)
    share = torch.zeros(len(whole) // ranks.world_size, device=ranks.device)
    calls: dict[str, Callable[[], Tensor | None]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, share),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, whole),
    }
    return {"links": {name: whole.nbytes / 1e9 / _seconds(call, ranks.device) for name, call in calls.items()}}


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / repeats


def checkpoint(row: Row, options: Options, ranks: Ranks) -> dict:
    """Steps before, during and after a save in the background."""
    training = Training(row, options, ranks)
    folder = parallel.from_main(tempfile.mkdtemp(dir=options.disk) if ranks.is_main else None)
    try:
        tensors = training.weights.state() | training.state
        messages: list[str] = []
        saver = Saver(Path(folder), tensors, ranks, background=True, log=messages.append)
        take = training.step(WEAK, saver.before_update)
        for _ in range(LEARNING):
            take()
            training.routing.update()
        seconds, saved_at = [], 0.0
        for i in range(3 * STEPS_AROUND_A_SAVE):
            started = time.perf_counter()
            if i == STEPS_AROUND_A_SAVE:
                saved_at = started
                saver.save(i, {}, training.routing.state_dict(), keep=1, best=None, wait=False)
            take()
            synchronize(ranks.device)
            seconds.append(time.perf_counter() - started)
        saver.finish(wait=True, raises=True)
        written = time.perf_counter() - saved_at
        n_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    finally:
        parallel.gather(None)
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return {
        "bytes": n_bytes,
        "written_seconds": written,
        "longest_ms": 1e3 * max(seconds),
        "median_ms": 1e3 * statistics.median(seconds),
        "step_ms": [1e3 * s for s in seconds],
        "messages": messages,
    }


def main(job: dict) -> None:
    row, options = Row(**job["row"]), Options(**job["options"])
    ranks = parallel.start("auto", timeout=options.row_timeout)
    torch._dynamo.config.recompile_limit = 64
    result = {"links": links, "train": train, "checkpoint": checkpoint}[row.kind](row, options, ranks)
    if ranks.is_main:
        Path(job["result"]).write_text(json.dumps(result))
    parallel.finish()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
