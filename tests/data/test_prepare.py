import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import DataError, encode, jsonl, shards
from data import prepare as preparation
from data.encode import document_hash, validation_threshold
from data.lock import locked
from data.prepare import prepare
from data.shards import TokenStream
from data.tokenizer import END_OF_TEXT, BPETokenizer, ByteTokenizer
from tests.data.conftest import words

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """300 documents and copies of 60 of them, in a JSONL file that makes several blocks."""
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 20_000)
    rng = np.random.default_rng(0)
    texts = [words(rng, int(n)) for n in rng.integers(1, 200, 300)]
    texts += texts[:60]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts, path


def documents(prepared, split):
    """The texts of a split."""
    stream = TokenStream(getattr(prepared, split))
    ids = stream.read(0, len(stream))
    assert len(ids) == 0 or ids[-1] == prepared.tokenizer.eot
    ends = np.flatnonzero(ids == prepared.tokenizer.eot)
    return [prepared.tokenizer.decode(part[part != prepared.tokenizer.eot]) for part in np.split(ids, ends + 1)[:-1]]


def contents(folder):
    """Every file of a prepared set; the stamps depend on the time."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name != "verified.json")
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def leftovers(tmp_path):
    return [path.name for path in (tmp_path / "sets").iterdir()]


def quiet(_):
    pass


def test_splits_hold_every_document_once_and_share_none(config, corpus):
    texts, path = corpus
    prepared = prepare(config("jsonl", paths=[str(path)], val_fraction=0.2), log=quiet)
    train, val = documents(prepared, "train"), documents(prepared, "val")
    assert sorted(train + val) == sorted(texts)  # copies included
    assert not set(train) & set(val)
    below = validation_threshold(0.2)
    assert val == [text for text in texts if document_hash(text.encode()) < below]  # in the source's order
    assert len(set(val)) == pytest.approx(60, abs=20)
    assert set(val) & set(texts[:60])  # there are copies among them
    assert prepared.train_tokens == sum(len(text.encode()) + 1 for text in train)
    assert prepared.meta["documents"] == [len(train), len(val)]
    assert prepared.meta["text_bytes"] == [sum(map(len, train)), sum(map(len, val))]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_workers_and_time_of_writing_change_nothing(config, corpus, tmp_path, tokenizer, monkeypatch):
    _, path = corpus
    values = {"paths": [str(path)], "tokenizer": tokenizer, "bpe_vocab_size": 300, "shard_tokens": 30_000}
    one = prepare(config("jsonl", **values), log=quiet)
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", 0)
    two = prepare(config("jsonl", **values | {"dir": str(tmp_path / "two"), "workers": 2}), log=quiet)
    assert one.folder.name == two.folder.name and one.fingerprint == two.fingerprint
    assert contents(one.folder) == contents(two.folder)
    assert len(one.train) > 1


def test_second_call_finds_the_first_ones_work(config, corpus):
    cfg = config("jsonl", paths=[str(corpus[1])])
    lines = []
    first = prepare(cfg, log=lines.append)
    assert lines[-1].startswith("prepared ") and str(first.folder) in lines[-1]
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    assert prepare(cfg, log=lines.append).fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before
    assert leftovers(first.folder.parents[1]) == [first.folder.name]
    assert len([line for line in lines if line.startswith("prepared")]) == 1


def test_whatever_decides_the_contents_decides_the_folder(config, corpus, tmp_path):
    path = corpus[1]
    base = {"paths": [str(path)], "val_fraction": 0.1}
    folders = {prepare(config("jsonl", **base), log=quiet).folder}
    for change in ({"val_fraction": 0.2}, {"shard_tokens": 1000}, {"tokenizer": "bpe", "bpe_vocab_size": 300}):
        folders.add(prepare(config("jsonl", **base | change), log=quiet).folder)
    folders.add(prepare(config("jsonl", **base | {"tokenizer": "bpe", "bpe_vocab_size": 301}), log=quiet).folder)
    path.write_text(path.read_text() + json.dumps({"text": "one more"}) + "\n")
    folders.add(prepare(config("jsonl", **base), log=quiet).folder)
    assert len(folders) == 6
    assert prepare(config("jsonl", **base | {"workers": 2}), log=quiet).folder in folders


def test_fingerprint_follows_the_contents_not_the_place(config, corpus, tmp_path):
    texts, path = corpus
    first = prepare(config("jsonl", paths=[str(path)]), log=quiet)
    copy = tmp_path / "elsewhere" / "copy.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    second = prepare(config("jsonl", paths=[str(copy)]), log=quiet)
    assert first.folder != second.folder and first.fingerprint == second.fingerprint
    copy.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::-1]))
    assert prepare(config("jsonl", paths=[str(copy)]), log=quiet).fingerprint != first.fingerprint


def test_broken_utf8_empty_and_binary_files_are_counted_and_told(config, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"document {i} " * 50)
    (folder / "bad.txt").write_bytes(b"caf\xe9 \xff")
    (folder / "surrogate.txt").write_text("fine")
    (folder / "empty.txt").touch()
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    lines = []
    prepared = prepare(config("text", paths=[str(folder)], val_fraction=0.1), log=lines.append)
    assert {name: prepared.meta[name] for name in ("replaced", "empty", "binary")} == {
        "replaced": 2,
        "empty": 1,
        "binary": 1,
    }
    assert "1 empty documents left out, 1 binary files left out, 2 pieces of broken UTF-8 replaced" in lines[-1]


def test_lone_surrogates_in_json_are_counted(config, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n{"text": "plain"}\n{"text": "\\ud83d\\ude00"}\n')
    prepared = prepare(config("jsonl", paths=[str(path)], val_fraction=0.3), log=quiet)
    assert sorted(documents(prepared, "train") + documents(prepared, "val")) == ["a\ufffdb", "plain", "😀"]
    assert prepared.meta["replaced"] == 1


def test_few_documents_still_give_a_validation_split(config, tmp_path):
    path = tmp_path / "x.jsonl"
    texts = [f"text {i}" for i in range(5)] * 2
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepared = prepare(config("jsonl", paths=[str(path)], val_fraction=1e-6), log=quiet)
    val = documents(prepared, "val")
    assert val == [min(texts, key=lambda text: document_hash(text.encode()))] * 2
    assert sorted(documents(prepared, "train") + val) == sorted(texts)


def test_single_text_file_is_split(config, tmp_path):
    (tmp_path / "book.txt").write_text(words(np.random.default_rng(0), 50_000))
    prepared = prepare(config("text", paths=[str(tmp_path / "book.txt")]), log=quiet)
    assert 0.02 < prepared.val_tokens / prepared.train_tokens < 0.2


def test_val_fraction_zero_holds_out_nothing(config, corpus):
    prepared = prepare(config("jsonl", paths=[str(corpus[1])], val_fraction=0.0), log=quiet)
    assert prepared.val == [] and len(documents(prepared, "train")) == len(corpus[0])


@pytest.mark.parametrize(
    "lines, message",
    [
        (['{"text": "only one"}'] * 3, "too little text: 3 documents, all in the validation split"),
        (['{"text": ""}'], "no text found .1 documents without text"),
        (['{"text": "a"}', '{"body": "b"}'], "line 2: no field 'text'"),
        (["nonsense"], "line 1: not JSON"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_input_leaves_nothing_behind(config, tmp_path, lines, message, workers):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=message) as caught:
        prepare(config("jsonl", paths=[str(path)], workers=workers), log=quiet)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_file_that_cannot_be_read_is_named_and_the_work_done_stays(config, tmp_path, workers, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    cfg = config("text", paths=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], workers=workers)
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    source = preparation.open_source(cfg)
    monkeypatch.setattr(preparation, "open_source", lambda cfg: source)
    monkeypatch.setattr(source, "describe", dict)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a.txt: No such file or directory; what is done so far stays in .*partial"):
        prepare(cfg, log=quiet)


def test_folder_that_cannot_be_written_is_named(config, corpus, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for bad in ("/dev/null/sets", str(tmp_path / "file"), f"{tmp_path}/{'x' * 300}"):
        with pytest.raises(DataError, match=f"^data.dir={bad}: cannot use {bad}.* choose a data.dir that") as caught:
            prepare(config("jsonl", paths=[str(corpus[1])], dir=bad), log=quiet)
        assert "\n" not in str(caught.value)

    def read_only(path):  # as `path.open("w")` does on such a mount, and for everybody but root in such a folder
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(preparation, "locked", read_only)
    with pytest.raises(DataError, match=r"^data.dir=.*sets: cannot use .*lock .Read-only file system.; choose"):
        prepare(config("jsonl", paths=[str(corpus[1])]), log=quiet)


def test_full_disk_keeps_the_work_done(config, corpus, monkeypatch):
    def full(self, ids):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preparation.SplitWriter, "append", full)
    with pytest.raises(
        DataError, match=r"partial: No space left .* stays in .*partial, and the same command continues"
    ):
        prepare(config("jsonl", paths=[str(corpus[1])]), log=quiet)


def test_tokenizer_that_fails_leaves_nothing_behind(config, corpus, tmp_path):
    with pytest.raises(DataError, match=r"gpt9 is unknown"):
        prepare(config("jsonl", paths=[str(corpus[1])], tokenizer="gpt9"), log=quiet)
    assert leftovers(tmp_path) == []


def test_damaged_set_says_so(config, corpus):
    cfg = config("jsonl", paths=[str(corpus[1])])
    prepared = prepare(cfg, log=quiet)
    raw = bytearray(prepared.train[0].read_bytes())
    raw[500] ^= 1
    prepared.train[0].write_bytes(raw)
    with pytest.raises(DataError, match=r"train-00000.bin: corrupted shard"):
        prepare(cfg, log=quiet)
    prepared.train[0].unlink()
    with pytest.raises(DataError, match=r"train-00000.bin: cannot read the shard"):
        prepare(cfg, log=quiet)
    (prepared.folder / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"not a prepared data set, or damaged .*; delete it"):
        prepare(cfg, log=quiet)


def test_ready_made_shards(config, corpus, tmp_path):
    made = prepare(config("jsonl", paths=[str(corpus[1])]), log=quiet)
    found = prepare(config("shards", paths=[str(made.folder)], tokenizer="stored"), log=quiet)
    assert (found.train, found.val, found.fingerprint) == (made.train, made.val, made.fingerprint)
    named = prepare(config("shards", paths=[str(made.folder / "*.bin")], tokenizer="bytes"), log=quiet)
    assert named.fingerprint == made.fingerprint
    with pytest.raises(DataError, match=r"no val-\*.bin among the 1 shards"):
        prepare(config("shards", paths=[str(made.train[0])], tokenizer="bytes"), log=quiet)
    other = prepare(config("jsonl", paths=[str(corpus[1])], tokenizer="bpe", bpe_vocab_size=300), log=quiet)
    with pytest.raises(DataError, match=r"made with another tokenizer"):
        prepare(config("shards", paths=[str(other.folder)], tokenizer="bytes"), log=quiet)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the folder holds no .bin file"):
        prepare(config("shards", paths=[str(tmp_path / "empty")], tokenizer="bytes"), log=quiet)


def test_tokenizers_that_a_source_cannot_have_say_why(config, corpus):
    with pytest.raises(DataError, match=r"^data.tokenizer=bpe with data.source=shards: .* use stored"):
        prepare(config("shards", paths=[str(corpus[1])], tokenizer="bpe"), log=quiet)
    with pytest.raises(DataError, match=r"^data.tokenizer=stored with data.source=jsonl: only ready-made shards"):
        prepare(config("jsonl", paths=[str(corpus[1])], tokenizer="stored"), log=quiet)


def test_fingerprint_does_not_depend_on_the_shards_lengths(config, corpus):
    sizes = (100_000_000, 30_000, 997)
    sets = [prepare(config("jsonl", paths=[str(corpus[1])], shard_tokens=size), log=quiet) for size in sizes]
    assert len({len(made.train) for made in sets}) == 3 and len({made.fingerprint for made in sets}) == 1


KILLED = """
import os, signal, sys
from data import jsonl, prepare as preparation
from data.progress import Progress
from twell.config import DataConfig
jsonl.BLOCK_BYTES, preparation.JOURNAL_SECONDS, kill_after = 20_000, 0, int(sys.argv[1])
def update(self, done, text_bytes, tokens):
    global kill_after
    kill_after -= 1
    if kill_after == 0:
        os.kill(os.getpid(), signal.SIGKILL)
