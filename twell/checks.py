"""Every check of a configuration that can be made before any work starts and that a type cannot say: allowed values,
ranges, combinations of keys, and what this machine lacks. Every error names the key, its value and what is allowed.
"""

import math
import os
import shutil

import torch
from omegaconf import OmegaConf

from kernels.ops import unsupported
from twell import parallel
from twell.config import Config, ConfigError, accumulation_steps
from twell.forced import MOST

CHOICES = {
    "ffn.kind": ("dense_silu", "dense_relu", "sparse", "sparse_nongated"),
    "ffn.impl": ("auto", "triton", "torch"),
    "ffn.l1.norm": ("sum", "mean"),
    "ffn.dead.remedy": ("none", "reinit", "warmup"),
    "data.source": ("stdlib", "text", "jsonl", "hf", "shards"),
    "optim.kind": ("adamw", "muon"),
    "optim.schedule.kind": ("cosine", "wsd", "linear", "constant"),
    "optim.schedule.unit": ("steps", "tokens"),
    "wandb.mode": ("auto", "online", "offline", "disabled"),
    "recompute": ("none", "selective", "full"),
    "parallel.mode": ("ddp", "zero1", "fsdp"),
    "cuda_graph": ("auto", "on", "off"),
    "resume": ("auto", "never"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "bf16", "fp32"),
}
AT_LEAST = {
    "model.n_layers": 1,
    "model.d_model": 1,
    "model.n_heads": 1,
    "model.n_kv_heads": 1,
    "model.seq_len": 1,
    "ffn.d_ff": 1,
    "ffn.l1.coef": 0,
    "ffn.l1.start_step": 0,
    "ffn.l1.warmup_steps": 0,
    "ffn.l1.decay_step": 0,
    "ffn.l1.decay_steps": 0,
    "ffn.l1.decay_to": 0,
    "ffn.l1.response_steps": 1,
    "ffn.l1.range": 1,
    "ffn.dead.after_tokens": 1,
    "data.bpe_vocab_size": 258,
    "data.shard_tokens": 1,
    "data.workers": 1,
    "batch.tokens": 1,
    "batch.micro": 1,
    "optim.lr": 0,
    "optim.muon_lr": 0,
    "optim.eps": 0,
    "optim.weight_decay": 0,
    "optim.clip": 0,
    "optim.schedule.warmup": 0,
    "optim.schedule.decay": 0,
    "optim.schedule.horizon": 1,
    "parallel.shard_size": 1,
    "parallel.timeout": 1,
    "eval.interval": 1,
    "eval.tokens": 1,
    "eval.sample_tokens": 0,
    "checkpoint.interval": 1,
    "checkpoint.keep": 1,
    "log.interval": 1,
    "steps": 1,
    "tokens": 1,
    "stop_timeout": 1,
    "max_nonfinite": 1,
    "profile": 0,
    "seed": 0,
}
AT_MOST = {"ffn.l1.coef": 1e6, "ffn.l1.decay_to": 1e6}  # far above anything that trains, far below where fp32 ends
POSITIVE = ("model.norm_eps", "model.rope_theta")
INTEGERS = 2**63  # what a tensor can hold


def validate(cfg: Config, world_size: int = 1) -> None:
    """Raise ConfigError for the first value or combination in `cfg` that cannot work on `world_size` processes."""
    # A key added with "+" is not in the schema: merging into a fresh one refuses it.
    OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(cfg))
    _check_values(cfg)
    _check_model(cfg)
    _check_l1(cfg)
    _check_forced(cfg)
    _check_data(cfg)
    _check_schedule(cfg)
    _check_machine(cfg, world_size)
    _check_parallel(cfg, world_size)
    accumulation_steps(cfg, world_size)


def _check_parallel(cfg: Config, world_size: int) -> None:
    p = cfg.parallel
    if p.mode == "ddp":
        for key, unset in (("shard_size", None), ("shard_gradients", False)):
            if p[key] != unset:
                raise ConfigError(
                    f"parallel.{key}={p[key]} with parallel.mode=ddp, which divides nothing; use parallel=zero1 or fsdp"
                )
        return
    if p.shard_size is not None and world_size > 1 and world_size % p.shard_size:
        raise ConfigError(
            f"parallel.shard_size={p.shard_size} does not divide WORLD_SIZE={world_size}; use a divisor, or null"
        )
    if cfg.optim.kind == "muon":
        raise ConfigError(f"optim=muon with parallel.mode={p.mode}: Muon needs whole matrices; use parallel=ddp")
    if cfg.forced_nnz is not None:
        raise ConfigError(
            f"forced_nnz={cfg.forced_nnz} with parallel.mode={p.mode}: needs whole matrices; use parallel=ddp"
        )


