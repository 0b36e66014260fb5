"""Write text with a run's model.

    python -m twell.generate run=runs/NAME prompt="def main(" temperature=0.8 top_k=50 top_p=0.95 seed=1 n=2
    python -m twell.generate run=runs/NAME prompts=prompts.txt temperature=0

Keys are the fields of `GenerateConfig`. Text appears as it is written, and ends at end of text or after max_new_tokens.
The model looks back over at most its seq_len tokens: of a longer prompt it sees the end, and a text that outgrows them
goes on from their last half. Sample i draws from the random numbers of seed + i, whatever is computed beside it.
"""

import codecs
import dataclasses
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.tokenizer import Tokenizer, load_tokenizer
from twell import checkpoint
from twell.arguments import check_values
from twell.config import Config, ConfigError, explain, padded_vocab_size
from twell.errors import UserError, first_line
from twell.inference import Engine
from twell.model import Transformer
from twell.sampling import Sampling

MOST_SAMPLES = 100_000


@dataclass
class GenerateConfig:
    run: str = ""  # the run's folder
    prompt: str = ""  # what to continue, taken literally; empty = a new document
    prompts: str | None = None  # instead: a text file with one prompt a line
    n: int = 1  # samples of each prompt, up to 100,000
    rows: int = 64  # of them computed at once, at most
    max_new_tokens: int = 200
    temperature: float = Sampling.temperature  # 0 = always the most probable token
    top_k: int | None = Sampling.top_k  # sample among the k most probable tokens; null = all
    top_p: float | None = Sampling.top_p  # and among the fewest whose probabilities reach p; null = all
    seed: int = 1337
    checkpoint: str = "latest"  # latest | best | a step
    device: str = "auto"  # auto | cpu | cuda
    # of ReLU models: auto = on a GPU compute only the neurons that fire, where that is faster; triton = always; torch =
    # dense products
    impl: str = "auto"
    compile: bool = False  # torch.compile: takes a minute, pays for tens of thousands of tokens


class TextModel:
    """A model that continues texts: `twell.inference.Engine` with a tokenizer.

    rows: texts computed at once; any number can be asked for. The other arguments are the engine's.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, rows: int = 8, length: int | None = None, **options):
        self.tokenizer = tokenizer
        self.engine = Engine(model, rows, length, **options)

    def complete(self, prompts: Sequence[str], max_new_tokens: int = 200, **settings) -> list[str]:
        """Each prompt with what follows it; arguments as for `stream`."""
        texts = [""] * len(prompts)
        for i, piece in self.stream(prompts, max_new_tokens, **settings):
            texts[i] += piece or ""
        return texts

    def stream(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 200,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        seed: int = 1337,
        stop: Collection[int] = (),
    ) -> Iterator[tuple[int, str | None]]:
        """Continue `prompts` and yield (number of the prompt, piece of text), the prompt itself first; None at its end.

        An empty prompt starts a new document. A text ends before end of text or an id in `stop`, or after
        max_new_tokens. Prompt i draws from the random numbers of seed + i; global random state is not touched. Raises
        ValueError for one text instead of a list, and for a `stop` that holds anything but ids.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts={prompts[:20]!r}: must be a list of texts")
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        seeds = range(seed, seed + len(prompts))
        stop = {self.tokenizer.eot, *stop}
        starts = [prompt or [self.tokenizer.eot] for prompt in ids]
        events = self.engine.stream(starts, max_new_tokens, sampling, seeds, stop)
        decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts]
        for i, prompt in enumerate(ids):
            yield i, decoders[i].decode(self._bytes(prompt))
        for i, token in events:
            # Bytes of a character that is not complete wait in the decoder.
            piece = decoders[i].decode(b"", final=True) if token is None else decoders[i].decode(self._bytes([token]))
            if piece:
                yield i, piece
            if token is None:
                yield i, None

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokenizer.pieces[i] for i in ids)


def sample_text(model: Transformer, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, seed: int) -> str:
    """One text with the command line's default temperature, top_k and top_p, on the way of least preparation."""
    length = len(tokenizer.encode(prompt)) + 1 + max_new_tokens
    text = TextModel(model, tokenizer, 1, length, impl="torch", graph=False)
    return text.complete([prompt], max_new_tokens, seed=seed)[0]


