"""The models that `python -m twell.bench step`, `prefill` and `fit` run: one set of weights, several FFNs around it."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from data.loader import Batch, validation_batches
from data.prepare import prepare
from kernels.reference import with_residual
from twell import checkpoint, parallel
from twell.arguments import check_values
from twell.checks import CHOICES
from twell.config import CONFIG_DIR, Config, padded_vocab_size, register
from twell.errors import UserError
from twell.ffn import DenseFFN, FFNResult
from twell.forced import MOST
from twell.model import Transformer

VARIANTS = ("dense_silu", "dense_relu", "relu_l1", "sparse")


@dataclass
class ModelOptions:
    """Keys that the commands have in common."""

    model: str = "1p5b"  # preset of configs/model; several, with commas between them, run one after another
    run: str = (
        ""  # folder of a run: the weights of its latest checkpoint and its validation text, instead of forced firing
    )
    nnz: float = 30.0  # neurons that are forced to fire per token, mean of every layer
    spread: float = 0.6  # log-normal deviation of that number over tokens
    variants: str = ",".join(VARIANTS)  # FFNs to compare; relu_l1 = dense_relu with the L1 term and no statistics
    micro: int = 0  # sequences per micro-batch; 0 = the preset's
    seq: int = 0  # tokens per sequence; 0 = the preset's
    layers: int = 0  # 0 = the preset's
    vocab: int = 50257  # ids of the random tokens, and the embedding rounded up to a multiple of 128 (50257: gpt2's)
    impl: str = "auto"  # of the sparse FFN: auto | triton | torch
    recompute: str = "none"  # none | selective | full: as in twell/config.py
    cuda_graph: str = "auto"  # auto = for training steps of small models; on | off: as in twell/config.py
    dtype: str = "auto"  # auto = bf16 on a GPU, fp32 on CPU; bf16 | fp32
    compile: bool | None = None  # null = on a GPU
    seed: int = 1337


class DenseReluL1(DenseFFN):
    """dense_relu with the L1 term of its activations and without statistics: the least that ReLU + L1 must cost."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__(d_model, d_ff, "relu")

    def forward(self, x: Tensor, counted: Tensor | None, residual: Tensor | None = None) -> FFNResult:
        w_gate, w_up, w_down = self.weights(x.dtype)
        a = F.relu(F.linear(x, w_gate)) * F.linear(x, w_up)  # [b, t, h]
        l1 = a.abs().sum(-1, dtype=torch.float32)  # [b, t]
        y = with_residual(a @ w_down, residual)
        return FFNResult(y, (l1 if counted is None else l1.where(counted, 0)).sum())


class Setup:
    """What one preset or run makes of the options: its config, its initial weights and its tokens."""

    def __init__(self, options: ModelOptions, preset: str):
        _check(options, preset)
        self.options = options
        self.forced = not options.run  # whether the weights are made to fire as asked
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.dtype = parallel.compute_dtype(options.dtype, self.device.type)
        self.compiled = self.device.type == "cuda" if options.compile is None else options.compile
        self.cfg = _config(options, preset)
        most = MOST * self.cfg.ffn.d_ff
        rule = f"must be above 0, and at most {most:g} of {self.cfg.ffn.d_ff} neurons"
        check_values(options, [(not self.forced or 0 < options.nnz <= most, "nnz", rule)])
        self.n_vocab = options.vocab
        if options.run:
            self.prepared = prepare(self.cfg.data, val_tokens=self.cfg.eval.tokens)
            self.n_vocab = self.prepared.tokenizer.n_vocab
        self.vocab_size = padded_vocab_size(self.cfg, self.n_vocab)

    def build(self) -> Transformer:
        """The sparse model on the device, in fp32: of the run, or freshly initialised."""
        with torch.device(self.device):
            model = self._transformer("sparse")
        if self.options.run:
            checkpoint.load_model(Path(self.options.run), model)
        else:
            initialise(model, self.options.seed)
        return model

    def twin(self, variant: str, model: Transformer) -> Transformer:
        """Another FFN around the very parameters of `model`."""
        with torch.device("meta"):
            twin = self._transformer("dense_relu" if variant == "relu_l1" else variant)
            if variant == "relu_l1":
                for block in twin.blocks:
                    block.ffn = DenseReluL1(self.cfg.model.d_model, self.cfg.ffn.d_ff)
        for name, parameter in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(owner), leaf, parameter)
        twin.rope = model.rope
        return twin

    def _transformer(self, kind: str) -> Transformer:
        ffn = copy.deepcopy(self.cfg.ffn)
        ffn.kind = kind
        return Transformer(self.cfg.model, ffn, self.vocab_size, self.n_vocab, self.dtype, self.options.recompute)

    def batches(self, n_micro: int) -> list[Batch]:
        """Micro-batches of random tokens, or of the run's text."""
        micro, seq_len = self.cfg.batch.micro, self.cfg.model.seq_len
        if self.options.run:
            batches = validation_batches(
                self.prepared, tokens=micro * n_micro * seq_len, seq_len=seq_len, micro=micro,
                mask_documents=self.cfg.data.mask_documents, device=self.device,
            )  # fmt: skip
            if len(batches) < n_micro:
                raise UserError(f"run={self.options.run}: its validation text is too short; use a smaller micro")
            return batches
        generator = torch.Generator().manual_seed(self.options.seed)
        ids = torch.randint(self.n_vocab, (n_micro, micro, seq_len + 1), generator=generator).to(self.device)
        return [Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), None) for part in ids]

    def describe(self, name: str, model: Transformer, n_micro: int) -> dict:
        """What was run, for the head of a result."""
        shape = {key: self.cfg.model[key] for key in ("n_layers", "d_model", "n_heads", "n_kv_heads", "seq_len")}
        return {
            "name": name,
            "model": shape | {"d_ff": self.cfg.ffn.d_ff, "vocab_size": self.vocab_size, "parameters": model.n_params},
            "micro": self.cfg.batch.micro,
            "n_micro": n_micro,
            "forced_nnz": self.options.nnz if self.forced else None,
        }