def _check_machine(cfg: Config, world_size: int) -> None:
    on_gpu = cfg.device != "cpu" and torch.cuda.is_available()
    if cfg.device == "cuda" and not on_gpu:
        raise ConfigError("device=cuda, but torch sees no GPU; use device=auto or device=cpu")
    if cfg.compile and not on_gpu and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise ConfigError("compile=true on a CPU needs a C++ compiler, and no g++ is on PATH; use compile=false")
    if cfg.cuda_graph == "on" and (not on_gpu or world_size > 1):
        where = f"WORLD_SIZE={world_size}" if on_gpu else "no GPU"
        raise ConfigError(f"cuda_graph=on with {where}: works on one GPU only; use cuda_graph=auto or cuda_graph=off")
    if cfg.ffn.impl == "triton":
        device = torch.device("cuda" if on_gpu else "cpu")
        reason = unsupported(device, parallel.compute_dtype(cfg.dtype, device.type), cfg.model.d_model)
        if reason is not None:
            raise ConfigError(f"ffn.impl=triton: {reason}; use ffn.impl=auto or ffn.impl=torch")


def _check_values(cfg: Config) -> None:
    missing = OmegaConf.missing_keys(cfg)
    if missing:
        raise ConfigError(f"{', '.join(sorted(missing))}: no value; a group or a preset should set it")
    for key, allowed in CHOICES.items():
        value = OmegaConf.select(cfg, key)
        if value not in allowed:
            raise ConfigError(f"{key}={value}: allowed are {', '.join(allowed)}")
    for key, least in AT_LEAST.items():
        value = OmegaConf.select(cfg, key)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{key}={value}: must be at least {least} and finite")
        if isinstance(value, int) and value >= INTEGERS:
            raise ConfigError(f"{key}={value}: must be below 2^63")
    for key, most in AT_MOST.items():
        if OmegaConf.select(cfg, key) > most:
            raise ConfigError(f"{key}={OmegaConf.select(cfg, key)}: must be at most {most:g}")
    for key in POSITIVE:
        if not 0 < OmegaConf.select(cfg, key) < math.inf:
            raise ConfigError(f"{key}={OmegaConf.select(cfg, key)}: must be above 0 and finite")
    for key, value in (
        ("data.val_fraction", cfg.data.val_fraction),
        ("optim.betas[0]", cfg.optim.betas[0] if len(cfg.optim.betas) == 2 else None),
        ("optim.betas[1]", cfg.optim.betas[-1] if len(cfg.optim.betas) == 2 else None),
        ("optim.muon_momentum", cfg.optim.muon_momentum),
    ):
        if value is None:
            raise ConfigError(f"optim.betas={list(cfg.optim.betas)}: must be two numbers")
        if not 0 <= value < 1:
            raise ConfigError(f"{key}={value}: must be in [0, 1)")
    if not 0 <= cfg.optim.schedule.min_lr_ratio <= 1:
        raise ConfigError(f"optim.schedule.min_lr_ratio={cfg.optim.schedule.min_lr_ratio}: must be in [0, 1]")
    if cfg.steps is None and cfg.tokens is None:
        raise ConfigError("steps=null and tokens=null: give the length of the run in one of the two")


