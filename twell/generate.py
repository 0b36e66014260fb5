"""Sample text from a run.

    python -m twell.generate run=runs/NAME prompt="def main(" temperature=0.8 top_k=50 top_p=0.95 seed=1 n=2

Keys are the fields of `GenerateConfig`. A sample ends at end of text or after max_new_tokens. The model looks back over
at most its seq_len tokens: of a longer prompt it sees the end.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from data.tokenizer import Tokenizer, load_tokenizer
from twell import checkpoint
from twell.config import Config, ConfigError, explain, padded_vocab_size
from twell.errors import UserError
from twell.model import KVCache, Transformer


@dataclass
class GenerateConfig:
    run: str = ""  # the run's folder
    prompt: str = ""  # what to continue, taken literally; empty = a new document
    n: int = 1  # samples
    max_new_tokens: int = 200
    temperature: float = 0.8  # 0 = always the most probable token
    top_k: int | None = 50  # sample among the k most probable tokens; null = all
    top_p: float | None = 0.95  # and among the fewest whose probabilities reach p; null = all
    seed: int = 1337
    checkpoint: str = "latest"  # latest | best | a step
    device: str = "auto"  # auto | cpu | cuda


def next_token(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """Draw one id per row: logits [n, vocab_size] -> int64 [n]. Ids at -inf are never drawn.

    temperature 0 takes the most probable id. `top_k` keeps the k most probable ids, then `top_p` the fewest of them, in
    falling order, whose probabilities sum to at least p (arXiv 1904.09751): always at least one.
    Raises UserError for logits that are NaN or +inf, or all -inf: those of a diverged model.
    """
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)  # [n, 1]; NaN where there is one
    if not highest.isfinite().all():
        raise UserError("the model's logits are not finite: its training has diverged; use an earlier checkpoint")
    if temperature == 0:
        return logits.argmax(-1)
    # From the highest down, and by a divisor whose reciprocal is finite: 0 stays 0, the others may reach -inf.
    logits = (logits - highest) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # [n, 1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None:
        ranked, ids = probabilities.sort(-1, descending=True)
        ranked[ranked.cumsum(-1) - ranked >= top_p] = 0  # reached p before this one
        probabilities = torch.zeros_like(probabilities).scatter_(-1, ids, ranked)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: Transformer,
    ids: Sequence[int],
    max_new_tokens: int,
    *,
    n: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eot: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue `ids` (at least one) `n` times; returns the new ids, each list ending before its first `eot`.

    The model sees the last seq_len tokens. When its cache is full, it starts again from the last seq_len / 2, so that a
    sample may be longer than seq_len. `generator` is on the model's device.
    """
    tokens = torch.tensor(ids, device=model.embed.weight.device).repeat(n, 1)  # [n, t]
    ended = torch.zeros(n, dtype=torch.bool, device=tokens.device)
    length = min(model.seq_len, len(ids) + max_new_tokens)
    unseen, room = tokens[:, -model.seq_len :], 0  # what the cache lacks, and how much it can still take
    for _ in range(max_new_tokens):
        if room == 0:
            if tokens.shape[1] > len(ids):
                unseen = tokens[:, -max(1, model.seq_len // 2) :]
            cache, room = KVCache(model, n, length), length
        logits = model(unseen, cache=cache).logits[:, -1]  # [n, vocab_size]
        room -= unseen.shape[1]
        unseen = next_token(logits, temperature, top_k, top_p, generator)[:, None]  # [n, 1]
        tokens = torch.cat([tokens, unseen], dim=1)
        ended |= unseen.squeeze(1) == eot
        if ended.all():
            break
    samples = tokens[:, len(ids) :].tolist()
    return [sample[: sample.index(eot)] if eot in sample else sample for sample in samples]


def sample_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    *,
    n: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> list[str]:
    """`n` texts that start with `prompt`; an empty prompt starts a new document. Global random state is not touched."""
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    ids = tokenizer.encode(prompt)
    samples = generate(
        model,
        ids or [tokenizer.eot],
        max_new_tokens,
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eot=tokenizer.eot,
        generator=generator,
    )
    return [tokenizer.decode(ids + sample) for sample in samples]


def sample_text(model: Transformer, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, seed: int) -> str:
    """One text with the command line's default temperature, top_k and top_p."""
    d = GenerateConfig()
    settings = {"temperature": d.temperature, "top_k": d.top_k, "top_p": d.top_p}
    return sample_texts(model, tokenizer, prompt, max_new_tokens, seed, n=1, **settings)[0]


def load_run(run: Path, which: str, device: torch.device) -> tuple[Transformer, Tokenizer, dict]:
    """The model of `run` with the weights of a checkpoint, its tokenizer, and the checkpoint's meta.

    Args:
        which: "latest", "best" or a step number, as in `checkpoint.load_model`.
    """
    path = run / "config.yaml"
    if not path.exists():
        raise ConfigError(f"run={run}: no run there ({path} is missing)")
    cfg = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
    tokenizer = load_tokenizer(run / "tokenizer")
    steps = checkpoint.valid_steps(run)  # without any, load_model says so
    if steps and checkpoint.read_meta(run, steps[-1])["tokenizer"] != tokenizer.identity:
        raise ConfigError(
            f"run={run}: {run / 'tokenizer'} is not the tokenizer that its checkpoints were trained with; put that back"
        )
    dtype = torch.float32 if cfg.dtype == "fp32" or device.type == "cpu" else torch.bfloat16
    model = Transformer(cfg.model, cfg.ffn, padded_vocab_size(cfg, tokenizer.n_vocab), tokenizer.n_vocab, dtype)
    model.to(device)
    meta = checkpoint.load_model(run, model, which)
    return model, tokenizer, meta


def parse(arguments: Sequence[str]) -> GenerateConfig:
    """key=value arguments, checked; ConfigError (or OmegaConf's own error) names the first that is wrong."""
    names = [field.name for field in dataclasses.fields(GenerateConfig)]
    if {"-h", "--help"} & set(arguments):
        defaults = "\n".join(f"    {field.name}={field.default}" for field in dataclasses.fields(GenerateConfig))
        print(f"{__doc__}\nDefaults:\n\n{defaults}")
        sys.exit(0)
    values = OmegaConf.structured(GenerateConfig)  # converts, and refuses what does not convert
    prompt = ""
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in names:
            raise ConfigError(f"{argument}: expected KEY=VALUE with KEY one of {', '.join(names)}")
        if key == "prompt":  # text, whatever it looks like: OmegaConf would interpolate "${x}"
            prompt = value
        else:
            values[key] = None if value == "null" else value
    cfg = GenerateConfig(**{**values, "prompt": prompt})
    _check(cfg)
    return cfg


def _check(cfg: GenerateConfig) -> None:
    """Raise ConfigError for the first value out of range."""
    rules = (
        (cfg.run != "", "run", "name the run's folder, e.g. run=runs/NAME"),
        (cfg.n >= 1, "n", "must be at least 1"),
        (cfg.max_new_tokens >= 1, "max_new_tokens", "must be at least 1"),
        (0 <= cfg.temperature <= 1e6, "temperature", "must be from 0, the most probable token, to 1e6, any token"),
        (cfg.top_k is None or cfg.top_k >= 1, "top_k", "must be at least 1, or null"),
        (cfg.top_p is None or 0 < cfg.top_p <= 1, "top_p", "must be in (0, 1], or null"),
        (-(1 << 63) <= cfg.seed < 1 << 64, "seed", "must be a number of 64 bits"),
        (cfg.checkpoint in ("latest", "best") or cfg.checkpoint.isdecimal(), "checkpoint", "latest, best or a step"),
        (cfg.device in ("auto", "cpu", "cuda"), "device", "must be auto, cpu or cuda"),
        (cfg.device != "cuda" or torch.cuda.is_available(), "device", "torch sees no GPU; use auto or cpu"),
    )
    for holds, key, rule in rules:
        if not holds:
            raise ConfigError(f"{key}={getattr(cfg, key)}: {rule}")


def main(arguments: Sequence[str]) -> None:
    cfg = parse(arguments)
    use_cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    model, tokenizer, meta = load_run(Path(cfg.run), cfg.checkpoint, torch.device("cuda" if use_cuda else "cpu"))
    length = len(tokenizer.encode(cfg.prompt))
    note = f"{cfg.run}, step {meta['step']}"
    if length > model.seq_len:
        note += f"; the prompt has {length} tokens, of which the model sees the last {model.seq_len}"
    print(note, file=sys.stderr)
    samples = sample_texts(
        model,
        tokenizer,
        cfg.prompt,
        cfg.max_new_tokens,
        cfg.seed,
        n=cfg.n,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
    )
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character gets a question mark
    print(f"\n{'-' * 80}\n".join(samples))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
