"""Export a run as a Hugging Face folder that stock transformers loads, without code of ours.

    python -m twell.export run=runs/NAME out=DIR
    python -m twell.export run=runs/NAME out=DIR dtype=bf16 checkpoint=best
    python -m twell.export run=runs/NAME out=DIR prune=1000000      # drop neurons that never fire on so many tokens

DIR holds config.json, generation_config.json, the weights as safetensors, the tokenizer, a model card, and twell/, the
tokenizer as the trainer stores it. Rows that pad the vocabulary are left out. Which model becomes which architecture is
written in twell/hf/config.py. Keys are the fields of `ExportConfig`.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from data.loader import Batch, validation_batches
from data.prepared import PreparedData
from data.shards import TokenStream
from data.tokenizer import Tokenizer
from twell.arguments import check_values, parse_arguments, run_command
from twell.config import Config
from twell.errors import UserError
from twell.evaluate import checkpoint_config, compute_densely, evaluation_data
from twell.generate import device_named, load_run
from twell.hf.card import model_card, run_numbers
from twell.hf.config import InterchangeError, layout_of, to_hf_config
from twell.hf.prune import count_firing, neurons_to_keep, prune
from twell.hf.tokenizer import OWN_TOKENIZER, save_hf_tokenizer
from twell.hf.weights import to_hf

DTYPES = {"fp32": (torch.float32, "float32"), "bf16": (torch.bfloat16, "bfloat16")}


@dataclass
class ExportConfig:
    run: str = ""  # the run's folder
    out: str = ""  # the folder to write; must not exist yet
    checkpoint: str = "latest"  # latest | best | a step
    dtype: str = "fp32"  # fp32, the master weights as they are, or bf16, half the size
    tokenizer: str = "convert"  # convert | skip: export without one
    # Drop neurons that fire on none of this many training tokens, 0 = keep all. ReLU kinds only.
    prune: int = 0
    data: str | None = None  # prune: a prepared data set (a folder below datasets/) instead of the run's own
    device: str = "auto"  # prune: where the model runs; auto | cpu | cuda
    max_shard_gb: float = 5.0  # weights larger than this are split into several files


def export(cfg: ExportConfig) -> dict[str, str]:
    """Write the folder `cfg.out`; returns the numbers on its model card. InterchangeError says what cannot be."""
    run, out = Path(cfg.run), Path(cfg.out)
    if out.exists():
        raise InterchangeError(f"out={cfg.out}: is there already; name a folder that is not")
    model, tokenizer, meta = load_run(run, cfg.checkpoint, torch.device("cpu"))
    trained = checkpoint_config(meta)
    tensors, numbers = dict(model.state_dict()), run_numbers(run, trained, meta)
    if cfg.prune:
        keep, report = _neurons_to_keep(cfg, trained, tokenizer)
        tensors, numbers = prune(tensors, keep), numbers | report
    d_ff = tensors["blocks.0.ffn.w_up"].shape[0]
    layout = layout_of(trained.model, trained.ffn, d_ff, tokenizer.n_vocab)
    dtype, named = DTYPES[cfg.dtype]
    config = to_hf_config(trained.model, trained.ffn, layout, dtype=named, eot=tokenizer.eot)
    weights = {name: tensor.to(dtype) for name, tensor in to_hf(tensors, layout).items()}
    numbers = {"parameters": f"{sum(w.numel() for w in weights.values()):,}"} | numbers

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as around:
            unfinished = Path(around) / out.name  # not the temporary folder itself, which is closed to others
            unfinished.mkdir()
            _write_json(unfinished / "config.json", config)
            _save_weights(weights, unfinished, cfg.max_shard_gb)
            ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            _write_json(unfinished / "generation_config.json", ids)
            if cfg.tokenizer == "convert":
                save_hf_tokenizer(tokenizer, unfinished, trained.model.seq_len)
                tokenizer.save(unfinished / OWN_TOKENIZER)
            (unfinished / "README.md").write_text(model_card(run.name, trained, meta, config, numbers))
            os.replace(unfinished, out)
    except OSError as error:
        raise InterchangeError(f"out={cfg.out}: cannot be written ({error.strerror or error})") from error
    return {"architecture": config["architectures"][0], **numbers}


def _neurons_to_keep(cfg: ExportConfig, trained: Config, tokenizer: Tokenizer) -> tuple[Tensor, dict[str, str]]:
    """The neurons that stay, [layers, width], and what to report about it."""
    if trained.ffn.kind == "dense_silu":
        raise InterchangeError(f"prune={cfg.prune}: {cfg.run} has ffn.kind=dense_silu, whose neurons all fire always")
    device = device_named(cfg.device)
    model, _, _ = load_run(Path(cfg.run), cfg.checkpoint, device)
    compute_densely(model)
    prepared = evaluation_data(trained, tokenizer, cfg.data)
    if prepared is None:
        raise InterchangeError(f"prune={cfg.prune}: {cfg.run} has no data of its own; give data=FOLDER")
    text = replace(prepared, val=prepared.train or prepared.val)  # a stream has only its validation split on disk
    shape = {"seq_len": trained.model.seq_len, "micro": trained.batch.micro}
    masked = trained.data.mask_documents
    fired, seen = count_firing(model, _one_by_one(text, cfg.prune, **shape, device=device, mask_documents=masked))
    keep = neurons_to_keep(fired)
    silent = (fired == 0).sum(1).tolist()
    layers = ", ".join(map(str, silent))
    return keep, {
        "pruned": f"FFN width {fired.shape[1]} -> {keep.shape[1]}; silent on {seen:,} tokens, by layer: {layers}"
    }


def _one_by_one(text: PreparedData, tokens: int, *, seq_len: int, micro: int, **options) -> Iterator[Batch]:
    """`validation_batches`, each made when it is its turn: as the share of a rank of its own."""
    count = min(tokens, len(TokenStream(text.val)) - 1)
    n = max(1, -(-count // (seq_len * micro)))
    for i in range(n):
        yield from validation_batches(
            text, tokens=tokens, seq_len=seq_len, micro=micro, rank=i, world_size=n, **options
        )


def _save_weights(weights: dict[str, Tensor], folder: Path, max_shard_gb: float) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size=int(max_shard_gb * 1e9), metadata={"format": "pt"})
    for path in folder.glob("*.safetensors"):  # which the library makes unreadable for others
        shutil.copymode(folder / "config.json", path)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _check(cfg: ExportConfig) -> None:
    """Raise for the first value out of range, or when the libraries are not there."""
    rules = (
        (cfg.run != "", "run", "name the run's folder, e.g. run=runs/NAME"),
        (cfg.out != "", "out", "name the folder to write"),
        (cfg.dtype in DTYPES, "dtype", "must be fp32 or bf16"),
        (cfg.tokenizer in ("convert", "skip"), "tokenizer", "must be convert or skip"),
        (cfg.prune >= 0, "prune", "must be a number of tokens, or 0"),
        (0 < cfg.max_shard_gb <= 1e6, "max_shard_gb", "must be above 0, and 1e6 at most"),
    )
    check_values(cfg, rules)
    for package in ("safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"export needs {package}: pip install -e '.[export]'")


def main(arguments: Sequence[str]) -> None:
    cfg = parse_arguments(arguments, ExportConfig, __doc__)
    _check(cfg)
    for key, value in export(cfg).items():
        print(f"{key}: {value}")
    print(f"wrote {cfg.out}")


if __name__ == "__main__":
    run_command(main)