def _check_model(cfg: Config) -> None:
    m = cfg.model
    if m.d_model % m.n_heads or (m.d_model // m.n_heads) % 2:
        raise ConfigError(
            f"model.d_model={m.d_model} model.n_heads={m.n_heads}: d_model must be n_heads times an even head width"
        )
    if m.n_heads % m.n_kv_heads:
        raise ConfigError(
            f"model.n_kv_heads={m.n_kv_heads} does not divide model.n_heads={m.n_heads}; use a divisor of it"
        )
    dense = cfg.ffn.kind.startswith("dense")
    if dense and cfg.ffn.impl == "triton":
        raise ConfigError(f"ffn.impl=triton with ffn.kind={cfg.ffn.kind}: only the sparse kinds have Triton kernels")


def _check_l1(cfg: Config) -> None:
    l1, kind = cfg.ffn.l1, cfg.ffn.kind
    if kind.startswith("dense"):
        for key in ("coef", "target_l0", "start_step", "decay_step", "layer_weights"):
            if l1[key]:
                raise ConfigError(
                    f"ffn.l1.{key}={l1[key]} with ffn.kind={kind}: L1 needs ffn=sparse or sparse_nongated"
                )
    remedy = cfg.ffn.dead.remedy
    if remedy != "none" and (kind == "dense_silu" or (remedy == "warmup" and kind == "dense_relu")):
        raise ConfigError(
            f"ffn.dead.remedy={remedy} with ffn.kind={kind}: nothing there that it could act on; use none"
        )
    if remedy == "warmup" and cfg.optim.schedule.warmup == 0:
        raise ConfigError(
            "ffn.dead.remedy=warmup with optim.schedule.warmup=0: the penalty waits as long as the learning rate warms "
            "up; give that a length, or use ffn.l1.start_step and ffn.l1.warmup_steps"
        )
    for key in ("decay_steps", "decay_to"):
        if l1[key] and l1.decay_step is None:
            raise ConfigError(
                f"ffn.l1.{key}={l1[key]} needs ffn.l1.decay_step=N, the step from which the penalty decays"
            )
    weights = list(l1.layer_weights)
    if weights and (len(weights) != cfg.model.n_layers or not all(0 <= w < math.inf for w in weights)):
        raise ConfigError(
            f"ffn.l1.layer_weights={weights}: must be model.n_layers={cfg.model.n_layers} numbers, none negative"
        )
    if l1.target_l0 is None:
        if l1.per_layer:
            raise ConfigError("ffn.l1.per_layer=true needs ffn.l1.target_l0; ffn.l1.layer_weights sets fixed weights")
        return
    if not 0 < l1.target_l0 <= cfg.ffn.d_ff:
        raise ConfigError(f"ffn.l1.target_l0={l1.target_l0}: must be above 0 and at most ffn.d_ff={cfg.ffn.d_ff}")
    if l1.coef == 0:
        raise ConfigError(
            "ffn.l1.coef=0 with ffn.l1.target_l0: the controller starts from coef; give a guess, say 3e-4"
        )
    if l1.decay_step is not None:
        raise ConfigError(
            f"ffn.l1.decay_step={l1.decay_step} with ffn.l1.target_l0: the controller would undo the decay"
        )
    if weights and not any(weights):
        raise ConfigError(f"ffn.l1.layer_weights={weights} with ffn.l1.target_l0: no layer is left to steer")
    if l1.per_layer and weights:
        raise ConfigError("ffn.l1.layer_weights with ffn.l1.per_layer=true: each layer's coefficient is found anyway")


def _check_forced(cfg: Config) -> None:
    forced, most = cfg.forced_nnz, MOST * cfg.ffn.d_ff
    if forced is None:
        return
    if cfg.ffn.kind == "dense_silu":
        raise ConfigError(f"forced_nnz={forced} with ffn.kind=dense_silu: SiLU has no zeros to force; use null")
    if not 0 < forced <= most:
        raise ConfigError(f"forced_nnz={forced}: must be above 0 and at most {MOST} * ffn.d_ff = {most:g}")
    if cfg.ffn.dead.remedy == "reinit":
        raise ConfigError(f"forced_nnz={forced} with ffn.dead.remedy=reinit: a part of the neurons is meant to be dead")


def _check_data(cfg: Config) -> None:
    d = cfg.data
    if d.source in ("text", "jsonl", "shards") and not d.paths:
        raise ConfigError(f"data.source={d.source} needs data.paths=[...]: files, folders or globs")
    if d.source == "hf" and not d.hf_path:
        raise ConfigError("data.source=hf needs data.hf_path=..., a dataset on the Hub or a builder such as parquet")
    if d.streaming and d.source != "hf":
        raise ConfigError(f"data.streaming=true with data.source={d.source}: only data.source=hf streams")
    if d.streaming and d.tokenizer == "bpe":
        raise ConfigError(
            "data.tokenizer=bpe with data.streaming=true: a BPE is trained on prepared text; name a tiktoken encoding"
        )


def _check_schedule(cfg: Config) -> None:
    s = cfg.optim.schedule
    if s.kind == "wsd" and s.decay == 0:
        raise ConfigError("optim.schedule.kind=wsd needs optim.schedule.decay=N, the length of its final decay")
    ramps = s.warmup + (s.decay if s.kind == "wsd" else 0)
    # Only against a horizon that was asked for: a short trial of a preset may end within its warm-up.
    if s.horizon is not None and ramps > s.horizon:
        raise ConfigError(
            f"optim.schedule.horizon={s.horizon} is shorter than optim.schedule.warmup={s.warmup}"
            + (f" + optim.schedule.decay={s.decay}" if s.kind == "wsd" else "")
            + "; the horizon counts from the start of the run and includes both"
        )