Progress.update = update
preparation.prepare(DataConfig(name="set", source="jsonl", paths=[sys.argv[2]], dir=sys.argv[3],
                               workers=int(sys.argv[4]), shard_tokens=30_000))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers, kill_after", [(1, 1), (1, 5), (2, 3)])
def test_killed_preparation_continues_and_ends_the_same(config, corpus, tmp_path, monkeypatch, workers, kill_after):
    path = corpus[1]
    whole = prepare(config("jsonl", paths=[str(path)], dir=str(tmp_path / "whole"), shard_tokens=30_000), log=quiet)
    command = [sys.executable, "-c", KILLED, str(kill_after), str(path), str(tmp_path / "sets"), str(workers)]
    assert subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert sorted(leftovers(tmp_path)) == [whole.folder.name + ".lock", whole.folder.name + ".partial"]
    deadline = time.monotonic() + 20
    while _processes_naming(str(tmp_path)):  # the tokenizing processes leave by themselves
        assert time.monotonic() < deadline
        time.sleep(0.05)

    encoded = []
    call = encode.Encoder.__call__
    monkeypatch.setattr(encode.Encoder, "__call__", lambda self, block: encoded.append(block) or call(self, block))
    lines = []
    resumed = prepare(config("jsonl", paths=[str(path)], shard_tokens=30_000), log=lines.append)
    assert lines[0].startswith("continuing after")
    assert contents(resumed.folder) == contents(whole.folder)
    monkeypatch.undo()
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 20_000)
    total = len(list(preparation.open_source(config("jsonl", paths=[str(path)])).blocks()))
    assert len(encoded) == total - kill_after
    assert leftovers(tmp_path) == [whole.folder.name]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_in_one_line_and_takes_the_workers_along(tmp_path, workers):
    path, lines = tmp_path / "x.jsonl", tmp_path / "stderr"
    path.write_text((json.dumps({"text": words(np.random.default_rng(0), 2000)}) + "\n") * 20_000)  # 240 MB
    values = [f"data.paths=[{path}]", f"data.dir={tmp_path}/sets", f"data.workers={workers}", "data.tokenizer=bytes"]
    command = [sys.executable, "-m", "data.prepare", "data=jsonl", *values]
    with lines.open("w") as stderr:
        running = subprocess.Popen(
            command,
            cwd=ROOT,
            stderr=stderr,
            start_new_session=True,
            # A shell lets what it starts in the background ignore the signal, and so these tests, too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("sets/*.partial/train-*.bin")):  # until it tokenizes
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    assert running.wait(timeout=20) == 130
    assert not _processes_naming(str(tmp_path))
    assert "the same command continues" in lines.read_text() and lines.read_text().count("\n") == 1


def test_interrupt_removes_the_bar_and_the_workers(config, corpus, tmp_path, monkeypatch, capsys):
    def interrupt(self, done, text_bytes, tokens):
        assert _processes_naming(str(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation.Progress, "update", interrupt)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        prepare(config("jsonl", paths=[str(corpus[1])], workers=2), log=quiet)
    assert not _processes_naming(str(tmp_path))
    assert capsys.readouterr().err.endswith("\r\x1b[K")  # the line is empty for the message that follows


def test_partial_folder_without_a_journal_is_overwritten(config, corpus, tmp_path):
    cfg = config("jsonl", paths=[str(corpus[1])])
    whole = prepare(cfg, log=quiet)
    expected = contents(whole.folder)
    partial = whole.folder.with_name(whole.folder.name + ".partial")
    whole.folder.rename(partial)
    (partial / "meta.json").unlink()
    (partial / "train-00000.bin").write_bytes(b"cut off")
    (partial / "train-00007.bin").write_bytes(b"of an earlier attempt")
    assert contents(prepare(cfg, log=quiet).folder) == expected


@pytest.mark.slow
def test_processes_that_start_at_once_build_it_once(corpus, tmp_path):
    code = (
        "import sys; from data.prepare import prepare; from twell.config import DataConfig\n"
        "p = prepare(DataConfig(name='set', source='jsonl', paths=[sys.argv[1]], dir=sys.argv[2], workers=1))\n"
        "print(p.fingerprint)"
    )
    command = [sys.executable, "-c", code, str(corpus[1]), str(tmp_path / "sets")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    outputs = [process.communicate()[0].splitlines() for process in running]
    assert sum(line.startswith("prepared") for lines in outputs for line in lines) == 1
    assert len({lines[-1] for lines in outputs}) == 1 and len(leftovers(tmp_path)) == 1


def test_lock_is_held_by_one_at_a_time_and_its_file_goes(tmp_path):
    path = tmp_path / "x.lock"
    code = (
        "import sys; from pathlib import Path; from data.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('in', flush=True)"
    )
    with locked(path):
        waiting = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=0.7)
    assert waiting.communicate(timeout=30)[0] == b"in\n"
    assert not path.exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path):
    """Peak resident memory of the process and its workers, for inputs of 40 and 240 MB."""
    code = (
        "import sys, resource; from data.prepare import prepare; from twell.config import DataConfig\n"
        "prepare(DataConfig(name='set', source='jsonl', paths=[sys.argv[1]], dir=sys.argv[2], workers=2))\n"
        "print([resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)])"
    )
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": words(rng, 2000)}) + "\n" for _ in range(400)]
    peaks = []
    for copies in (8, 48):
        path = tmp_path / f"{copies}.jsonl"
        with path.open("w") as file:
            for _ in range(copies):
                file.writelines(lines)
        command = [sys.executable, "-c", code, str(path), str(tmp_path / "sets")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        peaks.append(json.loads(out.stdout.splitlines()[-1]))
    growth = np.array(peaks[1]) - np.array(peaks[0])  # KiB
    mapped = 2 * 240_000 - 2 * 40_000  # the check at the end maps the shards: file pages, which the kernel takes back
    assert growth[0] < 50_000 + mapped and growth[1] < 50_000


@pytest.mark.slow
def test_command_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "hello"}\n{"text": "world"}\n')
    command = [sys.executable, "-m", "data.prepare", "data=jsonl", "data.tokenizer=bytes", f"data.dir={tmp_path}/sets"]
    good = subprocess.run([*command, f"data.paths=[{tmp_path}/x.jsonl]"], cwd=ROOT, capture_output=True, text=True)
    assert good.returncode == 0 and "prepared 1 train documents" in good.stdout
    bad = subprocess.run([*command, f"data.paths=[{tmp_path}/y.jsonl]"], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 2 and "y.jsonl: no such file or folder" in bad.stderr and "Traceback" not in bad.stderr
    none = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert none.returncode == 2 and none.stderr.startswith("error: data.source=jsonl needs data.paths=[...]")


def _processes_naming(text):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if text in command and "data.workers" in command:
            found.append(command)
    return found


def test_stamps_spare_the_first_start_the_check(config, corpus, monkeypatch):
    monkeypatch.setattr(shards, "SMALL_SET_BYTES", 0)
    monkeypatch.setattr(shards, "verify_shard", lambda path: pytest.fail(f"{path} was read again"))
    prepare(config("jsonl", paths=[str(corpus[1])]), log=quiet)


def test_a_folder_names_its_tokenizer(config, tmp_path):
    """By its contents: another tokenizer in the same place makes another data set."""
    (tmp_path / "a.txt").write_text("some text " * 50)
    (tmp_path / "b.txt").write_text("other text " * 50)
    cfg = config("text", paths=[str(tmp_path / "*.txt")], tokenizer=f"{tmp_path}/mine", val_fraction=0.0)
    ByteTokenizer().save(tmp_path / "mine")
    first = prepare(cfg, log=lambda text: None)
    assert first.tokenizer.name == "bytes" and first.folder.parent == tmp_path / "sets"
    assert prepare(cfg, log=lambda text: None).folder == first.folder
    BPETokenizer("mine", ".", {bytes([i]): 255 - i for i in range(256)}, {END_OF_TEXT: 256}).save(tmp_path / "mine")
    second = prepare(cfg, log=lambda text: None)
    assert second.folder != first.folder and second.tokenizer.name == "mine"
