"""lm-eval's tasks, run through its own API with a model of ours (extra `eval`)."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from twell.config import ConfigError
from twell.errors import UserError, first_line
from twell.inference import Engine
from twell.model import Transformer
from twell.sampling import GREEDY, Sampling

try:
    import lm_eval
    from lm_eval import utils as lm_eval_utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise UserError("tasks=...: evaluation tasks need lm-eval: pip install -e '.[eval]'") from error

MAX_NEW_TOKENS = 256  # where a task does not say it

log = logging.getLogger("twell")


class TwellLM(TemplateLM):
    """What lm-eval asks of a language model: log-likelihoods of continuations and of whole texts, and generation."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, batch: int):
        super().__init__()
        self._model, self._text, self._batch = model, tokenizer, batch
        self._told = False  # that answers are shorter than a task allows
        self._device = model.embed.weight.device

    @property
    def eot_token_id(self) -> int:
        return self._text.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self._text.encode(string)

    def _loglikelihood_tokens(self, requests: list[tuple], disable_tqdm: bool = False, **kwargs) -> list[tuple]:
        """(log-likelihood, whether every token is the most probable one) of each (text, context, continuation)."""
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts: every token once, in windows of seq_len tokens."""
        windows, owner = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in lm_eval_utils.get_rolling_token_windows(ids, self.prefix_token_id, self._model.seq_len, 1):
                windows.append(lm_eval_utils.make_disjoint_window(pair))
                owner.append(i)
        totals = [0.0] * len(requests)
        for i, (value, _) in zip(owner, self._score(windows)):
            totals[i] += value
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Texts that end before a stop string of their request, at end of text, or after its max_gen_toks.

        Context and answer share seq_len tokens. Of a long context the end is kept, at least half of seq_len; its answer
        then has the rest, even if that is less than max_gen_toks.
        """
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = defaultdict(list)  # requests with the same options go together
        for i, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(i)
        for options, members in alike.items():
            for start in range(0, len(members), self._batch):
                chosen = members[start : start + self._batch]
                contexts = [requests[i].args[0] for i in chosen]
                for i, text in zip(chosen, self._generate(contexts, json.loads(options), chosen)):
                    texts[i] = text
        return texts

    def _generate(self, contexts: list[str], options: dict[str, Any], seeds: list[int]) -> list[str]:
        """What follows each of at most `batch` contexts; the options are lm-eval's generation_kwargs."""
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else until
        longest = max((len(stop.encode()) for stop in stops), default=0)
        sampling = GREEDY
        if options.get("do_sample"):
            # 0 is how transformers spells "all".
            sampling = Sampling(options.get("temperature", 1.0), options.get("top_k") or None, options.get("top_p"))
        n_new, seq_len = options.get("max_gen_toks", MAX_NEW_TOKENS), self._model.seq_len
        room = max(seq_len - n_new, seq_len - seq_len // 2)
        prompts = [(self.tok_encode(context) or [self.eot_token_id])[-room:] for context in contexts]
        limits = [min(n_new, max(1, seq_len - len(prompt))) for prompt in prompts]
        if min(limits) < n_new and not self._told:
            self._told = True
            log.warning(
                "tasks: max_gen_toks=%d: long contexts leave less of seq_len=%d for the answer, down to %d tokens",
                n_new, seq_len, seq_len - room,
            )  # fmt: skip
        new: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        for i, token in self._engine.stream(prompts, max(limits), sampling, seeds, {self.eot_token_id}):
            if token is not None and i in going:
                new[i].append(token)
            # A stop string of so many bytes lies within as many tokens.
            stopped = any(stop in self._text.decode(new[i][-longest:]) for stop in stops)
            if token is None or stopped or len(new[i]) == limits[i]:
                going.discard(i)
            if not going:
                break
        texts = [self._text.decode(ids) for ids in new]
        return [text[: min((text.index(s) for s in stops if s in text), default=len(text))] for text in texts]

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self._model, self._batch)

    @torch.no_grad()
    def _score(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-likelihood, is it the greedy one) of each continuation after its context (at least one token each)."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        by_length = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        for start in range(0, len(pairs), self._batch):
            chosen = by_length[start : start + self._batch]
            for i, result in zip(chosen, self._score_batch([pairs[i] for i in chosen])):
                results[i] = result
        return results

    def _score_batch(self, pairs: list[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        seq_len = self._model.seq_len
        inputs = [(context + continuation)[:-1][-seq_len:] for context, continuation in pairs]
        # Padded on the right, where causal attention keeps it from what is scored.
        tokens = torch.full((len(pairs), max(map(len, inputs))), self.eot_token_id)
        for row, ids in zip(tokens, inputs):
            row[: len(ids)] = torch.tensor(ids)
        logits = self._model(tokens.to(self._device)).logits  # [b, t, vocab_size]
        for row, ids, (_, continuation) in zip(logits, inputs, pairs):
            n = len(continuation)
            if n > seq_len:
                raise ConfigError(f"tasks: one asks for {n} tokens at once, more than model.seq_len={seq_len}")
            yield _sum_up(row[len(ids) - n : len(ids)], torch.tensor(continuation, device=self._device))


def _sum_up(logits: Tensor, targets: Tensor) -> tuple[float, bool]:
    """logits [t, vocab_size], targets [t] -> their log-likelihood, and whether each has the highest logit."""
    log_probs = logits.float().log_softmax(-1).gather(1, targets[:, None])
    return log_probs.sum().item(), bool((logits.argmax(-1) == targets).all())


def find_tasks(tasks: Sequence[str]) -> tuple[TaskManager, list[str]]:
    """What knows `tasks`, and their names there.

    tasks: lm-eval's names, or paths of task files (.yaml), whose task may use local data and then needs no network.
    Raises ConfigError for a task that does not exist.
    """
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    if missing := [str(path) for path in files if not path.exists()]:
        raise ConfigError(f"tasks: no file {', '.join(missing)}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = [task for task in tasks if not task.endswith((".yaml", ".yml"))]
    folders = sorted({str(path.parent) for path in files})
    manager = TaskManager(include_path=folders or None, include_defaults=bool(names))
    names += [_task_name(path) for path in files]
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(f"tasks: lm-eval has no {', '.join(unknown)}; `lm-eval ls tasks` lists what it has")
    return manager, names


def run_tasks(
    model: Transformer,
    tokenizer: Tokenizer,
    tasks: tuple[TaskManager, list[str]],
    n_fewshot: int | None,
    limit: int | None,
    batch: int,
) -> Iterator[tuple[str, dict[str, float | None]]]:
    """(task, {metric: value}), one after the other; a group is followed or preceded by its tasks.

    tasks: of `find_tasks`. Raises UserError for the first task that fails.
    """
    manager, names = tasks
    lm = TwellLM(model, tokenizer, batch)
    for name in names:
        try:
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=[name],
                num_fewshot=n_fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=1000,
            )
        except Exception as error:  # no network, no such file, a mistake in the task's own code: all is in there
            raise UserError(f"tasks: {name} failed ({type(error).__name__}: {first_line(error)})") from error
        for task, values in (found["results"] | found.get("groups", {})).items():
            yield task, _numbers(values)


def _task_name(path: Path) -> str:
    """What a task file calls itself. It is not plain YAML (it may name functions), so only this line is read."""
    for key in ("group", "task"):
        if found := re.search(rf"^{key}:\s*['\"]?([\w.-]+)", path.read_text(), re.MULTILINE):
            return found[1]
    raise ConfigError(f"tasks: {path} has no line `task: NAME`")


def _numbers(values: dict[str, Any]) -> dict[str, float | None]:
    """Only the metrics; lm-eval names them "metric,filter"."""
    return {
        key.removesuffix(",none"): float(value) if isinstance(value, int | float) else None
        for key, value in values.items()
        if "," in key
    }
