"""The configuration: its schema, how a command line becomes one, and what follows from it.

The dataclasses are the schema that Hydra enforces (unknown key, wrong type); twell/checks.py adds what a type cannot
say. Each knob is documented here, once; configs/ only sets values.
"""

import dataclasses
import difflib
import functools
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING, DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from twell.errors import UserError

CONFIG_DIR = Path(__file__).parent.parent / "configs"


class ConfigError(UserError):
    """A configuration that cannot work; the message names the key, its value and what to do."""


@dataclass
class ModelConfig:
    name: str = MISSING  # names the preset in run names and tables
    n_layers: int = MISSING
    d_model: int = MISSING
    n_heads: int = MISSING  # query heads; the head width is d_model / n_heads
    n_kv_heads: int = MISSING  # key/value heads (grouped-query attention); n_heads = plain multi-head attention
    d_ff: int = MISSING  # hidden width of the gated FFN kinds
    d_ff_nongated: int = MISSING  # hidden width of sparse_nongated, about 1.5x d_ff: the same number of parameters
    seq_len: int = MISSING  # tokens per training sequence, and the longest context when sampling
    vocab_size: int | None = None  # null = the tokenizer's, rounded up to a multiple of 128
    tied: bool = True  # output head = input embedding
    qk_norm: bool = False  # RMSNorm on queries and keys, per head
    qkv_bias: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass
class L1Config:
    """Penalty coef * L1, with L1 = mean over layers, mean over counted tokens of (sum over neurons |a|)."""

    coef: float = 0.0  # with target_l0: where the controller starts
    start_step: int = 0  # the coefficient is 0 up to this optimizer step
    warmup_steps: int = 0  # from there it rises linearly over this many steps
    decay_step: int | None = None  # from this optimizer step on it moves linearly; null = it stays
    decay_steps: int = 0  # over this many steps
    decay_to: float = 0.0  # to this share of it
    layer_weights: list[float] = field(default_factory=list)  # multiply each layer's coefficient; empty = all 1
    # sum: over neurons, as written above (and as the released code of arXiv 2603.23198 does).
    # mean: divides by d_ff as well (that paper's printed formula); the same coef is then d_ff times weaker.
    norm: str = "sum"
    # Mean number of active neurons per token that a controller reaches and holds (twell/control.py); null = fixed coef
    target_l0: float | None = None
    per_layer: bool = False  # true = each layer is held at target_l0 by a coefficient of its own, false = their mean
    # Steps in which the controller makes good for an error; null = a tenth of the schedule's length, at most 100
    response_steps: int | None = None
    range: float = 1000.0  # the controller stays between coef / range and coef * range


@dataclass
class DeadConfig:
    """Neurons that never fire."""

    after_tokens: int = 1_000_000  # tokens without firing after which a neuron counts as dead
    # none | reinit (shake its weights, again and again until it fires) | warmup (prevention: a later and slower
    # penalty); see twell/neurons.py
    remedy: str = "none"


@dataclass
class FFNConfig:
    kind: str = MISSING  # dense_silu | dense_relu | sparse | sparse_nongated
    d_ff: int = MISSING  # hidden width used by this kind: model.d_ff, or model.d_ff_nongated
    # sparse kinds: auto = on a GPU, per layer and from what it has measured, the kernels for the non-zeros or dense
    # products, whichever is faster; on a CPU as torch. triton = always the kernels; torch = always dense products
    impl: str = "auto"
    l1: L1Config = field(default_factory=L1Config)
    dead: DeadConfig = field(default_factory=DeadConfig)


@dataclass
class DataConfig:
    name: str = MISSING  # names the prepared data set and appears in run names
    source: str = MISSING  # stdlib | text | jsonl | hf | shards
    # text, jsonl, shards: files, folders or globs; hf: local data files
    paths: list[str] = field(default_factory=list)
    field: str = "text"  # the JSON key or dataset column that holds the text
    hf_path: str | None = None  # hf: repository on the Hub, or a builder such as "parquet" together with paths
    hf_name: str | None = None  # hf: configuration of that repository
    hf_split: str = "train"
    streaming: bool = False  # hf: tokenize on the fly instead of preparing shards first
    # bytes | a tiktoken encoding (gpt2, cl100k_base, ...) | bpe (trained on the source) | stored (shards: the one
    # that lies beside them) | a folder with a tokenizer, such as runs/NAME/tokenizer
    tokenizer: str = "bytes"
    bpe_vocab_size: int = 16384  # tokenizer=bpe: size of the vocabulary, end-of-text token included
    val_fraction: float = 0.01  # share of documents held out, chosen by the hash of their text
    mask_documents: bool = False  # true = attention does not cross document borders
    dir: str = "datasets"  # prepared data sets live here, one folder each
    shard_tokens: int = 100_000_000  # tokens per shard file
    workers: int | None = None  # processes that tokenize; null = one per core