def _check(options: ModelOptions, preset: str) -> None:
    """What can be said without knowing the model; of all presets asked for, since one comes after another."""
    presets = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))
    for name in [] if options.run else [preset, *options.model.split(",")]:
        if name not in presets:
            raise UserError(f"model={name}: there is no such preset, but {', '.join(presets)}")
    choices = {"impl": "ffn.impl", "recompute": "recompute", "cuda_graph": "cuda_graph", "dtype": "dtype"}
    sizes = ("micro", "seq", "layers")
    rules = [
        *(
            (getattr(options, k) in CHOICES[c], k, f"must be one of {', '.join(CHOICES[c])}")
            for k, c in choices.items()
        ),
        *((getattr(options, k) >= 0, k, "must be at least 1, or 0 for the preset's") for k in sizes),
        (options.vocab >= 1, "vocab", "must be at least 1"),
        (options.spread >= 0, "spread", "must be at least 0"),
    ]
    check_values(options, rules)


def selected(options: ModelOptions, also: Sequence[str] = ()) -> list[str]:
    """The variants asked for, of all there are and `also`; UserError if one does not exist."""
    names = options.variants.split(",")
    for name in names:
        if name not in (*VARIANTS, *also):
            raise UserError(f"variants={options.variants}: {name!r} is none of {', '.join((*VARIANTS, *also))}")
    return names


def _config(options: ModelOptions, preset: str) -> DictConfig:
    """The trainer's config with what the options change."""
    if options.run:
        path = Path(options.run) / "config.yaml"
        if not path.exists():
            raise UserError(f"run={options.run}: no run there ({path} is missing)")
        cfg = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        if cfg.ffn.kind not in ("sparse", "dense_relu"):
            raise UserError(f"run={options.run}: ffn.kind={cfg.ffn.kind}, but only gated ReLU models can be compared")
    else:
        register()
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            cfg = compose("config", [f"model={preset}", "ffn=sparse"])
        cfg.model.vocab_size = None
    cfg.ffn.impl, cfg.cuda_graph = options.impl, options.cuda_graph
    cfg.batch.micro = options.micro or cfg.batch.micro
    if not options.run:
        cfg.model.seq_len = options.seq or cfg.model.seq_len
        cfg.model.n_layers = options.layers or cfg.model.n_layers
    return cfg


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """`model.init_weights(seed)` on all cores: torch draws outside of the interpreter's lock."""
    named = list(model.named_parameters())
    with ThreadPoolExecutor() as pool:
        for group in _groups(named, 64):  # not all at once: the values would take as much memory as the model
            values = pool.map(lambda item: model.initial_value(item[0], seed), group)
            for (_, parameter), value in zip(group, values):
                parameter.copy_(value)


def _groups(items: Sequence, size: int) -> list[Sequence]:
    return [items[i : i + size] for i in range(0, len(items), size)]
