import json
import subprocess
import sys

import numpy as np
import pytest

from data import DataError, bpe
from data.sources import Documents
from data.tokenizer import ByteTokenizer, load_tokenizer, make_tokenizer
from tests.data.conftest import words

TEXT = "def f(x):\n    return x  # Grüße, 世界 😀 <|endoftext|> \x00\t\r\n\n  1234567 don't"


class ListBlock:
    size = 1

    def __init__(self, texts):
        self.texts = texts

    def read(self):
        return Documents(self.texts)


@pytest.fixture(scope="module")
def trained():
    rng = np.random.default_rng(0)
    return bpe.train_bpe([ListBlock([words(rng, 2000), TEXT * 3])], vocab_size=400, val_below=0)


@pytest.fixture(params=["bytes", "trained", "gpt2"])
def tokenizer(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)


def test_text_survives_and_special_tokens_in_it_are_text(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eot not in ids and max(ids) < tokenizer.n_vocab
    assert tokenizer.encode_batch([TEXT, "", "a"]) == [ids, [], tokenizer.encode("a")]
    assert tokenizer.encode_array(TEXT).tolist() == ids


def test_decode_never_fails(tokenizer):
    ids = tokenizer.encode("a😀")
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"
    assert tokenizer.decode([tokenizer.eot, *ids]) == "<|endoftext|>a😀"
    assert tokenizer.decode([*ids, tokenizer.n_vocab + 5]) == "a😀"  # an id of the padded vocabulary
    tokenizer.decode(np.random.default_rng(0).integers(0, tokenizer.n_vocab, 500))


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_token_bytes_add_up_to_the_text(tokenizer):
    sizes = tokenizer.token_bytes()
    assert sizes.dtype == np.int32 and sizes.shape == (tokenizer.n_vocab,)
    assert sizes[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())
    assert sizes[tokenizer.eot] == 0


def test_saved_tokenizer_loads_in_a_process_without_network_or_trainer(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    code = (
        "import sys, json, socket; sys.modules['tokenizers'] = None; socket.socket.connect = None\n"
        "from data.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1])\n"
        "print(json.dumps([t.name, t.identity, t.n_vocab, t.eot, t.encode(sys.argv[2])]))"
    )
    text = TEXT.replace("\x00", "")  # which no argument can hold
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tokenizer"), text], capture_output=True, text=True, check=True
    )
    expected = [tokenizer.name, tokenizer.identity, tokenizer.n_vocab, tokenizer.eot, tokenizer.encode(text)]
    assert json.loads(out.stdout) == expected


def test_trained_bpe_has_the_ids_of_its_trainer(trained, monkeypatch):
    """The encoding that tiktoken runs gives the ids that the library which trained it gives."""
    tokenizers = pytest.importorskip("tokenizers")
    made = []
    original = tokenizers.Tokenizer
    monkeypatch.setattr(tokenizers, "Tokenizer", lambda *args: made.append(original(*args)) or made[-1])
    rng = np.random.default_rng(0)
    again = bpe.train_bpe([ListBlock([words(rng, 2000), TEXT * 3])], vocab_size=400, val_below=0)
    assert again.identity == trained.identity and again.n_vocab == 400
    for text in (TEXT, words(rng, 500), "  \n\n   x\n \r\n"):
        assert made[0].encode(text).ids == trained.encode(text)
    assert len(trained.encode(words(rng, 500))) < 0.8 * 3000  # it has learnt something


def test_bpe_learns_from_training_documents_alone():
    texts = [words(np.random.default_rng(i), 500) for i in range(20)]
    hashes = sorted(bpe.document_hash(text.encode()) for text in texts)
    kept = [text for text in texts if bpe.document_hash(text.encode()) >= hashes[10]]
    half = bpe.train_bpe([ListBlock(texts)], vocab_size=300, val_below=hashes[10])
    assert half.identity == bpe.train_bpe([ListBlock(kept)], vocab_size=300, val_below=0).identity
    assert half.identity != bpe.train_bpe([ListBlock(texts)], vocab_size=300, val_below=0).identity


def test_bpe_on_too_little_text_says_how_far_it_gets():
    with pytest.raises(DataError, match=r"data.bpe_vocab_size=5000: the text is too short, it yields only 2\d\d ids"):
        bpe.train_bpe([ListBlock(["abc abd abe"])], vocab_size=5000, val_below=0)


def test_bpe_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"needs the extra `tokenizers`: pip install"):
        bpe.train_bpe([ListBlock(["abc"])], vocab_size=300, val_below=0)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match=r"data.tokenizer=gpt9 is unknown; choose one of bytes, bpe, .*gpt2"):
        make_tokenizer("gpt9")


def test_encoding_that_cannot_be_fetched_says_what_to_do(monkeypatch):
    import tiktoken

    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(DataError, match=r"data.tokenizer=gpt2: .*ConnectionError.* set TIKTOKEN_CACHE_DIR") as caught:
        make_tokenizer("gpt2")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer in .*tokenizer.json is missing"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "damaged tokenizer"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "damaged tokenizer"),
        (lambda d: (d / "ranks.tiktoken").unlink(), "ranks.tiktoken is missing"),
        (lambda d: (d / "ranks.tiktoken").write_text("!!! x"), "damaged tokenizer"),
        (lambda d: _drop_last_line(d / "ranks.tiktoken"), "its vocabulary has changed"),
    ],
)
def test_damaged_folder(trained, tmp_path, damage, message):
    trained.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def _drop_last_line(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
