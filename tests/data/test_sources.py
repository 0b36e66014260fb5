import sysconfig
from pathlib import Path

import pytest

from data import DataError, sources
from data.sources import TextSource, decode, expand_paths, open_source, stdlib_source


def read_all(source):
    texts, replaced, binary = [], 0, 0
    for block in source.blocks():
        documents = block.read()
        texts += documents.texts
        replaced += documents.replaced
        binary += documents.binary
    return texts, replaced, binary


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("b.txt", "a.md", "sub/c.txt", "sub/deep/d.txt", ".hidden/e.txt", "sub/.f.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "paths, names",
    [
        (["b.txt"], ["b.txt"]),
        (["."], ["a.md", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        (["sub", "b.txt", "sub/c.txt"], ["sub/c.txt", "sub/deep/d.txt", "b.txt"]),
        (["*.txt"], ["b.txt"]),
        (["**/*.txt"], ["b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        (["sub/.f.txt"], ["sub/.f.txt"]),
    ],
)
def test_files_folders_and_globs(tree, paths, names):
    assert [path.relative_to(tree).as_posix() for path in expand_paths(paths)] == names
    assert read_all(TextSource(expand_paths(paths)))[0] == [f"text of {name}" for name in names]


def test_home_and_names_that_look_like_globs(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    (tree / "[x].txt").write_text("x")
    assert expand_paths(["~/b.txt", "[x].txt"]) == [tree / "b.txt", tree / "[x].txt"]


@pytest.mark.parametrize(
    "paths, message",
    [
        (["gone.txt"], "gone.txt: no such file or folder .relative to /"),
        (["a.md", "*.json"], r"\*.json: nothing matches"),
        ([".hidden/none"], "no such file"),
    ],
)
def test_paths_that_lead_nowhere(tree, paths, message):
    with pytest.raises(DataError, match=message):
        expand_paths(paths)


def test_empty_input(tree):
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match=r"data.paths: empty: the folder is empty"):
        expand_paths(["empty"])
    with pytest.raises(DataError, match=r"empty: the folder holds no .jsonl or .jsonl.gz file"):
        expand_paths(["empty"], suffixes=(".jsonl", ".jsonl.gz"))
    (tree / "nothing.txt").touch()
    with pytest.raises(DataError, match=r"all 1 files are empty .*nothing.txt"):
        TextSource([tree / "nothing.txt"])


def test_broken_utf8_is_replaced_and_counted(tmp_path):
    good, bad, binary = tmp_path / "good.txt", tmp_path / "bad.txt", tmp_path / "picture.png"
    good.write_text("fine: \ufffd")  # a replacement character that was there before is not counted
    bad.write_bytes(b"a\xffb \xef\xbf\xbd caf\xe9")
    binary.write_bytes(b"\x89PNG\0\0")
    assert read_all(TextSource([good, bad, binary])) == (["fine: \ufffd", "a\ufffdb \ufffd caf\ufffd"], 2, 1)
    assert decode(b"\xf0\x9f\x98") == ("\ufffd", 1)


@pytest.mark.parametrize("unit", ["A line of text, long enough to look like one.\n", "para\ngraph\n\n", "x", "é", "😀"])
def test_a_long_file_is_cut_without_loss(tmp_path, unit):
    text = unit * (200_000 // len(unit.encode()))
    (tmp_path / "long.txt").write_bytes(text.encode())
    pieces, replaced, _ = read_all(TextSource([tmp_path / "long.txt"]))
    assert "".join(pieces) == text and replaced == 0  # no character was cut in two
    sizes = [len(piece.encode()) for piece in pieces]
    assert len(pieces) >= 200_000 // sources.SHORTEST_CUT and max(sizes) <= sources.SHORTEST_CUT
    assert min(sizes) > sources.SHORTEST_CUT / 3
    if "\n" in unit:
        assert all(piece.endswith(unit[-2:]) for piece in pieces)


def test_files_that_are_short_beside_the_whole_stay_whole(tmp_path):
    for i in range(300):
        (tmp_path / f"{i:03d}.txt").write_text(f"{i} " * 5000)
    texts, _, _ = read_all(TextSource(expand_paths([str(tmp_path)])))
    assert texts == [f"{i} " * 5000 for i in range(300)]


def test_stdlib_is_the_running_pythons_and_nothing_installed():
    source = stdlib_source()
    folder = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(folder).as_posix() for file in source.files]
    assert names and {"argparse.py", "json/decoder.py"} <= set(names) and all(n.endswith(".py") for n in names)
    assert not [name for name in names if "site-packages" in name or "dist-packages" in name]
    assert [block.size for block in source.blocks()] == [block.size for block in stdlib_source().blocks()]


def test_blocks_add_up_to_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("x" * 300)
    source = TextSource(expand_paths([str(tmp_path)]))
    sizes = [block.size for block in source.blocks()]
    assert sum(sizes) == source.size == 6000 and len(sizes) == 5


def test_source_is_named_by_the_config(config, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert isinstance(open_source(config("text", paths=[str(tmp_path / "a.txt")])), TextSource)
