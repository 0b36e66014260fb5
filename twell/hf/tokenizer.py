"""Our tokenizers as those of the `tokenizers` library, with the same ids.

tiktoken joins the two neighbours whose union has the lowest rank; a merge list joins the listed pair that comes first.
They agree if the list has, in the order of the ranks, the pair that tiktoken joins last when it builds each token:
inside a piece of text that ends up as that token, nothing else can have happened. A token that merging never reaches
occurs only as a whole piece, which tiktoken looks up before it merges, as the library does with ignore_merges.
"""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from data.bpe import byte_of_letter
from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer, Tokenizer
from twell.hf.config import InterchangeError

if TYPE_CHECKING:
    import tokenizers

OWN_TOKENIZER = "twell"  # where an exported folder has the tokenizer as the trainer stores it, for import_hf

# What splits text differently somewhere: marks, scripts, digits, white space of all kinds, emoji, code, the names of
# special tokens.
ODD_TEXT = (
    "Hello, world! It's I'LL we'Ve 'S '\u017f don’t\n\n\n   indented\t\ttabs  trailing   \r\n\r\n \n"
    "  x = [1, 23, 456, 7890123]; y+=3.14e-10%\u00a0nbsp\u2009thin\u200bzero\u3000wide\x85nel\x0b\x0c\x1c\x00 "
    "¼²٣৪Ⅷ① naïve Ünïcödé e\u0301 ﬀ ß İ \u212a Привет, мир! שלום עולם مرحبا بالعالم नमस्ते สวัสดี 你好，世界。"
    "日本語テキスト 한국어 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f 𝒳𝔘 \U0010ffff\ufffd "
    "<|endoftext|> <|endo <s></s> {{}} // /* */ #!?…—–«» ____ ==== ~~~~ aaaaaaaaaaaaaaaa      \n\t \n    "
)


def letters() -> list[str]:
    """letters[b] spells byte b, by GPT-2's convention: printable bytes as themselves, the others from U+0100 on."""
    byte_of = byte_of_letter()
    return sorted(byte_of, key=byte_of.get)


def to_hf_tokenizer(tokenizer: Tokenizer) -> "tokenizers.Tokenizer":
    """The same tokenizer for the `tokenizers` library; InterchangeError if the two disagree on ODD_TEXT.

    One difference is meant: there, the name of a special token in a text becomes that token unless the caller asks for
    split_special_tokens.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as HFTokenizer

    if isinstance(tokenizer, ByteTokenizer):
        ranks, specials = {bytes([byte]): byte for byte in range(256)}, {END_OF_TEXT: tokenizer.eot}
        split = []
    elif isinstance(tokenizer, BPETokenizer):
        ranks, specials = tokenizer.ranks, tokenizer.specials
        split = [pre_tokenizers.Split(Regex(_for_oniguruma(tokenizer.pattern)), behavior="isolated")]
    else:
        raise InterchangeError(f"tokenizer {tokenizer.name}: only byte-level ones can be exported")
    spelling = letters()
    spelled = {piece: "".join(spelling[byte] for byte in piece) for piece in ranks}
    vocab = {spelled[piece]: rank for piece, rank in ranks.items()} | specials
    merges = [(spelled[left], spelled[right]) for left, right in merge_list(ranks)]
    result = HFTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=bool(split)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    _compare(tokenizer, result)
    return result


def save_hf_tokenizer(tokenizer: Tokenizer, folder: Path, seq_len: int) -> None:
    """Write tokenizer.json and its companions, for AutoTokenizer of transformers 4 and 5."""
    to_hf_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    named = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "model_max_length": seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=1) + "\n")


def merge_list(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that BPE joins last to build each token, in the order of the ranks; tokens it never builds have none."""
    pairs = []
    for piece, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(piece) > 1 and (pair := last_pair(piece, ranks)) is not None:
            pairs.append(pair)
    return pairs


def last_pair(piece: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts of `piece` before the merge that makes it, None if merging stops earlier."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    own = ranks[piece]
    while len(parts) > 2:
        rank, i = min((ranks.get(a + b, own), i) for i, (a, b) in enumerate(pairwise(parts)))
        if rank >= own:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _for_oniguruma(pattern: str) -> str:
    """tiktoken's pattern for the library's regular expressions, where {m,n}+ is no possessive but a second repetition.

    A greedy one does the same at the end of an alternative, which is where encodings have it.
    """
    return re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)


def _compare(ours: Tokenizer, theirs: "tokenizers.Tokenizer") -> None:
    theirs.encode_special_tokens = True  # as ours: names of special tokens in a text are text
    expected, got = ours.encode(ODD_TEXT), theirs.encode(ODD_TEXT, add_special_tokens=False).ids
    theirs.encode_special_tokens = False
    if got != expected:
        at = next((i for i, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
        text = ours.decode(expected[max(0, at - 2) : at + 3])
        raise InterchangeError(
            f"tokenizer {ours.name}: the `tokenizers` library would give other ids, first in {text!r} (token {at}: "
            f"{expected[at : at + 3]} against {got[at : at + 3]}); tokenizer=skip exports without one"
        )
