"""The model card (README.md) of an exported model: what it is and the numbers of its run."""

import json
from pathlib import Path
from typing import Any

from twell.config import Config

ABOUT_FFN = {
    "dense_silu": "gated SiLU (SwiGLU)",
    "dense_relu": "gated ReLU",
    "sparse": "gated ReLU, trained with an L1 penalty on its activations",
    "sparse_nongated": "ReLU without a gate, trained with an L1 penalty on its activations",
}


def model_card(name: str, cfg: Config, meta: dict[str, Any], config: dict[str, Any], numbers: dict[str, str]) -> str:
    """Markdown with the front matter that the Hub reads.

    meta: of the checkpoint; config: what config.json says; numbers: more rows for the table.
    """
    rows = {
        "architecture": f"{config['architectures'][0]}, hidden_act {config['hidden_act']}",
        "layers, width, FFN width": f"{cfg.model.n_layers}, {cfg.model.d_model}, {config['intermediate_size']}",
        "heads, key/value heads": f"{cfg.model.n_heads}, {cfg.model.n_kv_heads}",
        "context": f"{cfg.model.seq_len} tokens",
        "vocabulary": f"{config['vocab_size']} ids",
        "FFN": ABOUT_FFN[cfg.ffn.kind],
        **numbers,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    sparse = "\n- sparse" if cfg.ffn.kind.startswith("sparse") else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- twell{sparse}
---

# {name}

Trained with twell, exported from step {meta["step"]}.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

Documents were joined with the end-of-text token, and a new one starts with it; nothing else is put before a prompt.
"""


def run_numbers(run: Path, cfg: Config, meta: dict[str, Any]) -> dict[str, str]:
    """What is known about the run at its checkpoint: tokens, losses, sparsity; nothing of an imported model."""
    progress = meta["progress"]
    if progress["step"] == 0:  # imported
        return {}
    numbers = {"training tokens": f"{progress['tokens']:,}", "data": cfg.data.name}
    if cfg.ffn.kind.startswith("sparse"):
        numbers["L1 coefficient"] = f"{cfg.ffn.l1.coef:g} ({cfg.ffn.l1.norm})"
    record = _last_record(run / "metrics.jsonl", progress["step"])
    for key, label, form in (
        ("val/loss", "validation loss, nats per token", "{:.4f}"),
        ("val/perplexity", "validation perplexity", "{:.2f}"),
        ("val/bits_per_byte", "validation bits per byte", "{:.4f}"),
        ("sparsity/l0_mean", "active neurons per token and layer", "{:.1f}"),
        ("sparsity/density", "share of neurons that are active", "{:.2%}"),
    ):
        if record.get(key) is not None:
            numbers[label] = form.format(record[key])
    return numbers


def _last_record(path: Path, step: int) -> dict[str, Any]:
    """The newest value of every metric up to `step`; empty for a run without metrics."""
    newest = {}
    if path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["step"] <= step:
                newest |= record
    return newest