@dataclass
class BatchConfig:
    tokens: int = MISSING  # tokens per optimizer step, over all ranks and micro-batches
    micro: int = MISSING  # sequences per rank and micro-batch; accumulation steps follow from both


@dataclass
class ScheduleConfig:
    kind: str = "cosine"  # cosine | wsd | linear | constant
    unit: str = "steps"  # steps | tokens: the unit of warmup, decay and horizon
    warmup: int = 0  # linear rise from 0
    decay: int = 0  # wsd: length of the final linear decay
    horizon: int | None = None  # where the schedule ends; null = the run's length when it was first started
    min_lr_ratio: float = 0.1  # the learning rate never falls below this share of its peak


@dataclass
class OptimConfig:
    kind: str = MISSING  # adamw | muon
    lr: float = MISSING  # peak learning rate of AdamW (all parameters, or with muon the non-matrix ones)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # decoupled, on matrices only (embeddings included, norms and biases not)
    clip: float = 1.0  # global gradient norm; 0 = no clipping
    muon_lr: float = 0.02  # muon: peak learning rate of the hidden matrices
    muon_momentum: float = 0.95
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class ParallelConfig:
    """How several processes share one model (twell/parallel.py); a single process ignores it."""

    # ddp = each holds everything; zero1 = each holds its share of the masters and the optimizer state; fsdp = of the
    # weights, too, which are gathered block by block for each use
    mode: str = "ddp"
    # zero1, fsdp: so many processes share one copy, and copies are kept equal as in ddp: the GPUs of a node, say, whose
    # links are faster than those between nodes; null = all of them
    shard_size: int | None = None
    # zero1, fsdp: true = add gradients up in shares, too: 4 bytes a parameter less memory, but they cross the links
    # after every micro-batch instead of once a step
    shard_gradients: bool = False
    timeout: int = 600  # seconds without a step (or a validation, a save) after which a rank gives up on the others


@dataclass
class EvalConfig:
    interval: int = 250  # optimizer steps between validations; also runs after the last step
    tokens: int = 1_048_576  # validation tokens: fixed windows from the start of the validation split
    sample_tokens: int = 64  # tokens sampled from the model at each validation; 0 = none
    prompt: str = ""  # what the sample continues; empty = a new document


@dataclass
class CheckpointConfig:
    interval: int = 1000  # optimizer steps between checkpoints; also saved at the end and on SIGTERM
    keep: int = 2  # newest checkpoints kept
    best: bool = True  # keep the one with the lowest validation loss as well
    background: bool = True  # write while training goes on, from a copy in the host's memory


@dataclass
class LogConfig:
    interval: int = 10  # optimizer steps between log lines