def load(
    run: str | Path, checkpoint: str = "latest", device: str = "auto", rows: int = 8, impl: str = "auto", **options
) -> TextModel:
    """The model of a run's folder, ready to write; arguments as on the command line, `options` as of the engine."""
    model, tokenizer, _ = load_run(Path(run), checkpoint, device_named(device))
    return TextModel(model, tokenizer, rows, impl=impl, **options)


def device_named(name: str) -> torch.device:
    """auto, cpu or cuda; ConfigError if it is another name or not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name}: must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no GPU; use auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


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
    texts = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in names:
            raise ConfigError(f"{argument}: expected KEY=VALUE with KEY one of {', '.join(names)}")
        if key in ("prompt", "prompts"):  # text, whatever it looks like: OmegaConf would interpolate "${x}"
            texts[key] = value
        else:
            values[key] = None if value == "null" else value
    cfg = GenerateConfig(**{**values, **texts})
    _check(cfg)
    return cfg


def _check(cfg: GenerateConfig) -> None:
    """Raise ConfigError for the first value out of range."""
    rules = (
        (cfg.run != "", "run", "name the run's folder, e.g. run=runs/NAME"),
        (not (cfg.prompt and cfg.prompts), "prompt", f"and prompts={cfg.prompts}: give one of the two"),
        (1 <= cfg.n <= MOST_SAMPLES, "n", f"must be from 1 to {MOST_SAMPLES}"),
        (cfg.max_new_tokens >= 1, "max_new_tokens", "must be at least 1"),
        (cfg.rows >= 1, "rows", "must be at least 1"),
        (-(1 << 63) <= cfg.seed < 1 << 64, "seed", "must be a number of 64 bits"),
        (cfg.checkpoint in ("latest", "best") or cfg.checkpoint.isdecimal(), "checkpoint", "latest, best or a step"),
        (cfg.impl in ("auto", "triton", "torch"), "impl", "must be auto, triton or torch"),
    )
    check_values(cfg, rules)
    device_named(cfg.device)
    Sampling(cfg.temperature, cfg.top_k, cfg.top_p)


def prompts_of(cfg: GenerateConfig) -> list[str]:
    """What to continue: `n` times the prompt, or the lines of the file `prompts`."""
    if cfg.prompts is None:
        return [cfg.prompt] * cfg.n
    try:
        lines = Path(cfg.prompts).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts={cfg.prompts}: cannot be read ({first_line(error)})") from error
    if not lines:
        raise ConfigError(f"prompts={cfg.prompts}: is empty; one prompt a line")
    return [line for line in lines for _ in range(cfg.n)]


def show(pieces: Iterable[tuple[int, str | None]], n: int) -> None:
    """Print `n` texts one after the other: of the first that has not ended, pieces as they come."""
    waiting, ended, shown = [""] * n, [False] * n, 0
    for i, piece in pieces:
        waiting[i] += piece or ""
        ended[i] |= piece is None
        while shown < n:
            print(waiting[shown], end="", flush=True)
            waiting[shown] = ""
            if not ended[shown]:
                break
            shown += 1
            print(f"\n{'-' * 80}" if shown < n else "")


def main(arguments: Sequence[str]) -> None:
    cfg = parse(arguments)
    sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    model, tokenizer, meta = load_run(Path(cfg.run), cfg.checkpoint, device_named(cfg.device))
    prompts = prompts_of(cfg)
    lengths = [len(tokenizer.encode(prompt)) or 1 for prompt in prompts]
    note = f"{cfg.run}, step {meta['step']}"
    if max(lengths) > model.seq_len:
        note += (
            f"; the longest prompt has {max(lengths)} tokens: the first new token follows from the last {model.seq_len}"
            f" of all, each later one from the last {max(1, model.seq_len // 2)} to {model.seq_len}"
        )
    print(note, file=sys.stderr)
    text = TextModel(
        model, tokenizer, min(cfg.rows, len(prompts)), max(lengths) + cfg.max_new_tokens, impl=cfg.impl,
        compile=cfg.compile,
    )  # fmt: skip
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character gets a question mark
    show(text.stream(prompts, cfg.max_new_tokens, sampling=sampling, seed=cfg.seed), len(prompts))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
