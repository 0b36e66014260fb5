"""Decoding, dense against sparse: one token for every row of a batch, as a CUDA graph of compiled parts.

    python -m twell.bench decode model=1p5b nnz=30 out=results/decode.json    some minutes on an H200
    python -m twell.bench decode run=runs/NAME                                real firing: a run's weights and text
    python -m twell.bench decode run=runs/NAME check=256 rows=8               instead, compare 256 tokens of greedy text
    python -m twell.bench decode model=nano layers=2 vocab=300 rows=1,3       a smoke test, on any machine

All variants work on the same weights, in the compute dtype, and take turns; each row has read a prompt of its own and
is given a random next token (or the text's), since tokens of an untrained model soon repeat themselves and would fire
the same neurons in every row. A step includes the head and the choice of the most probable token; the FFNs of all
layers are also timed alone. Energy is measured in a run of its own after the timing.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from twell.arguments import check_values, whole_numbers
from twell.bench import measure
from twell.bench.step_measure import Call, joules_per_token, release
from twell.bench.step_model import ModelOptions, Setup, selected
from twell.bench.step_report import print_environment, print_table
from twell.decoder import Decoder, step_ffn
from twell.errors import UserError
from twell.forced import force_firing
from twell.greedy_check import compare_greedy
from twell.inference import PREFILL_TOKENS, SLOTS, Engine
from twell.model import Transformer
from twell.sampling import GREEDY

N_STEPS = 8  # different tokens, in turn


@dataclass
class Options(ModelOptions):
    variants: str = "dense_silu,dense_relu,sparse"
    rows: str = "1,8,64,512"  # batch sizes, one after another
    prompt: int = 128  # tokens that every row has read
    rounds: int = 20  # turns that each variant gets, of 8 steps each
    seconds: float = 3.0  # for the energy of each variant
    energy: bool = True
    check: int = 0  # instead of timing: tokens of greedy text that sparse and dense must have in common
    out: str = ""  # JSON file for all results, rewritten after each batch size


class Contender:
    """One variant with its prompts read; a call takes one step."""

    def __init__(self, engine: Engine, tokens: Tensor):
        """tokens int64 [rows, prompt + N_STEPS]."""
        self.engine, self.device = engine, engine.device
        prompt = tokens.shape[1] - N_STEPS
        at_once = max(1, PREFILL_TOKENS // prompt)
        for rows in torch.arange(len(tokens), device=self.device).split(at_once):
            engine.decoder.prefill(tokens[rows, :prompt], torch.full_like(rows, prompt), rows, engine.cache)
        engine.positions.fill_(prompt)
        self.next = tokens[:, prompt:].T.contiguous()  # [N_STEPS, rows]
        self.step = engine.stepper(engine.length, GREEDY)

    def __call__(self, i: int) -> None:
        self.engine.tokens.copy_(self.next[i])
        self.step()


def run(options: Options) -> None:
    variants = selected(options)
    if "relu_l1" in variants:
        raise UserError(f"variants={options.variants}: without gradients, relu_l1 is dense_relu")
    batch_sizes = _check(options)
    setup = Setup(options, options.run or options.model)
    if options.prompt + N_STEPS > setup.cfg.model.seq_len:
        raise UserError(f"prompt={options.prompt}: leaves no {N_STEPS} of seq_len={setup.cfg.model.seq_len} tokens")
    environment = measure.environment(setup.device) | {"dtype": str(setup.dtype).removeprefix("torch.")}
    print_environment(environment)
    shape = f"{setup.cfg.model.n_layers} layers, d_model {setup.cfg.model.d_model}, d_ff {setup.cfg.ffn.d_ff}"
    patience = "" if setup.device.type == "cuda" else "; on a CPU a large model takes many minutes, model=nano seconds"
    print(f"making the weights of {options.run or options.model}: {shape}{patience}", flush=True)
    model = setup.twin("dense_relu", setup.build())  # which needs no kernels to say what fires
    for parameter in model.parameters():
        parameter.data = parameter.data.to(setup.dtype)
    text = setup.batches(1)[0].tokens
    if setup.forced:
        force_firing(model, options.nnz, text, token_sigma=options.spread)
    if options.check:
        check(setup, model, text, batch_sizes[0])
        return
    results = []
    for rows in batch_sizes:
        results.append(measure_rows(setup, model, variants, cut(text, rows, options.prompt + N_STEPS)))
        print_result(results[-1])
        if options.out:  # after each batch size: a run that is cut short has lost only the rest
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            head = {"environment": environment, "options": asdict(options)} | setup.describe(options.model, model, 1)
            Path(options.out).write_text(json.dumps(head | {"results": results}, indent=1) + "\n")
        release()


def _check(options: Options) -> list[int]:
    """The batch sizes; UserError for the first option out of range."""
    batch_sizes = whole_numbers(options, "rows")
    rules = (
        (options.prompt >= 1, "prompt", "must be at least 1"),
        (options.rounds >= 1, "rounds", "must be at least 1"),
        (options.seconds >= 0, "seconds", "must be at least 0"),
        (options.check >= 0, "check", "must be at least 1, or 0 to measure"),
    )
    check_values(options, rules)
    return batch_sizes


def cut(text: Tensor, rows: int, length: int) -> Tensor:
    """`rows` pieces [rows, length] of text [b, t], from its beginning again if it is too short for all."""
    text = text.flatten()
    return text[torch.arange(rows * length, device=text.device) % len(text)].view(rows, length)


def engine_of(setup: Setup, model: Transformer, variant: str, rows: int, length: int) -> Engine:
    impl = setup.options.impl if variant == "sparse" else "torch"
    return Engine(setup.twin(variant, model), rows, length, impl=impl, compile=setup.compiled)


def measure_rows(setup: Setup, model: Transformer, variants: list[str], tokens: Tensor) -> dict:
    """All numbers of all variants at one batch size, as they go into the JSON file."""
    options, (rows, length) = setup.options, tokens.shape
    torch._dynamo.reset()  # what other shapes have compiled counts towards a limit
    slots = -(-length // SLOTS) * SLOTS
    contenders = {name: Contender(engine_of(setup, model, name, rows, slots), tokens) for name in variants}
    timings = measure.alternate(contenders, N_STEPS, options.rounds, setup.device, warmup=2)
    inputs = ffn_inputs(model, tokens[:, : options.prompt + 1])
    ffns = {name: ffns_alone(contender.engine.decoder, inputs, setup) for name, contender in contenders.items()}
    ffn_timings = measure.alternate(ffns, 1, options.rounds, setup.device, warmup=2)
    results = {}
    for name, timing in timings.items():
        call = Call(False, N_STEPS, rows, 0)
        joules = joules_per_token(contenders[name], call, options.seconds, setup.device) if options.energy else None
        results[name] = {
            "ms": timing.median,
            "spread": timing.spread,
            "tokens_per_second": 1e3 * rows / timing.median,
            "ffn_ms": ffn_timings[name].median,
            "joules_per_token": joules,
            "sparse_layers": sum(s.sparse for s in contenders[name].engine.decoder.shapes),
        }
    return {"rows": rows, "firing": firing(model, inputs), "variants": results}


@torch.no_grad()
def ffn_inputs(model: Transformer, tokens: Tensor) -> list[Tensor]:
    """What each layer's FFN sees at the last of tokens [rows, t]: [rows, d]."""
    inputs: list[list[Tensor]] = [[] for _ in model.blocks]
    hooks = [
        block.ffn.register_forward_pre_hook(lambda _ffn, args, seen=seen: seen.append(args[0][:, -1].clone()))
        for block, seen in zip(model.blocks, inputs)
    ]
    for part in tokens.split(64):  # more at once would fill the memory with logits
        model(part)
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in inputs]


