"""Tokenizers for the `tokenizers` library and from it: the ids must not change."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from data.bpe import PATTERN
from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer, Tokenizer
from twell.hf.config import InterchangeError
from twell.hf.tokenizer import ODD_TEXT, last_pair, letters, save_hf_tokenizer, to_hf_tokenizer
from twell.hf.tokenizer_import import read_hf_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `export`")
transformers = pytest.importorskip("transformers", reason="needs the extra `export`")

# The forms of the published encodings: possessive repetitions, a counted one among them.
LIKE_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LIKE_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def trained_ranks(n_merges: int = 300) -> dict[bytes, int]:
    """Bytes in a shuffled order and the commonest pairs of ODD_TEXT, merged as a BPE trainer does."""
    ranks = {bytes([(byte * 77) % 256]): byte for byte in range(256)}
    words = [
        [bytes([byte]) for byte in word.encode()] for word in (ODD_TEXT + " the then these there tthe " * 9).split(" ")
    ]
    for rank in range(256, 256 + n_merges):
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in pairwise(word):
                if pair[0] + pair[1] not in ranks:
                    counts[pair] = counts.get(pair, 0) + 1
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[left + right] = rank
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    return ranks


def bpe(pattern: str, specials: dict[str, int] | None = None) -> BPETokenizer:
    ranks = trained_ranks()
    return BPETokenizer("bpe", pattern, ranks, specials or {END_OF_TEXT: len(ranks)})


CASES = {
    "bytes": ByteTokenizer(),
    "ours": bpe(PATTERN),
    "like gpt2": bpe(LIKE_GPT2),
    "like cl100k, with unused ids": bpe(LIKE_CL100K, {END_OF_TEXT: 600, "<|fim|>": 777}),
    "without merging": BPETokenizer("bpe", PATTERN, trained_ranks(0) | {b"whole": 256}, {END_OF_TEXT: 257}),
}


@pytest.mark.parametrize("name", CASES)
def test_auto_tokenizer_gives_the_same_ids(name: str, tmp_path):
    ours = CASES[name]
    save_hf_tokenizer(ours, tmp_path, seq_len=33)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = ODD_TEXT.replace(END_OF_TEXT, "") + " the whole thing, then 12345\nwhole"
    assert theirs(text).input_ids == ours.encode(text)
    assert set(theirs(text)) == {"input_ids", "attention_mask"}  # what generate() takes
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot and theirs.model_max_length == 33
    # The name of a special token is that token, unless it is asked to be text, as it always is for us.
    assert ours.eot in theirs("a" + END_OF_TEXT).input_ids
    assert theirs("a" + END_OF_TEXT, split_special_tokens=True).input_ids == ours.encode("a" + END_OF_TEXT)


@pytest.mark.parametrize("name", CASES)
def test_reading_back_what_was_written(name: str, tmp_path):
    """The identity covers ranks, pattern and special tokens; only counted possessives are spelled otherwise."""
    ours = CASES[name]
    save_hf_tokenizer(ours, tmp_path, seq_len=33)
    back = read_hf_tokenizer(tmp_path)
    assert back.encode(ODD_TEXT) == ours.encode(ODD_TEXT) and (back.eot, back.n_vocab) == (ours.eot, ours.n_vocab)
    assert (back.identity == ours.identity) == (name != "like cl100k, with unused ids")


def test_the_letters_are_those_of_the_library():
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert len(letters()) == 256 and set(letters()) == set(alphabet)
    spell = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in (ODD_TEXT, "".join(map(chr, range(0x900)))):
        spelled = "".join(piece for piece, _ in spell.pre_tokenize_str(text))
        assert spelled == "".join(letters()[byte] for byte in text.encode())


def test_last_pair():
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5, b"cab": 6, b"bab": 7}
    assert last_pair(b"ab", ranks) == (b"a", b"b")
    assert last_pair(b"abc", ranks) == (b"a", b"bc")
    assert last_pair(b"cab", ranks) == (b"c", b"ab")
    assert last_pair(b"bcb", ranks | {b"bcb": 3}) is None  # its own merges would come before


def written(folder: Path, tokenizer: Tokenizer, **changes) -> dict:
    """tokenizer.json in `folder` with `changes` at dotted paths; returns its content."""
    to_hf_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    content = json.loads((folder / "tokenizer.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = content
        for key in parents:
            node = node[int(key) if isinstance(node, list) else key]
        node[last] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return content


GPT2_STEPS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGIT_STEPS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2_STEPS]}


@pytest.mark.parametrize("steps", [GPT2_STEPS, DIGIT_STEPS])
def test_pre_tokenizers_without_a_pattern_of_their_own(steps: dict, tmp_path):
    """GPT-2's and SmolLM's: their pattern lies in the library."""
    written(tmp_path, bpe(PATTERN), pre_tokenizer=steps)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    ours = read_hf_tokenizer(tmp_path)
    for text in (ODD_TEXT, "a  1  2\n 3 x   4", "  12 ab12  12", "\n\n9\t\t8 \n7", "don't 5'll"):
        assert ours.encode(text) == theirs.encode(text).ids, text


def test_special_tokens_at_the_start_and_another_end_of_text(tmp_path):
    """As SmolLM and Llama 3 have them."""
    ranks = {piece: rank + 3 for piece, rank in trained_ranks().items()}
    ours = BPETokenizer("bpe", PATTERN, ranks, {END_OF_TEXT: 1, "<s>": 0, "<pad>": 2})
    content = written(tmp_path, ours)
    text = json.dumps(content).replace(END_OF_TEXT, "</s>")
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    back = read_hf_tokenizer(tmp_path)
    assert back.eot == 1 and back.n_vocab == len(ranks) + 3 and back.encode("the thing") == ours.encode("the thing")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InterchangeError, match="no <|endoftext|> and no eos_token".replace("|", r"\|")):
        read_hf_tokenizer(tmp_path)


def test_normalization_is_left_out_and_said(tmp_path):
    written(tmp_path, bpe(PATTERN), normalizer={"type": "NFC"})
    said = []
    assert read_hf_tokenizer(tmp_path, said.append).encode("thé") == bpe(PATTERN).encode("thé")
    assert len(said) == 1 and "normalizer NFC is left out" in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__byte_fallback": True}, "byte_fallback=True: not a plain byte-level BPE"),
        ({"model__type": "Unigram"}, "type=Unigram: not a plain byte-level BPE"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "must end in ByteLevel"),
        ({"pre_tokenizer": GPT2_STEPS | {"add_prefix_space": True}}, "without add_prefix_space"),
        ({"pre_tokenizer": GPT2_STEPS | {"use_regex": False}}, "does not split text into pieces"),
        ({"pre_tokenizer__pretokenizers__0__invert": True}, "no form of it that is known here"),
        ({"added_tokens__0__content": "   "}, "added tokens that are white space"),
    ],
)
def test_what_cannot_be_expressed_is_refused(changes: dict, message: str, tmp_path):
    written(tmp_path, bpe(PATTERN), **changes)
    with pytest.raises(InterchangeError, match=message) as caught:
        read_hf_tokenizer(tmp_path)
    assert "tokenizer=NAME or FOLDER imports with another tokenizer" in str(caught.value)


def test_merges_in_another_order_than_the_ids_are_refused(tmp_path):
    content = written(tmp_path, bpe(PATTERN))
    swapped = content["model"]["merges"]
    swapped[5], swapped[6] = swapped[6], swapped[5]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InterchangeError, match="merges are not in the order of its ids"):
        read_hf_tokenizer(tmp_path)


def test_merges_that_build_a_token_otherwise_are_refused(tmp_path):
    content = written(tmp_path, bpe(PATTERN))
    del content["model"]["merges"][50]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InterchangeError, match="otherwise than its merges do"):
        read_hf_tokenizer(tmp_path)


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(InterchangeError, match=r"tokenizer\.json: is missing"):
        read_hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InterchangeError, match=r"tokenizer\.json: cannot be read \(Expecting property"):
        read_hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(InterchangeError, match=r"tokenizer\.json: must hold an object, but holds \[\]"):
        read_hf_tokenizer(tmp_path)
    written(tmp_path, bpe(PATTERN))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InterchangeError, match=r"tokenizer_config\.json: cannot be read"):
        read_hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("model", "vocab", None),
        ("model", "vocab", ["a", "b"]),
        ("model", "vocab", {"a": "b"}),
        ("model", "merges", None),
        ("model", "merges", [5]),
        ("model", "merges", ["€ €"]),
        ("pre_tokenizer", "pretokenizers", [{}]),
        ("pre_tokenizer", "pretokenizers", []),
    ],
)
def test_parts_of_an_unknown_form_are_one_line(part: str, key: str, value, tmp_path):
    content = written(tmp_path, bpe(PATTERN))
    content[part][key] = value
    if value is None:
        del content[part][key]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InterchangeError, match=r"tokenizer\.json: .*; tokenizer=NAME or FOLDER imports with") as caught:
        read_hf_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
