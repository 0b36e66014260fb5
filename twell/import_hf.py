"""Import a Hugging Face folder as a run, to train on from it, sample from it or evaluate it.

    python -m twell.import_hf path=DIR name=NAME
    python -m twell.import_hf path=DIR name=NAME tokenizer=gpt2    # or a folder that holds a tokenizer of ours

DIR holds config.json, the weights as safetensors (one file or several) and tokenizer.json, as transformers 4 or 5 wrote
them; twell/hf/config.py lists the architectures. runs/NAME gets a checkpoint of step 0, the tokenizer, and the model's
shape as a preset of train.py. A byte-level BPE becomes a tokenizer of ours with the same ids; others are refused. Keys
are the fields of `ImportConfig`.
"""

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from twell import checkpoint
from twell.arguments import parse_arguments, run_command
from twell.config import Config, ConfigError, FFNConfig, ModelConfig, padded_vocab_size
from twell.errors import UserError
from twell.hf.config import LARGEST, InterchangeError, Layout, from_hf_config, read_json
from twell.hf.tokenizer import OWN_TOKENIZER
from twell.hf.tokenizer_import import read_hf_tokenizer
from twell.hf.weights import check_names, from_hf
from twell.model import Transformer
from twell.run import Progress, describe_run

PRESETS = "configs"  # of the run: what `train.py --config-dir` is given
KINDS = {"dense_silu": ("dense_silu",), "sparse": ("sparse", "dense_relu"), "sparse_nongated": ("sparse_nongated",)}
PRESET = """# @package _global_
# The imported model as a preset. The rest suits a short fine-tuning; the command line overrides it.
{model}batch:
  tokens: {tokens}
  micro: 4
optim:
  lr: 1e-4
  schedule:
    warmup: 100
steps: 1000
"""


@dataclass
class ImportConfig:
    path: str = ""  # the Hugging Face folder
    name: str = ""  # of the run
    out: str = "runs"  # where runs lie
    seq_len: int | None = None  # longest context; null = max_position_embeddings
    ffn: str | None = None  # kind of the FFN; null = by its activation: dense_silu, sparse or sparse_nongated
    # null = the one in `path`; or a tiktoken encoding, bytes, or a folder with a tokenizer of ours
    tokenizer: str | None = None


def import_hf(cfg: ImportConfig, log: Callable[[str], None] = print) -> Path:
    """Make the run; returns its folder. InterchangeError names what is missing, unknown or not supported."""
    source, run = Path(cfg.path), Path(cfg.out) / cfg.name
    if run.exists():
        raise InterchangeError(f"name={cfg.name}: {run} is there already; choose another name")
    config = read_json(source / "config.json")
    if cfg.seq_len is not None:
        config["max_position_embeddings"] = cfg.seq_len
    model_config, kind, layout = from_hf_config(config, cfg.name)
    if cfg.ffn is not None and cfg.ffn not in KINDS[kind]:
        raise ConfigError(f"ffn={cfg.ffn}: this model's FFN is {' or '.join(KINDS[kind])}; training may change it")
    weights = SafeTensors(source)
    layout = check_names(weights.shapes, layout)
    tokenizer = _tokenizer(cfg, source, layout, log)

    trained = OmegaConf.structured(Config)  # what a run without data and training knows
    trained.model = model_config
    trained.ffn = FFNConfig(kind=cfg.ffn or kind, d_ff=layout.d_ff)
    trained.name, trained.out = cfg.name, cfg.out
    # Rows beyond the usual padding are kept: the model may have been padded otherwise.
    if layout.n_vocab > padded_vocab_size(trained, tokenizer.n_vocab):
        trained.model.vocab_size = layout.n_vocab
    model = Transformer(trained.model, trained.ffn, padded_vocab_size(trained, tokenizer.n_vocab), tokenizer.n_vocab)
    _fill(model, weights, layout)
    try:
        run.mkdir(parents=True)
    except OSError as error:
        raise InterchangeError(f"out={cfg.out}: {run} cannot be made ({error.strerror})") from error
    try:
        describe_run(run, trained, tokenizer)
        _write_preset(run, trained.model)
        checkpoint.save(run, 0, checkpoint.model_tensors(model), _meta(trained, tokenizer))
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        raise
    log(f"{run}: {model.n_params:,} parameters, ffn.kind={trained.ffn.kind}, vocabulary of {tokenizer.n_vocab:,}")
    return run


