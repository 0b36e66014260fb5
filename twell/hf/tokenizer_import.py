"""Reads a Hugging Face tokenizer.json into a tokenizer of ours that gives the same ids, or says why it cannot.

What can be read are byte-level BPEs (GPT-2, Llama 3, Qwen, SmolLM, StarCoder and the like) whose merges are in the
order of their ids; SentencePiece models (Llama 2, Mistral, Gemma) are not byte-level.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import DataError
from data.bpe import byte_of_letter
from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer, Tokenizer
from twell.errors import first_line
from twell.hf.config import InterchangeError, read_json
from twell.hf.tokenizer import last_pair

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same after every digit was cut off as a piece of its own: a digit ends white space as the end of the text does.
SINGLE_DIGITS_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
IN_NO_TEXT = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that UTF-8 never has


def read_hf_tokenizer(folder: Path, log: Callable[[str], None] = print) -> Tokenizer:
    """The tokenizer in `folder`; what it does beyond splitting and merging (normalization) is left out, and said.

    Raises InterchangeError, naming what cannot be expressed.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise _refused(path, "is missing (SentencePiece models are not read)")
    try:
        return _convert(read_json(path), folder, path, log)
    except (AttributeError, DataError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"cannot be understood ({type(error).__name__}: {first_line(error)})") from error


def _convert(content: dict[str, Any], folder: Path, path: Path, log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer that `content` of the file `path` describes; any error means that it is of another form."""
    model = content["model"]
    for key, expected in (("type", "BPE"), ("byte_fallback", None), ("dropout", None), ("end_of_word_suffix", None)):
        if (model.get(key) or None) != expected:
            raise _refused(path, f"model with {key}={model.get(key)}: not a plain byte-level BPE")
    pattern = _pattern(content.get("pre_tokenizer"), path)
    specials = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    if blank := [name for name in specials if not name.strip()]:
        raise _refused(path, f"added tokens that are white space ({blank[0]!r} ...): here none is found in a text")
    eot = _end_of_text(folder, specials)
    ranks = _ranks(model["vocab"], specials, path)
    if content.get("normalizer") is not None:
        log(f"{path}: normalizer {content['normalizer'].get('type')} is left out: text must be normalized already")
    if pattern is None:
        if len(ranks) == 256 and all(piece == bytes([rank]) for piece, rank in ranks.items()) and specials[eot] == 256:
            return ByteTokenizer()
        raise _refused(path, "a BPE that does not split text into pieces")
    _check_merges(model, ranks, path)
    # Only its id matters: no text is ever encoded to it.
    specials = {END_OF_TEXT if name == eot else name: i for name, i in specials.items()}
    return BPETokenizer(folder.resolve().name, pattern, ranks, specials)


def _pattern(pre_tokenizer: dict[str, Any] | None, path: Path) -> str | None:
    """The regular expression that cuts text before merging, None if nothing does."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = [step and step["type"] for step in steps]
    if kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise _refused(path, f"pre_tokenizer {kinds}: must end in ByteLevel without add_prefix_space")
    by_gpt2 = steps[-1].get("use_regex", True)
    first = steps[0]
    if kinds == ["ByteLevel"]:
        return GPT2_PATTERN if by_gpt2 else None
    if kinds == ["Digits", "ByteLevel"] and first["individual_digits"] and by_gpt2:
        return SINGLE_DIGITS_PATTERN
    is_split = kinds == ["Split", "ByteLevel"] and not by_gpt2
    if is_split and (first["behavior"], first["invert"], [*first["pattern"]]) == ("Isolated", False, ["Regex"]):
        return first["pattern"]["Regex"]
    raise _refused(path, f"pre_tokenizer {kinds}: no form of it that is known here")


def _end_of_text(folder: Path, specials: dict[str, int]) -> str:
    """The name of the token that ends a document."""
    config = folder / "tokenizer_config.json"
    eos = read_json(config).get("eos_token") if config.exists() else None
    name = END_OF_TEXT if END_OF_TEXT in specials else eos["content"] if isinstance(eos, dict) else eos
    if name not in specials:
        raise _refused(folder / "tokenizer.json", f"no {END_OF_TEXT} and no eos_token among its special tokens")
    return name


def _ranks(vocab: dict[str, int], specials: dict[str, int], path: Path) -> dict[bytes, int]:
    byte_of = byte_of_letter()
    try:
        ranks = {bytes(byte_of[c] for c in word): i for word, i in vocab.items() if word not in specials}
    except KeyError as error:
        raise _refused(path, f"its vocabulary is not byte-level: {error} spells no byte") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks and byte not in IN_NO_TEXT]
    if missing:
        raise _refused(path, f"no token for {len(missing)} single bytes, the first of them {missing[0]:#04x}")
    return ranks


def _check_merges(model: dict[str, Any], ranks: dict[bytes, int], path: Path) -> None:
    """Raise if merging by rank, as tiktoken does, could give other tokens than the file's list (see tokenizer.py)."""
    byte_of = byte_of_letter()
    listed, newest = {}, -1
    for merge in model["merges"]:
        parts = merge.split(" ") if isinstance(merge, str) else merge  # older files have one string
        left, right = (bytes(byte_of[letter] for letter in part) for part in parts)
        rank = ranks.get(left + right)
        if rank is None or rank < newest:
            raise _refused(path, f"its merges are not in the order of its ids, first at {(left + right)!r}")
        newest = rank
        listed.setdefault(left + right, set()).add((left, right))
    for piece in ranks:
        if len(piece) > 1:
            pair = last_pair(piece, ranks)
            if pair not in listed.get(piece, {None} if model.get("ignore_merges") else ()):
                raise _refused(path, f"merging by the order of its ids makes {piece!r} otherwise than its merges do")


def _refused(path: Path, reason: str) -> InterchangeError:
    return InterchangeError(f"{path}: {reason}; tokenizer=NAME or FOLDER imports with another tokenizer")
