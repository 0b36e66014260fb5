"""The largest micro-batch that fits this GPU, by training a step with it.

    python -m twell.bench fit model=1p5b ffn=sparse
    python -m twell.bench fit model=8b layers=8 seq=4096

Memory grows by the same amount with every sequence, so two small micro-batches say which is the largest; that one is
then tried, and its neighbours until the border is found. Weights are as initialised, when sparse layers still run
dense: a run starts like that, and takes less memory later.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from twell.bench import measure
from twell.bench.step import Contender, Training
from twell.bench.step_measure import release
from twell.bench.step_model import ModelOptions, Setup, selected
from twell.bench.step_report import GB, print_environment, print_table
from twell.errors import UserError

OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")  # as torch, Triton and cuBLAS put it
LONGEST_SEARCH = 10  # micro-batches that are tried


@dataclass
class Options:
    model: str = "1p5b"  # preset of configs/model
    ffn: str = "sparse"  # dense_silu | dense_relu | sparse
    seq: int = 0  # tokens per sequence; 0 = the preset's
    layers: int = 0  # 0 = the preset's
    vocab: int = 50257  # ids of the tokenizer (50257: gpt2's)
    impl: str = "auto"  # of the sparse FFN: auto | triton | torch
    recompute: str = "none"  # none | selective | full: as in twell/config.py
    dtype: str = "auto"  # auto = bf16; bf16 | fp32
    compile: bool | None = None  # null = true
    out: str = ""  # JSON file for the results


def run(options: Options) -> None:
    if not torch.cuda.is_available():
        raise UserError("fit: torch sees no GPU, and it is its memory that is to be filled")
    keys = {key: value for key, value in asdict(options).items() if key not in ("ffn", "out")}
    model_options = ModelOptions(**keys, variants=options.ffn, cuda_graph="off")
    selected(model_options)
    setup = Setup(model_options, options.model)
    print_environment(environment := measure.environment(setup.device))
    torch._dynamo.config.recompile_limit = 64  # every micro-batch is another shape
    dry_run = DryRun(setup, options.ffn)
    available = torch.cuda.mem_get_info(setup.device)[0] + torch.cuda.memory_reserved(setup.device)
    peaks = search(dry_run.peak, available)
    result = setup.describe(options.model, dry_run.training.model, 1) | {
        "ffn": options.ffn,
        "available_bytes": available,
        "fixed_bytes": dry_run.training.memory(),
        "peak_bytes": peaks,
        "largest": max((micro for micro, peak in peaks.items() if peak is not None), default=0),
        "batch_tokens": setup.cfg.batch.tokens,
    }
    print_fit(result)
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps({"environment": environment, "result": result}, indent=1) + "\n")


class DryRun:
    """A model with its gradients and optimizer state, whose step is tried with micro-batches of any size."""

    def __init__(self, setup: Setup, variant: str):
        self.setup, self.variant = setup, variant
        setup.cfg.batch.micro = 1
        setup.forced = False
        self.training = Training(setup, n_micro=1)

    def peak(self, micro: int) -> int | None:
        """The most bytes allocated during a step with `micro` sequences; None if the memory is too small for that."""
        device = self.setup.device
        self.setup.cfg.batch.micro = micro
        release()
        torch.cuda.reset_peak_memory_stats(device)
        fits = self._step()
        peak = torch.cuda.max_memory_allocated(device)
        if not fits:  # by now the exception, and with it the graph that held the activations, is gone
            for parameter in self.training.model.parameters():
                parameter.grad = None
            release()
        return peak if fits else None

    def _step(self) -> bool:
        try:
            self.training.set_batches(self.setup.batches(1))
            contender = Contender(self.variant, self.training, self.setup)
            for _ in range(2):  # the first one compiles
                contender(0)
            measure.synchronize(self.setup.device)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in OUT_OF_MEMORY):
                raise
            return False
        return True


def search(peak_of: Callable[[int], int | None], available: int) -> dict[int, int | None]:
    """Peaks by micro-batch, of those tried on the way to the largest that fits.

    peak_of: bytes for a micro-batch, None if it does not fit; about linear.
    """
    peaks = {1: peak_of(1)}
    if peaks[1] is None:
        return peaks
    peaks[2] = peak_of(2)
    while len(peaks) < LONGEST_SEARCH:
        largest = max(micro for micro, peak in peaks.items() if peak is not None)
        too_large = min((micro for micro, peak in peaks.items() if peak is None), default=None)
        if too_large == largest + 1:
            break
        per_sequence = max(1, (peaks[largest] - peaks[1]) / (largest - 1))
        guess = largest + max(1, int((available - peaks[largest]) / per_sequence))
        if too_large is not None and guess >= too_large:  # fragmented memory holds a little less than there is
            guess = max((largest + too_large) // 2, too_large - max(1, too_large // 32))
        peaks[guess] = peak_of(guess)
    return dict(sorted(peaks.items()))


def print_fit(result: dict) -> None:
    """What was tried, what takes how much, and what to set."""
    rows = {str(micro): {"peak": peak} for micro, peak in result["peak_bytes"].items()}
    print_table(
        "micro", {"peak GB": lambda row: "out of memory" if row["peak"] is None else f"{row['peak'] / GB:.1f}"}, rows
    )
    parts = "  ".join(f"{name} {size / GB:.1f}" for name, size in result["fixed_bytes"].items())
    print(f"GB in all {result['available_bytes'] / GB:.1f}:  {parts}", end="")
    largest, seq_len = result["largest"], result["model"]["seq_len"]
    if largest == 0:
        print("\nNot even one sequence fits; a smaller model or shorter sequences (model.seq_len) would.")
        return
    activations = result["peak_bytes"][largest] - sum(result["fixed_bytes"].values())
    print(f"  activations {activations / GB:.1f} with {largest} sequences")
    dividing = next(m for m in range(largest, 0, -1) if result["batch_tokens"] % (m * seq_len) == 0 or m == 1)
    print(f"The largest that fits: batch.micro={largest}", end="")
    print(
        "" if dividing == largest else f"; that divides batch.tokens={result['batch_tokens']}: batch.micro={dividing}"
    )