@dataclass
class WandbConfig:
    # auto = online with a key and a reachable server, else offline; offline; online; disabled. Never prompts.
    mode: str = "auto"
    project: str = "twell"
    entity: str | None = None
    group: str | None = None  # null = model and data set, so that dense and sparse runs of one comparison meet
    tags: list[str] = field(default_factory=list)  # added to the automatic ones (model, ffn, data, optim, sweep:KEY)


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    ffn: FFNConfig = field(default_factory=FFNConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    name: str | None = None  # the run's folder under `out`; null = made from the groups and overrides chosen
    out: str = "runs"
    seed: int = 1337
    steps: int | None = None  # length of the run in optimizer steps
    tokens: int | None = None  # length of the run in tokens, rounded up to whole steps; overrides `steps`
    # A run of the same shape whose newest weights a new run starts from, e.g. an imported model; null = random weights
    init: str | None = None
    resume: str = "auto"  # auto = continue the run if it has a checkpoint; never = start over, keeping the old folder
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto = bf16 on a GPU, fp32 on CPU; bf16 | fp32. Master weights are always fp32
    compile: bool | None = None  # torch.compile; null = on a GPU
    # What backward computes again instead of keeping it, to save memory: none | selective = the FFN half of each block,
    # about a fifth more work (a sparse layer keeps little there anyway) | full = each block, a third more work
    recompute: str = "none"
    stop_timeout: int = 120  # seconds after SIGTERM, SIGUSR1 or Ctrl-C in which the run must have saved and left
    # Replay each micro-step from a CUDA graph (one GPU): auto = for models below 500M parameters, whose kernels are
    # shorter than the host takes to launch them; on | off. See twell/graphs.py for what it costs.
    cuda_graph: str = "auto"
    max_nonfinite: int = 10  # stop after this many steps in a row with a non-finite loss or gradient norm
    profile: int = 0  # write a torch trace of this many steps (after warm-up) into the run folder
    # Measures speed, and only that: weights that make so many neurons fire per token in every layer (twell/forced.py),
    # and a learning rate of 0; nothing is saved. null = train
    forced_nnz: float | None = None


def register() -> None:
    """Make the schema known to Hydra under the name that configs/config.yaml starts from."""
    ConfigStore.instance().store(name="schema", node=Config)


def hydra_main(main: Callable[[DictConfig], None]) -> Callable[[], None]:
    """Decorate `main(cfg)`: composes configs/ with the command line, and turns config mistakes into short messages.

    A `UserError`, or a mistake found by Hydra or OmegaConf, ends the process with exit code 2 and without a
    traceback; every other exception passes through untouched. Of several ranks only the first one prints.
    """

    @functools.wraps(main)
    def run() -> None:
        failed = False

        def report(error: Exception) -> None:
            nonlocal failed
            failed = True
            if os.environ.get("RANK", "0") == "0":
                print(f"error: {explain(error)}", file=sys.stderr)

        def job(cfg: DictConfig) -> None:
            try:
                main(cfg)
            except UserError as error:  # caught here, since Hydra would add lines of its own; a sweep goes on
                report(error)

        register()
        # Hydra would print its own trace and exit; with this it raises, and `explain` can say what is allowed.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        # Hydra finds configs/ relative to the file of the function it decorates: an absolute path needs no file.
        entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="config")(job)
        try:
            entry()
        except (HydraException, OmegaConfBaseException) as error:
            report(error)
        except KeyboardInterrupt:
            print("interrupted; the same command continues", file=sys.stderr)
            sys.exit(130)
        finally:  # also when a sweep is stopped after one of its jobs failed
            if failed:
                sys.exit(2)

    return run


def explain(error: BaseException) -> str:
    """The message of a configuration mistake in one or two lines, with the keys that would have been allowed."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OverrideParseException):
        quoted = f"'{error.override.partition('=')[0]}=\"...\"'"
        return f"{error.override}: {_first_line(error)}; a value with special characters is written {quoted}"
    cause = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if not isinstance(cause, OmegaConfBaseException) or cause.full_key is None:
        return _first_line(error)
    message = f"{cause.full_key}: {_first_line(cause)}"
    if "ListConfig" in message:
        message += f"; a list is written {cause.full_key}=[...]"
    schema = cause.object_type
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(schema):
        names = [f.name for f in dataclasses.fields(schema)]
        close = difflib.get_close_matches(str(cause.key), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        message += f"; {hint}allowed here: {', '.join(names)}"
    return message


def _first_line(error: BaseException) -> str:
    """The first line of a message, and the choices of a group if Hydra lists them below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    options = next((i for i, line in enumerate(lines) if line.startswith("Available options")), None)
    if options is None:
        return lines[0]
    names = itertools.takewhile(lambda line: not line.startswith("Config search path"), lines[options + 1 :])
    return f"{lines[0]}; allowed are {', '.join(names)}"


def padded_vocab_size(cfg: Config, n_vocab: int) -> int:
    """Rows of the embedding: the tokenizer's `n_vocab` ids rounded up to a multiple of 128, or model.vocab_size."""
    if cfg.model.vocab_size is None:
        return -(-n_vocab // 128) * 128
    if cfg.model.vocab_size < n_vocab:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is smaller than the {n_vocab} ids of data.tokenizer="
            f"{cfg.data.tokenizer}; use null or at least {n_vocab}"
        )
    return cfg.model.vocab_size


def accumulation_steps(cfg: Config, world_size: int) -> int:
    """Micro-batches per optimizer step and rank that `batch.tokens` asks for; ConfigError if it does not divide."""
    per_micro_step = cfg.batch.micro * cfg.model.seq_len * world_size
    if cfg.batch.tokens % per_micro_step:
        lower = cfg.batch.tokens // per_micro_step * per_micro_step
        choices = f"{lower} or {lower + per_micro_step}" if lower else f"{per_micro_step}, or a smaller batch.micro"
        raise ConfigError(
            f"batch.tokens={cfg.batch.tokens} is not a multiple of batch.micro={cfg.batch.micro} x model.seq_len="
            f"{cfg.model.seq_len} x WORLD_SIZE={world_size} = {per_micro_step}; use {choices}"
        )
    return cfg.batch.tokens // per_micro_step


def total_steps(cfg: Config) -> int:
    """Length of the run in optimizer steps, from `tokens` or else from `steps`."""
    if cfg.tokens is not None:
        return -(-cfg.tokens // cfg.batch.tokens)
    return cfg.steps
