"""Small runs and Hugging Face folders for the tests of export, import and evaluation."""

from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import OmegaConf

from data.prepare import prepare
from data.tokenizer import ByteTokenizer, Tokenizer
from tests.training import tiny_text
from tests.twell.small import ffn_config, model_config
from twell import checkpoint
from twell.config import Config, DataConfig, padded_vocab_size
from twell.model import Transformer
from twell.run import Progress, describe_run


def save_run(
    run: Path, kind: str = "sparse", tokenizer: Tokenizer | None = None, seed: int = 1, **changes
) -> tuple[Transformer, Tokenizer]:
    """A run with one checkpoint, of step 7, as training would leave it; `changes` are fields of ModelConfig."""
    tokenizer = tokenizer or ByteTokenizer()
    cfg = OmegaConf.structured(Config)
    cfg.model = model_config(**changes)
    cfg.ffn = ffn_config(kind, cfg.model.d_ff_nongated if kind == "sparse_nongated" else cfg.model.d_ff)
    cfg.data.name = "words"
    cfg.batch.micro = 2
    vocab_size = padded_vocab_size(cfg, tokenizer.n_vocab)
    model = Transformer(cfg.model, cfg.ffn, vocab_size, tokenizer.n_vocab)
    model.init_weights(seed)
    with torch.no_grad():  # what starts at 0 or 1 must not stay there unseen
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)), alpha=0.2)
    run.mkdir(parents=True)
    describe_run(run, cfg, tokenizer)
    meta = {
        "config": OmegaConf.to_container(cfg, resolve=True),
        "progress": asdict(Progress(step=7, tokens=700)),
        "tokenizer": tokenizer.identity,
        "wandb_id": None,
    }
    checkpoint.save(run, 7, checkpoint.model_tensors(model), meta)
    return model, tokenizer


def some_ids(n_vocab: int, b: int = 3, t: int = 17) -> torch.Tensor:
    """int64 [b, t]"""
    return torch.randint(n_vocab, (b, t), generator=torch.Generator().manual_seed(3))


def byte_set(folder: Path) -> Path:
    """A prepared data set of bytes, somewhere below `folder`."""
    source = {"source": "text", "paths": [str(tiny_text(folder))], "val_fraction": 0.2, "workers": 1}
    return prepare(DataConfig(name="words", dir=str(folder / "sets"), **source), log=lambda text: None).folder
