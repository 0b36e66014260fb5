"""Is sparsity worth trying for a model? How many of its FFN activations are zero, where, and on which tokens.

    python -m twell.analyze run=runs/NAME text=book.txt
    python -m twell.analyze hf=FOLDER text=book.txt eps=0.05 out=book.json   # pip install -e '.[export]'

Prints one line for each layer and a verdict; `out` gets all numbers as JSON. A Hugging Face folder may be of Llama's or
GPT-2's family. Keys are the fields of `AnalyzeConfig`. The columns:

    zeros, |a|<eps    shares of all activations
    never             share of neurons active on no token of the text
    mean ... max      active neurons on a token; where no activation is exactly zero, those with |a| >= eps count
    hottest           share of all that is active in the 1, 5, 10 % of neurons that are so most often
    rms               root mean square of the activations: what to judge eps by
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twell.analyze.models import Subject, load_hf, load_ours
from twell.analyze.stats import LayerStats, has_exact_zeros, verdict
from twell.arguments import check_values, parse_arguments, run_command
from twell.errors import UserError
from twell.sparsity import HOTTEST

WINDOW = 1024  # tokens of context, if the model can see as many


@dataclass
class AnalyzeConfig:
    run: str | None = None  # the folder of a run of ours
    hf: str | None = None  # or a Hugging Face folder
    text: str = ""  # a text file
    tokens: int = 65_536  # of the text, from its start
    eps: float = 0.01  # activations below this are called small
    batch: int = 4  # windows computed at once
    checkpoint: str = "latest"  # of a run: latest | best | a step
    device: str = "auto"  # auto | cpu | cuda
    out: str | None = None  # a JSON file


@torch.no_grad()
def analyze(
    subject: Subject, text: str, *, tokens: int, eps: float, batch: int, device: torch.device
) -> dict[str, Any]:
    """Run `subject` over the first `tokens` tokens of `text`, in windows of its context, and count its activations.

    Returns the numbers of `LayerStats.summary` for each layer, and the verdict. Raises UserError for a text without
    tokens.
    """
    ids = torch.tensor(subject.encode(text)[:tokens], dtype=torch.int64, device=device)
    if not len(ids):
        raise UserError("the text has no tokens")
    stats = [LayerStats(h, eps, device) for h in subject.widths]
    subject.watch(lambda layer, a: stats[layer].update(a))
    window = min(WINDOW, subject.seq_len)
    n_whole = len(ids) // window
    batches = list(ids[: n_whole * window].view(n_whole, window).split(batch)) if n_whole else []
    if len(ids) % window:
        batches.append(ids[None, n_whole * window :])  # [1, t], shorter
    for chunk in batches:
        subject.model(chunk)
    layers = [layer.summary() for layer in stats]
    return {
        "model": subject.name,
        "d_model": subject.d_model,
        "tokens": len(ids),
        "window": window,
        "eps": eps,
        "layers": layers,
        "verdict": verdict(layers, subject.d_model, eps),
    }


def table(result: dict[str, Any]) -> str:
    """The result as lines of text."""
    layers, eps = result["layers"], result["eps"]
    level = "active" if has_exact_zeros(layers) else "above_eps"
    heads = ["layer", "d_ff", "zeros", f"|a|<{eps:g}", "never", "mean", "p50", "p99", "max"]
    heads += [f"hottest {share}%" for share in HOTTEST] + ["rms"]
    rows = [heads]
    for i, layer in enumerate(layers):
        law = layer[level]
        shares = [layer["zeros"], layer["below_eps"], law["never"] / layer["d_ff"]]
        hottest = [law[f"hottest_{share}pct"] for share in HOTTEST]
        rows.append(
            [str(i), str(layer["d_ff"]), *(f"{share:.2%}" for share in shares), f"{law['mean']:.1f}"]
            + [str(law[name]) for name in ("p50", "p99", "max")]
            + [f"{share:.1%}" for share in hottest]
            + [f"{layer['rms']:.3g}"]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    counted = "not zero" if level == "active" else f"|a| >= {eps:g}"
    return "\n".join([f"{result['model']}: {result['tokens']:,} tokens; active = {counted}", *lines, result["verdict"]])


def main(arguments: Sequence[str]) -> None:
    cfg = parse_arguments(arguments, AnalyzeConfig, __doc__)
    _check(cfg)
    use_cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if use_cuda else "cpu")
    try:
        text = Path(cfg.text).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"text={cfg.text}: cannot be read ({error.strerror})") from error
    subject = load_hf(Path(cfg.hf), device) if cfg.hf else load_ours(Path(cfg.run), cfg.checkpoint, device)
    result = analyze(subject, text, tokens=cfg.tokens, eps=cfg.eps, batch=cfg.batch, device=device)
    print(table(result))
    if cfg.out is not None:
        try:
            Path(cfg.out).write_text(json.dumps(result | {"text": cfg.text}, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"out={cfg.out}: cannot be written ({error.strerror})") from error


def _check(cfg: AnalyzeConfig) -> None:
    """Raise ConfigError for the first value out of range."""
    rules = (
        (bool(cfg.run) != bool(cfg.hf), "run", "name either run=FOLDER or hf=FOLDER"),
        (cfg.text != "", "text", "name a text file, e.g. text=book.txt"),
        (cfg.tokens >= 1, "tokens", "must be at least 1"),
        (0 < cfg.eps < math.inf, "eps", "must be a number above 0"),
        (cfg.batch >= 1, "batch", "must be at least 1"),
        (cfg.device in ("auto", "cpu", "cuda"), "device", "must be auto, cpu or cuda"),
        (cfg.device != "cuda" or torch.cuda.is_available(), "device", "torch sees no GPU; use auto or cpu"),
    )
    check_values(cfg, rules)
    if cfg.out is not None:  # said before the work, not after it
        out = Path(cfg.out)
        if out.is_dir() or not out.parent.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
            raise UserError(f"out={cfg.out}: cannot be written; name a file in a folder that exists")


if __name__ == "__main__":
    run_command(main)
