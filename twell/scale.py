"""Scale on paper: memory per GPU, and communication against computation, for any number of GPUs.

    python -m twell.scale                                            # 2B and 8B on 8 to 1024 H200s
    python -m twell.scale model=1p5b gpus=[2,4,8] all_reduce=320 speed=80

What is added up, P being the parameters and n the GPUs that share one copy (bytes a parameter):

    mode     weights    masters, optimizer    gradients              over the links of each GPU, a step
    ddp      2          12                    4                      8 (all-reduce of fp32 gradients)
    zero1    2          12 / n                4 + 4 / n              2 gathered + 4 scattered
    fsdp     2 / n      12 / n                4 + 4 / n              2 gathered twice a micro-batch + 4 scattered
    with shard_gradients                      4 / n                  4 scattered a micro-batch

fsdp holds two units' weights beside its share. On several nodes every node has a copy (parallel.shard_size), and each
GPU adds its share up with those of the other nodes over its own network card, as NCCL does for ddp, too. Communication
runs beside computation: the gradients' beside the last backward pass (half of it can be counted on), the gathering of
weights beside all. What does not fit there makes a step longer.

Measured speeds come from `python -m twell.bench scale`; until it has run on the machine in question they are ASSUMED,
and the table says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from twell.arguments import check_values, parse_arguments, run_command
from twell.bench.step_model import ModelOptions, Setup
from twell.bench.step_report import print_table
from twell.errors import UserError
from twell.model import Transformer
from twell.sharded import units

GB = 1e9
NAMES = ("ddp", "zero1", "fsdp", "fsdp+")  # the simplest first; +: with parallel.shard_gradients
BACKWARD = 2 / 3  # of a micro-batch's time
OVERLAPPED = 0.5  # of the last backward pass: the part in which gradients are there and time is left


@dataclass
class Options:
    model: str = "2b,8b"  # presets of configs/model, with commas between them
    gpus: list[int] = field(default_factory=lambda: [8, 16, 64, 256, 1024])
    per_node: int = 8  # GPUs of a node
    batch_tokens: int = 4_194_304  # tokens a step
    micro_tokens: int = 8192  # tokens a micro-batch
    memory: float = 141.0  # GB of one GPU
    # GB of a micro-batch; 0 = 22 d_model + 6 d_ff bytes per token and layer, as was measured of a dense 1.5B model
    activations: float = 0.0
    # ASSUMED until measured on the machine in question, in 1e9 bytes a second and 1e12 FLOP/s of one GPU:
    speed: float = 450.0  # dense-equivalent, as MFU counts it, of a training step without communication
    all_reduce: float = 300.0  # bytes of a buffer that an all-reduce in a node gets through
    network: float = 40.0  # what the network card of one GPU sends (400 Gbit/s, 80 % reached)


@dataclass(frozen=True)
class Model:
    parameters: int
    unit: int  # parameters that fsdp gathers at a time
    flops_per_token: int
    activations: float  # bytes of a micro-batch


@dataclass(frozen=True)
class Plan:
    """One way to run a model on so many GPUs."""

    mode: str
    gpus: int
    shard_size: int  # GPUs that share a copy
    memory: float  # bytes on each GPU
    compute: float  # seconds a step
    communication: float  # seconds a step, if nothing else ran
    exposed: float  # of them, what computation does not hide

    @property
    def efficiency(self) -> float:
        return self.compute / (self.compute + self.exposed)


def plan(model: Model, name: str, gpus: int, options: Options) -> Plan:
    """Memory and time of a mode on `gpus`; zero1 and fsdp share a copy within a node. "fsdp+": with shard_gradients."""
    mode, shard_gradients = name.removesuffix("+"), name.endswith("+")
    shard_size = min(gpus, options.per_node) if mode != "ddp" else 1
    p, n = model.parameters, shard_size
    weights = 2 * p if mode != "fsdp" else 2 * p / n + 4 * model.unit
    gradients = 4 * p if mode == "ddp" else 4 * p / n + (0 if shard_gradients else 4 * p)
    memory = weights + 12 * p / n + gradients + model.activations

    tokens = options.batch_tokens / gpus
    n_micro = max(1.0, tokens / options.micro_tokens)
    compute = tokens * model.flops_per_token / (options.speed * 1e12)
    inside, network = options.all_reduce * GB, options.network * GB
    nodes = -(-gpus // options.per_node)
    # An all-reduce is a scattering and a gathering: one of them takes half of its time.
    scattered = 4 * p / (2 * inside) * (n_micro if shard_gradients else 1)
    gathered = {"ddp": 4 * p, "zero1": 2 * p, "fsdp": 2 * p * 2 * n_micro}[mode] / (2 * inside)
    if mode == "ddp":  # what it gathers are gradients, too
        scattered, gathered = scattered + gathered, 0.0
    # Between nodes each GPU adds up its part, which its card sends and receives twice.
    scattered += 2 * 4 * p / min(gpus, options.per_node) * (nodes - 1) / nodes / network
    last_backward = BACKWARD * OVERLAPPED * compute / n_micro
    room = last_backward * (n_micro if shard_gradients else 1)
    exposed = max(0.0, scattered - room) + max(0.0, gathered - OVERLAPPED * compute)
    return Plan(name, gpus, shard_size, memory, compute, scattered + gathered, exposed)


def describe_model(preset: str, options: Options) -> Model:
    """A preset with gpt2's vocabulary; the activations are those of dense FFNs, sparse ones hold less."""
    setup = Setup(ModelOptions(), preset)
    shape, d_ff = setup.cfg.model, setup.cfg.ffn.d_ff
    with torch.device("meta"):
        model = Transformer(shape, setup.cfg.ffn, setup.vocab_size, setup.n_vocab)
    per_token = shape.n_layers * (22 * shape.d_model + 6 * d_ff)
    unit = sum(p.numel() for block in units(model.blocks)[0] for p in block.parameters())
    activations = options.activations * GB or per_token * options.micro_tokens
    return Model(model.n_params, unit, model.flops_per_token(), activations)


