"""Trains a byte-level BPE with the `tokenizers` library and stores it as a tiktoken encoding, which runs it faster."""

from collections.abc import Iterable, Iterator

from data import DataError
from data.encode import document_hash
from data.sources import Block
from data.tokenizer import END_OF_TEXT, BPETokenizer, utf8

TRAINING_BYTES = 512 << 20  # text that the merges are learnt from, from the start of the source
# Contractions; words with the space or mark before them; up to three digits; runs of marks with their line ends; line
# ends with the indentation before them; other white space, leaving one space to the next word.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_bpe(blocks: Iterable[Block], vocab_size: int, val_below: int) -> BPETokenizer:
    """A BPE of `vocab_size` ids, end of text included, learnt from the training documents among `blocks`.

    Raises DataError without the `tokenizers` library, or when the text is too short for so many merges.
    """
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise DataError("data.tokenizer=bpe needs the extra `tokenizers`: pip install -e '.[tokenizers]'") from error
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_training_texts(blocks, val_below), trainer)

    to_byte = byte_of_letter()
    ranks = {bytes(to_byte[letter] for letter in word): i for word, i in tokenizer.get_vocab().items()}
    if len(ranks) < vocab_size - 1:
        raise DataError(
            f"data.bpe_vocab_size={vocab_size}: the text is too short, it yields only {len(ranks) + 1} ids; use at "
            f"most that many"
        )
    return BPETokenizer("bpe", PATTERN, ranks, {END_OF_TEXT: vocab_size - 1})


def _training_texts(blocks: Iterable[Block], val_below: int) -> Iterator[str]:
    left = TRAINING_BYTES
    for block in blocks:
        for text in block.read().texts:
            raw = utf8(text)
            if document_hash(raw) >= val_below:
                left -= len(raw)
                yield raw.decode()
        if left < 0:
            return


def byte_of_letter() -> dict[str, int]:
    """Inverse of the GPT-2 convention that spells bytes as letters: printable ones stand for themselves, the others
    for the code points from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