class SafeTensors:
    """The tensors of a Hugging Face folder: their shapes at once, each one's values when asked for."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {}
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InterchangeError(f"{path}: cannot be read ({error})") from error
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                if name in self.shapes:
                    raise InterchangeError(f"{path}: {name} is in another file, too; keep the files of one model there")
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file

    def __call__(self, name: str) -> Tensor:
        """The tensor called `name`, fp32; InterchangeError if it cannot be weights."""
        tensor = self._files[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise InterchangeError(f"{name}: is {tensor.dtype}; weights must be of a floating point type")
        tensor = tensor.float()
        if not tensor.isfinite().all():
            raise InterchangeError(f"{name}: has values that are not finite; the model has diverged or is damaged")
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    """What the index lists, else model.safetensors, else all *.safetensors but those of adapters (LoRA)."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise InterchangeError(f"{index}: has no weight_map that names a file for every tensor")
        return [folder / name for name in sorted(set(shards.values()))]
    if whole.exists():
        return [whole]
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if not paths:
        raise InterchangeError(f"path={folder}: no *.safetensors there; other formats of weights are not read")
    return paths


@torch.no_grad()
def _fill(model: Transformer, weights: SafeTensors, layout: Layout) -> None:
    """Load every parameter; rows that pad the vocabulary are zero."""
    head_too = layout.tied and "lm_head.weight" in weights.shapes
    if head_too and not torch.equal(weights("lm_head.weight"), weights("model.embed_tokens.weight")):
        raise InterchangeError("lm_head.weight: config.json says tie_word_embeddings, but it is not the embedding")
    for name, tensor in from_hf(weights, layout):
        parameter = model.get_parameter(name)
        if parameter.shape[0] > len(tensor):
            parameter.zero_()
        parameter[: len(tensor)] = tensor


def _tokenizer(cfg: ImportConfig, source: Path, layout: Layout, log: Callable[[str], None]) -> Tokenizer:
    if cfg.tokenizer is not None:
        is_folder = (Path(cfg.tokenizer) / "tokenizer.json").exists()
        tokenizer = load_tokenizer(cfg.tokenizer) if is_folder else make_tokenizer(cfg.tokenizer)
    elif (source / OWN_TOKENIZER).exists():
        tokenizer = load_tokenizer(source / OWN_TOKENIZER)
    else:
        tokenizer = read_hf_tokenizer(source, log)
    if tokenizer.n_vocab > layout.n_vocab:
        raise InterchangeError(
            f"tokenizer {tokenizer.name} has {tokenizer.n_vocab} ids, but the embedding has {layout.n_vocab} rows"
        )
    return tokenizer


def _meta(trained: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """meta.json of a checkpoint that no training wrote."""
    return {
        "config": OmegaConf.to_container(trained, resolve=True),
        "progress": asdict(Progress()),
        "tokenizer": tokenizer.identity,
        "wandb_id": None,
        "imported": True,
    }


def _write_preset(run: Path, model: ModelConfig) -> None:
    path = run / PRESETS / "model" / f"{run.name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PRESET.format(model=OmegaConf.to_yaml({"model": model}), tokens=16 * model.seq_len))


def main(arguments: Sequence[str]) -> None:
    cfg = parse_arguments(arguments, ImportConfig, __doc__)
    if not cfg.path or cfg.name in ("", ".", "..") or "/" in cfg.name:
        raise ConfigError(f"path={cfg.path} name={cfg.name}: name a Hugging Face folder, and the run as a plain name")
    longest = LARGEST["max_position_embeddings"]
    if cfg.seq_len is not None and not 1 <= cfg.seq_len <= longest:
        raise ConfigError(f"seq_len={cfg.seq_len}: must be from 1 to {longest:,}")
    if importlib.util.find_spec("safetensors") is None:
        raise UserError("import_hf needs safetensors: pip install -e '.[export]'")
    import_hf(cfg)


if __name__ == "__main__":
    run_command(main)