def ffns_alone(decoder: Decoder, inputs: list[Tensor], setup: Setup) -> Callable[[int], object]:
    """The FFNs of all layers, one after the other, each with its own input, compiled and captured as in a step."""
    ffn = torch.compile(step_ffn, fullgraph=True, dynamic=False) if setup.compiled else step_ffn

    @torch.no_grad()
    def run_all(_: int) -> None:
        for x, w, s in zip(inputs, decoder.layers, decoder.shapes):
            ffn(x[:, None], w, s)

    return measure.captured(run_all, 1) if setup.device.type == "cuda" else run_all


def firing(model: Transformer, inputs: list[Tensor]) -> dict[str, float]:
    """Neurons that fire, mean over rows and layers, and that fire on any row, mean over layers."""
    fires = [F.linear(x, block.ffn.w_gate.detach()) > 0 for x, block in zip(inputs, model.blocks)]  # [rows, h] each
    mean = sum(f.sum().item() for f in fires) / (len(fires) * len(inputs[0]))
    return {"mean": mean, "union": sum(f.any(0).sum().item() for f in fires) / len(fires)}


def check(setup: Setup, model: Transformer, text: Tensor, rows: int) -> None:
    """Print where the greedy texts part; UserError if anywhere it is not at a tie."""
    options = setup.options
    if options.prompt + options.check > model.seq_len:
        raise UserError(
            f"check={options.check}: with prompt={options.prompt} that is more than seq_len={model.seq_len}"
        )
    dense, sparse = (engine_of(setup, model, name, rows, model.seq_len) for name in ("dense_relu", "sparse"))
    if not sparse.decoder.shape.sparse:
        raise UserError(
            f"check={options.check}: rows={rows} would run dense here; rows up to 64 on a GPU, or impl=triton"
        )
    comparisons = compare_greedy(dense, sparse, cut(text, rows, options.prompt).tolist(), options.check)
    for i, comparison in enumerate(comparisons):
        print(f"prompt {i}: {comparison}")
    if faults := sum(c.differs and not c.tie for c in comparisons):
        raise UserError(f"check={options.check}: {faults} of {rows} texts differ by more than a tie")


def print_result(result: dict) -> None:
    variants, fires = result["variants"], result["firing"]
    print(f"\nbatch {result['rows']}: {fires['mean']:.1f} neurons fire per token, {fires['union']:.0f} on some row")
    columns = {
        "tokens/s": lambda v: f"{v['tokens_per_second']:,.0f}",
        "ms per step": lambda v: f"{v['ms']:.3f}",
        "FFNs alone": lambda v: f"{v['ffn_ms']:.3f}",
        "±": lambda v: f"{50 * v['spread']:.1f}%",
        "mJ/token": lambda v: "n/a" if v["joules_per_token"] is None else f"{1e3 * v['joules_per_token']:.2f}",
        "sparse layers": lambda v: str(v["sparse_layers"]),
    }
    for base in ("dense_silu", "dense_relu"):
        if base in variants:
            columns[f"over {base}"] = lambda v, base=base: f"{variants[base]['ms'] / v['ms']:.3f}"
    print_table("variant", columns, variants)
    print(flush=True)