def best(plans: Sequence[Plan], options: Options) -> Plan | None:
    """The fastest that fits, the simplest of equally fast ones; `plans` in the order of simplicity."""
    fitting = [plan for plan in plans if plan.memory < 0.92 * options.memory * GB]
    return max(fitting, key=lambda plan: round(plan.efficiency, 2), default=None)


def run(options: Options) -> None:
    print(
        f"ASSUMED unless set from a measurement: {options.speed:g} TFLOP/s a GPU, all-reduce {options.all_reduce:g} "
        f"GB/s in a node and {options.network:g} GB/s a GPU between nodes\n{options.batch_tokens:,} tokens a step, "
        f"{options.micro_tokens:,} a micro-batch, {options.memory:g} GB a GPU\n"
    )
    for preset in options.model.split(","):
        model, rows = describe_model(preset, options), {}
        for gpus in options.gpus:
            plans = [plan(model, name, gpus, options) for name in NAMES]
            chosen = best(plans, options)
            for each in plans:
                rows[f"{gpus} {each.mode}{' *' if each is chosen else ''}"] = each
        print(f"{preset}: {model.parameters / 1e9:.2f}B parameters (* = to be used; + = parallel.shard_gradients=true)")
        columns = {
            "share a copy": lambda plan: str(plan.shard_size),
            "GB a GPU": lambda plan: f"{plan.memory / GB:.1f}",
            "compute ms": lambda plan: f"{1e3 * plan.compute:.0f}",
            "communication ms": lambda plan: f"{1e3 * plan.communication:.0f}",
            "not hidden ms": lambda plan: f"{1e3 * plan.exposed:.0f}",
            "efficiency": lambda plan: f"{plan.efficiency:.0%}",
        }
        print_table("GPUs mode", columns, rows)
        print()


def main(arguments: Sequence[str]) -> None:
    options = parse_arguments(arguments, Options, __doc__)
    positive = ("per_node", "batch_tokens", "micro_tokens", "memory", "speed", "all_reduce", "network")
    check_values(options, [(getattr(options, key) > 0, key, "must be above 0") for key in positive])
    if any(gpus < 1 or (gpus > options.per_node and gpus % options.per_node) for gpus in options.gpus):
        raise UserError(f"gpus={options.gpus}: whole nodes of per_node={options.per_node}, or a part of one")
    run(options)


if __name__ == "__main__":
    run_command(main)
