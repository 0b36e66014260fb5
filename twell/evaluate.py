"""Evaluation: what the model's loss is on text it has not seen, and how it does in lm-eval's tasks.

    python -m twell.evaluate run=runs/NAME                                      # loss on the validation split
    python -m twell.evaluate run=runs/NAME data=datasets/FOLDER                 # on that of another prepared data set
    python -m twell.evaluate run=runs/NAME 'tasks=[hellaswag,mine/task.yaml]' n_fewshot=5

Each result is printed and written to runs/NAME/eval/step-00001000.json as soon as it is there, beside those of earlier
evaluations of the same checkpoint: its name says on how many tokens, with how many questions and examples. In the end
all are put into the summary of the run's wandb entry if it has one. Tasks need the extra `eval`. Keys are the fields of
`EvaluateConfig`.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from data.loader import Batch, validation_batches
from data.prepare import prepare
from data.prepared import META, PreparedData, open_prepared
from data.tokenizer import Tokenizer
from twell import parallel
from twell.arguments import check_values, parse_arguments, run_command
from twell.config import Config, ConfigError
from twell.errors import first_line
from twell.ffn import SparseFFN
from twell.generate import device_named, load_run
from twell.measures import ValidationSparsity
from twell.model import Transformer
from twell.routing import Routing
from twell.wandb_run import start_wandb


@torch.no_grad()
def validate_model(
    model: nn.Module,
    batches: Sequence[Batch],
    token_bytes: Tensor,
    routing: Routing,
    measures: ValidationSparsity | None = None,
) -> dict[str, float]:
    """Loss of `model` over validation windows, summed over ranks.

    Args:
        model: maps (tokens, targets, doc_ids) to an output with `loss_sum`; compiled or not.
        batches: this rank's share of the fixed windows, all of one shape; targets of -100 are not counted.
        token_bytes: int64 [n_vocab], bytes of text per token id, 0 for special tokens.
        routing: of the model; if a buffer of its sparse kernels is too small, all is done again with larger ones.
        measures: is given this rank's tokens and statistics.

    Returns:
        val/loss (nats per token), val/perplexity, and val/bits_per_byte = total bits / total bytes of the targets.
    """
    while True:
        totals = _totals(model, batches, token_bytes, measures)
        # One read; every rank repeats if one of them must, since the sums cross ranks.
        nats, tokens, n_bytes = parallel.sum_over_ranks(totals).tolist()
        if not parallel.max_over_ranks(routing.overflowed().int()).item():
            break
        routing.update()
    loss = nats / tokens
    return {
        "val/loss": loss,
        "val/perplexity": math.exp(min(loss, 700.0)),  # beyond 700 exp overflows a double
        "val/bits_per_byte": nats / math.log(2) / max(n_bytes, 1),
    }


def _totals(
    model: nn.Module, batches: Sequence[Batch], token_bytes: Tensor, measures: ValidationSparsity | None
) -> Tensor:
    """This rank's nats, counted tokens and bytes, float64 [3]."""
    totals = torch.zeros(3, dtype=torch.float64, device=token_bytes.device)
    if measures is not None:
        measures.clear()
    for batch in batches:
        counted = batch.targets >= 0  # [b, t]
        out = model(batch.tokens, batch.targets, batch.doc_ids)
        if measures is not None:
            measures.add(batch.tokens, out.stats)
        totals[0] += out.loss_sum
        totals[1] += counted.sum()
        totals[2] += (token_bytes[batch.targets.clamp(min=0)] * counted).sum()
    return totals


@dataclass
class EvaluateConfig:
    run: str = ""  # the run's folder
    tasks: list[str] = field(default_factory=list)  # lm-eval's tasks: names, or task files (.yaml)
    n_fewshot: int | None = None  # examples before each question; null = what the task says
    limit: int | None = None  # questions per task; null = all
    batch: int = 8  # sequences in one forward pass
    tokens: int | None = None  # validation tokens; null = the run's eval.tokens; 0 = only the tasks
    data: str | None = None  # a prepared data set (a folder below datasets/) instead of the run's own
    checkpoint: str = "latest"  # latest | best | a step
    device: str = "auto"  # auto | cpu | cuda


def checkpoint_config(meta: dict[str, Any]) -> Config:
    """The config that a checkpoint's meta holds."""
    return OmegaConf.merge(OmegaConf.structured(Config), meta["config"])


def compute_densely(model: Transformer) -> None:
    """Make `model` ready for forward passes that nobody watches.

    Dense products cannot run out of room, as the sparse kernels' buffers can. Its weights are cast to the dtype it
    computes in, once and not in every pass.
    """
    for layer in model.modules():
        if isinstance(layer, SparseFFN):
            layer.impl = "torch"
    for parameter in model.parameters():
        parameter.data = parameter.data.to(model.compute_dtype)


def evaluation_data(cfg: Config, tokenizer: Tokenizer, folder: str | None) -> PreparedData | None:
    """The prepared data set in `folder`, else the run's own; None if it has none (an imported model).

    Raises ConfigError if there is none in `folder`, or if the tokenizers differ.
    """
    if folder is None and OmegaConf.is_missing(cfg.data, "source"):
        return None
    if folder is not None and not (Path(folder) / META).exists():
        raise ConfigError(f"data={folder}: no prepared data set there ({META} is missing); name one below datasets/")
    prepared = prepare(cfg.data, val_tokens=cfg.eval.tokens) if folder is None else open_prepared(folder)
    if prepared.tokenizer.identity != tokenizer.identity:
        raise ConfigError(
            f"data={folder}: made with the tokenizer {prepared.tokenizer.name}, not with the run's ({tokenizer.name})"
        )
    return prepared


