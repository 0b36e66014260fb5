"""Models small enough for tests, with odd sizes."""

import torch
from torch import Tensor

from twell.config import FFNConfig, L1Config, ModelConfig
from twell.model import IGNORE, Transformer

VOCAB_SIZE, N_VOCAB = 64, 59
KINDS = ("dense_silu", "dense_relu", "sparse", "sparse_nongated")


def model_config(**changes) -> ModelConfig:
    shape = {
        "n_layers": 3,
        "d_model": 24,
        "n_heads": 6,
        "n_kv_heads": 2,
        "d_ff": 40,
        "d_ff_nongated": 56,
        "seq_len": 17,
    }
    return ModelConfig(**{"name": "small", **shape, **changes})


def ffn_config(kind: str, d_ff: int = 40) -> FFNConfig:
    return FFNConfig(kind=kind, d_ff=d_ff, l1=L1Config(coef=0.1 if kind.startswith("sparse") else 0.0))


def build(kind: str = "sparse", seed: int = 1, dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    """An initialised Transformer; `changes` are fields of ModelConfig."""
    cfg = model_config(**changes)
    ffn = ffn_config(kind, cfg.d_ff_nongated if kind == "sparse_nongated" else cfg.d_ff)
    model = Transformer(cfg, ffn, VOCAB_SIZE, N_VOCAB, dtype)
    model.init_weights(seed)
    return model


def batch(b: int = 2, t: int = 17, masked: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both [b, t], with `masked` targets that the loss does not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(N_VOCAB, (b, t + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets.view(-1)[torch.randperm(b * t, generator=generator)[:masked]] = IGNORE
    return ids[:, :-1], targets
