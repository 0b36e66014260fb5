"""Tokenizers: bytes, tiktoken encodings by name, and BPEs trained here (which are stored as tiktoken encodings).

A tokenizer is saved as a folder of plain text files that holds everything, so that loading it needs neither a
network nor the library that made it:

    tokenizer.json   kind, name, identity; for BPEs also the pattern and the special tokens
    ranks.tiktoken   BPEs only: one "base64(token) rank" line per mergeable token
"""

import base64
import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np

from data import DataError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """Text to ids and back. `eot` is the end-of-text id that joins documents; no text encodes to it.

    name: what the configuration calls it; identity: SHA-256 over everything that decides the ids; n_vocab: number of
    ids, special ones included.
    """

    name: str
    identity: str
    n_vocab: int
    eot: int

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of `text` in the smallest convenient unsigned type; special tokens in the text are plain text."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of each id; empty for ids that no text encodes to."""
        raise NotImplementedError

    def decode(self, ids) -> str:
        """Text of `ids`. Cut or invalid UTF-8 becomes U+FFFD, end of text its name; unknown ids vanish."""
        pieces = self.pieces
        out = bytearray()
        for i in ids:
            if i == self.eot:
                out += END_OF_TEXT.encode()
            elif 0 <= i < len(pieces):
                out += pieces[i]
        return out.decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """Bytes that each id stands for, int32 [n_vocab]; 0 for special and unused ids."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int32)

    def save(self, folder: str | Path) -> None:
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """The 256 byte values and end of text."""

    name = "bytes"
    identity = hashlib.sha256(b"bytes 256 + end of text").hexdigest()
    n_vocab = 257
    eot = 256

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8)

    @cached_property
    def pieces(self) -> list[bytes]:
        return [bytes([i]) for i in range(256)] + [b""]

    def save(self, folder: str | Path) -> None:
        _write_description(folder, {"kind": "bytes", "name": self.name, "identity": self.identity})


class BPETokenizer(Tokenizer):
    """A byte-level BPE run by tiktoken.

    pattern: regular expression that cuts text before merging; ranks: bytes -> id, lower merges first, all 256 single
    bytes included; specials: name -> id, END_OF_TEXT among them.
    """

    def __init__(self, name: str, pattern: str, ranks: dict[bytes, int], specials: dict[str, int]):
        import tiktoken

        if END_OF_TEXT not in specials:
            raise DataError(f"tokenizer {name} has no {END_OF_TEXT} token to join documents with")
        self.name, self.pattern, self.ranks, self.specials = name, pattern, ranks, specials
        self.eot = specials[END_OF_TEXT]
        self.n_vocab = max(max(ranks.values()), max(specials.values())) + 1
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials, explicit_n_vocab=None
        )

    @cached_property
    def identity(self) -> str:
        digest = hashlib.sha256(json.dumps([self.pattern, self.specials], sort_keys=True).encode())
        digest.update(self._rank_lines())
        return digest.hexdigest()

    def encode_array(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encoding.encode_to_numpy(utf8(text).decode(), disallowed_special=())

    @cached_property
    def pieces(self) -> list[bytes]:
        pieces = [b""] * self.n_vocab
        for piece, i in self.ranks.items():
            pieces[i] = piece
        return pieces

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ranks.tiktoken").write_bytes(self._rank_lines())
        description = {"kind": "bpe", "name": self.name, "identity": self.identity}
        _write_description(folder, description | {"pattern": self.pattern, "specials": self.specials})

    def _rank_lines(self) -> bytes:
        by_rank = sorted(self.ranks.items(), key=lambda item: item[1])
        return b"".join(base64.b64encode(piece) + b" %d\n" % i for piece, i in by_rank)


def utf8(text: str) -> bytes:
    """`text` in UTF-8. Lone surrogates, which JSON can spell and UTF-8 cannot, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace").encode()


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that needs no training: `bytes`, the tiktoken encoding of that name, or the one in that folder."""
    if name == "bytes":
        return ByteTokenizer()
    if "/" in name:
        return load_tokenizer(name)
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", "bpe", *tiktoken.list_encoding_names()])
        raise DataError(f"data.tokenizer={name} is unknown; choose one of {known}, or a folder, written with a /")
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # requests' exceptions are OSErrors
        raise DataError(
            f"data.tokenizer={name}: tiktoken could not fetch the encoding ({type(error).__name__}); on a machine with "
            f"network run `TIKTOKEN_CACHE_DIR=DIR python -c \"import tiktoken; tiktoken.get_encoding('{name}')\"`, "
            "copy DIR here and set TIKTOKEN_CACHE_DIR to it"
        ) from error
    return BPETokenizer(name, encoding._pat_str, encoding._mergeable_ranks, encoding._special_tokens)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote; raises DataError when files are missing, damaged, or do not fit together."""
    path = Path(folder) / "tokenizer.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        if description["kind"] == "bytes":
            tokenizer = ByteTokenizer()
        else:
            ranks = _read_ranks(Path(folder) / "ranks.tiktoken")
            tokenizer = BPETokenizer(description["name"], description["pattern"], ranks, description["specials"])
        stored = description["identity"]
    except FileNotFoundError as error:
        raise DataError(f"no tokenizer in {folder}: {error.filename} is missing") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: damaged tokenizer ({error})") from error
    if stored != tokenizer.identity:
        raise DataError(f"{path}: damaged tokenizer (its vocabulary has changed since it was saved)")
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks = {}
    for line in path.read_bytes().splitlines():
        piece, rank = line.split()
        ranks[base64.b64decode(piece, validate=True)] = int(rank)
    return ranks


def _write_description(folder: str | Path, description: dict) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