def evaluate(cfg: EvaluateConfig, log: Callable[[str], None] = print) -> dict[str, dict[str, dict[str, Any]]]:
    """Do what `cfg` asks for; returns {"validation": {"DATA:tokens=N": numbers}, "tasks": {TASK: numbers}}.

    TASK has n_fewshot and limit behind its name if they were given. Raises ConfigError when there is nothing to do or a
    task does not exist, and UserError when a task fails: the results before it have been written by then.
    """
    tasks = None
    if cfg.tasks:
        from twell.evaluate_tasks import find_tasks  # needs lm-eval

        tasks = find_tasks(cfg.tasks)
    run, device = Path(cfg.run), device_named(cfg.device)
    model, tokenizer, meta = load_run(run, cfg.checkpoint, device)
    compute_densely(model)
    trained = checkpoint_config(meta)
    prepared = None if cfg.tokens == 0 else evaluation_data(trained, tokenizer, cfg.data)
    if prepared is None and not cfg.tasks:
        raise ConfigError(f"run={cfg.run}: nothing to do: give data=FOLDER, which this run lacks, or tasks=[...]")
    results = {"validation": {}, "tasks": {}}
    try:
        for part, name, values in _each_result(cfg, trained, model, tokenizer, prepared, tasks):
            results[part][name] = values
            _add_to_file(run / "eval" / f"step-{meta['step']:08d}.json", results)
            log(f"{name}: " + "  ".join(f"{key} {_shown(value)}" for key, value in values.items()))
    finally:
        _to_wandb(run, trained, meta, results)
    return results


def _each_result(
    cfg: EvaluateConfig,
    trained: Config,
    model: Transformer,
    tokenizer: Tokenizer,
    prepared: PreparedData | None,
    tasks: Any,
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """("validation" or "tasks", name, numbers), one after the other; `tasks` are of `find_tasks`."""
    if prepared is not None:
        device = model.embed.weight.device
        tokens = cfg.tokens or trained.eval.tokens
        shape = {"seq_len": trained.model.seq_len, "micro": cfg.batch, "mask_documents": trained.data.mask_documents}
        batches = validation_batches(prepared, tokens=tokens, **shape, device=device)
        token_bytes = torch.from_numpy(tokenizer.token_bytes()).long().to(device)
        values = validate_model(model, batches, token_bytes, Routing(model, device, model.compute_dtype))
        counted = sum(int((batch.targets >= 0).sum()) for batch in batches)
        yield "validation", _with_settings(prepared.folder.name, tokens=counted), values | {"tokens": counted}
    if tasks is not None:
        from twell.evaluate_tasks import run_tasks

        for task, values in run_tasks(model, tokenizer, tasks, cfg.n_fewshot, cfg.limit, cfg.batch):
            yield "tasks", _with_settings(task, n_fewshot=cfg.n_fewshot, limit=cfg.limit), values


def _with_settings(name: str, **settings: int | None) -> str:
    """`name` with those settings that are not None: results of others are kept beside it."""
    return ":".join([name, *(f"{key}={value}" for key, value in settings.items() if value is not None)])


def _add_to_file(path: Path, results: dict[str, dict]) -> None:
    """Write the results beside those of earlier evaluations of the same checkpoint."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    joined = {part: earlier.get(part, {}) | numbers for part, numbers in results.items()}
    path.write_text(json.dumps(joined, indent=1) + "\n")


def _to_wandb(run: Path, trained: Config, meta: dict[str, Any], results: dict[str, Any]) -> None:
    """Add the numbers to the summary of the run's wandb entry, as eval/DATA_OR_TASK/METRIC, if there is one."""
    numbers = results["validation"] | results["tasks"]
    if meta["wandb_id"] is None or not numbers:
        return
    handle = start_wandb(trained, run, meta["wandb_id"], tags=None, log=print)
    if handle is None:
        return
    try:
        for name, values in numbers.items():
            handle.summary.update({f"eval/{name}/{key}": value for key, value in values.items()})
        handle.finish()
    except Exception as error:  # a dashboard must not cost the results
        print(f"wandb: lost ({first_line(error)}); the results are in {run / 'eval'}")


def main(arguments: Sequence[str]) -> None:
    cfg = parse_arguments(arguments, EvaluateConfig, __doc__)
    rules = (
        (cfg.run != "", "run", "name the run's folder, e.g. run=runs/NAME"),
        (cfg.batch >= 1, "batch", "must be at least 1"),
        (cfg.tokens is None or cfg.tokens >= 0, "tokens", "must be at least 0, or null"),
        (cfg.limit is None or cfg.limit >= 1, "limit", "must be at least 1, or null"),
        (cfg.n_fewshot is None or cfg.n_fewshot >= 0, "n_fewshot", "must be at least 0, or null"),
    )
    check_values(cfg, rules)
    evaluate(cfg)


def _shown(value: float | int | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "n/a" if value is None else f"{value:,}"


if __name__ == "__main__":
    run_command(main)
