"""Hugging Face data sets, prepared and streamed, on local parquet files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import DataError, hf
from data.encode import document_hash, validation_threshold
from data.loader import validation_batches
from data.prepare import prepare
from data.stream import StreamLoader
from tests.data.conftest import words
from tests.data.test_prepare import documents, quiet

pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """Three parquet files of 60 documents each; the texts, and the pattern that names the files."""
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("parquet")
    rng = np.random.default_rng(0)
    texts = [words(rng, int(n)) for n in rng.integers(0, 40, 180)]
    for i in range(3):
        table = pyarrow.table({"body": texts[60 * i : 60 * (i + 1)], "id": range(60)})
        pyarrow.parquet.write_table(table, folder / f"{i}.parquet", row_group_size=7)
    return texts, str(folder / "*.parquet")


@pytest.fixture
def hf_config(config, parquet, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def make(**values):
        base = {"hf_path": "parquet", "paths": [parquet[1]], "field": "body", "val_fraction": 0.2}
        return config("hf", **base | values)

    return make


def training_texts(texts):
    return [text for text in texts if text and document_hash(text.encode()) >= validation_threshold(0.2)]


def expected_stream(texts):
    return [i for text in training_texts(texts) for i in [*text.encode(), 256]]


SIZES = {"seq_len": 16, "batch_sequences": 4, "micro": 2}


def tokens_of(loader, steps):
    """The tokens handed out, without the overlaps, in order."""
    return [i for _ in range(steps) for batch in loader.next() for i in batch.tokens.flatten().tolist()]


def batches_of(loader):
    """All that the next step's batches hold, flat: for each batch its tokens, targets and doc_ids."""
    return [[t.flatten().tolist() for t in (b.tokens, b.targets, b.doc_ids)] for b in loader.next()]


def test_prepared_like_any_other_source(hf_config, parquet):
    texts = [text for text in parquet[0] if text]
    prepared = prepare(hf_config(), log=quiet)
    assert sorted(documents(prepared, "train") + documents(prepared, "val")) == sorted(texts)
    assert documents(prepared, "train") == training_texts(texts)


@pytest.mark.parametrize("streaming", [True, False])
def test_replaced_files_of_a_local_folder_are_noticed(hf_config, tmp_path, monkeypatch, streaming):
    import pyarrow.parquet

    def write(texts, name):
        (tmp_path / "local/sub").mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "local/sub" / name)

    def prepared(hf_path):
        return prepare(hf_config(hf_path=hf_path, paths=[], val_fraction=0.4, streaming=streaming), log=quiet)

    texts = [f"text {i}" for i in range(20)]
    write(texts[:10], "0.parquet")
    monkeypatch.chdir(tmp_path)
    first = prepared("local")
    assert prepared(str(tmp_path / "local")).folder == first.folder  # the same place under another name
    write(texts[10:], "0.parquet")
    second = prepared("local")
    assert not set(documents(second, "val")) & set(documents(first, "val")) and len(documents(second, "val")) > 0
    write(texts[:10], "1.parquet")
    assert len({first.folder, second.folder, prepared("local").folder}) == 3


def test_stream_skips_validation_documents_and_passes_over_again(hf_config, parquet):
    cfg = hf_config(streaming=True)
    prepared = prepare(cfg, val_tokens=200, log=quiet)
    assert prepared.train == [] and prepared.val_tokens > 200
    loader = StreamLoader(cfg, prepared, **SIZES, mask_documents=True)
    stream = expected_stream(parquet[0])
    steps = 2 * len(stream) // 64
    assert tokens_of(loader, steps) == (stream * 3)[: steps * 64]
    assert loader.epoch == 1 and loader.wait_seconds > 0
    batch = loader.next()[0]
    assert batch.tokens.shape == batch.targets.shape == batch.doc_ids.shape == (2, 16)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert int(batch.targets[0, -1]) == int(batch.tokens[1, 0])  # sequences follow each other
    loader.close()


def test_validation_windows_come_from_the_first_held_out_documents(hf_config, parquet):
    prepared = prepare(hf_config(streaming=True), val_tokens=200, log=quiet)
    held_out = [text for text in parquet[0] if text and text not in training_texts(parquet[0])]
    found = documents(prepared, "val")
    assert found == held_out[: len(found)]
    batches = validation_batches(prepared, tokens=200, seq_len=16, micro=2)
    assert sum(int((batch.targets >= 0).sum()) for batch in batches) == 200


@pytest.mark.parametrize("stop_at", [0, 1, 7, 145, 260, 274, 275, 400])
def test_stream_resumes_exactly_within_an_epoch_and_across_its_end(hf_config, parquet, stop_at):
    """An epoch ends within step 275, counted from 1."""
    cfg = hf_config(streaming=True)
    prepared = prepare(cfg, val_tokens=200, log=quiet)
    stream = expected_stream(parquet[0])
    assert len(stream) // 64 == 274
    loader = StreamLoader(cfg, prepared, **SIZES, mask_documents=True)
    [loader.next() for _ in range(stop_at)]
    state = json.dumps(loader.state_dict())  # as in a checkpoint; taken while later steps are already made
    expected = [batches_of(loader) for _ in range(30)]
    assert loader.epoch == (stop_at + 30) // 275
    loader.close()
    assert [i for step in expected for batch in step for i in batch[0]] == (stream * 2)[stop_at * 64 :][: 30 * 64]

    second = StreamLoader(cfg, prepared, **SIZES, mask_documents=True)
    second.next()  # what it did before does not matter
    second.load_state_dict(json.loads(state))
    assert json.dumps(second.state_dict()) == state
    assert [batches_of(second) for _ in range(10)] == expected[:10]
    third = StreamLoader(cfg, prepared, **SIZES, mask_documents=True)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert [batches_of(third) for _ in range(20)] == expected[10:]
    second.close()
    third.close()


def test_a_process_of_its_own_continues_from_the_checkpoints_file(hf_config, tmp_path):
    cfg = hf_config(streaming=True)
    loader = StreamLoader(cfg, prepare(cfg, val_tokens=200, log=quiet), **SIZES, mask_documents=True)
    [loader.next() for _ in range(260)]
    (tmp_path / "meta.json").write_text(
        json.dumps({"config": vars(cfg), "sizes": SIZES, "loader": loader.state_dict()})
    )
    code = (
        "import sys, json; from twell.config import DataConfig; from data.prepare import prepare\n"
        "from data.stream import StreamLoader; from tests.data.test_stream import batches_of\n"
        "meta = json.load(open(sys.argv[1])); cfg = DataConfig(**meta['config'])\n"
        "loader = StreamLoader(cfg, prepare(cfg, val_tokens=200), **meta['sizes'], mask_documents=True)\n"
        "loader.load_state_dict(meta['loader'])\n"
        "print(json.dumps([batches_of(loader) for _ in range(30)])); loader.close()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "meta.json")]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == [batches_of(loader) for _ in range(30)]
    loader.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_documents(hf_config, parquet, world_size):
    cfg = hf_config(streaming=True)
    prepared = prepare(cfg, val_tokens=200, log=quiet)
    seen = []
    for rank in range(world_size):
        loader = StreamLoader(cfg, prepared, rank=rank, world_size=world_size, **SIZES | {"batch_sequences": 12})
        ids = [i for document in loader._documents() for i in document.tolist()]
        seen += bytes(i if i < 256 else 0 for i in ids).decode().split("\0")[:-1]
    assert sorted(seen) == sorted(training_texts(parquet[0]))


@pytest.mark.slow
def test_two_ranks_save_and_load_together(hf_config, parquet, tmp_path):
    """The state that any rank saves brings back every rank's own position, also across the end of an epoch."""
    cfg = hf_config(streaming=True)
    prepare(cfg, val_tokens=200, log=quiet)
    code = (
        "import sys, json, torch.distributed as dist\n"
        "from twell.config import DataConfig; from data.prepare import prepare; from data.stream import StreamLoader\n"
        "dist.init_process_group('gloo'); cfg = DataConfig(**json.loads(sys.argv[1]))\n"
        "sizes = json.loads(sys.argv[2]) | dict(rank=dist.get_rank(), world_size=2)\n"
        "loader = StreamLoader(cfg, prepare(cfg, val_tokens=200), **sizes)\n"
        "step = lambda loader: [b.tokens.tolist() for b in loader.next()]\n"
        "[step(loader) for _ in range(240)]; states = [None, None]\n"
        "dist.all_gather_object(states, loader.state_dict()); assert states[0] == states[1]\n"
        "assert loader.epoch == 0; state = json.loads(json.dumps(states[0]))\n"
        "expected = [step(loader) for _ in range(60)]; assert loader.epoch == 1; loader.close()\n"
        "again = StreamLoader(cfg, prepare(cfg, val_tokens=200), **sizes); again.load_state_dict(state)\n"
        "assert [step(again) for _ in range(60)] == expected; again.close()\n"
        "both = [None, None]; dist.all_gather_object(both, expected); assert both[0] != both[1]\n"
        "dist.destroy_process_group()"
    )
    script = tmp_path / "ranks.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [json.dumps(vars(cfg)), json.dumps(SIZES)]
    out = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-3000:]


def test_state_of_another_stream_is_refused(hf_config):
    cfg = hf_config(streaming=True)
    prepared = prepare(cfg, val_tokens=200, log=quiet)
    state = StreamLoader(cfg, prepared, **SIZES).state_dict()
    with pytest.raises(DataError, match=r"seq_len was 16 and is now 8"):
        StreamLoader(cfg, prepared, **SIZES | {"seq_len": 8}).load_state_dict(state)
    with pytest.raises(DataError, match=r"world_size was 1 and is now 2"):
        StreamLoader(cfg, prepared, **SIZES, world_size=2).load_state_dict(state)


def test_stream_without_training_text(hf_config, parquet):
    cfg = hf_config(streaming=True)
    prepared = prepare(cfg, val_tokens=200, log=quiet)
    prepared.meta["val_below"] = 1 << 64
    loader = StreamLoader(cfg, prepared, **SIZES)
    with pytest.raises(DataError, match=r"the stream holds no training text"):
        loader.next()
    loader.close()


@pytest.mark.parametrize("streaming", [True, False])
def test_bad_datasets_are_named(hf_config, tmp_path, streaming):
    with pytest.raises(
        DataError, match=r"data.hf_path=parquet: no column 'text' .data.field.; the columns are body, id"
    ):
        prepare(hf_config(field="text", streaming=streaming), log=quiet)
    with pytest.raises(DataError, match=r"column 'id' holds a int, not a string"):
        prepare(hf_config(field="id", streaming=streaming), log=quiet)
    with pytest.raises(DataError, match=r"data.hf_split=test: cannot be loaded"):
        prepare(hf_config(hf_split="test", streaming=streaming), log=quiet)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match=r"cannot be loaded") as caught:
        prepare(hf_config(paths=[str(tmp_path / "bad.parquet")], streaming=streaming), log=quiet)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "sets").iterdir()) == []


def test_stream_without_a_validation_share_is_refused(hf_config):
    with pytest.raises(DataError, match=r"data.val_fraction=0.0 with data.streaming=true"):
        prepare(hf_config(streaming=True, val_fraction=0.0), log=quiet)


def test_without_the_library_it_is_named(hf_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package `datasets`: pip install datasets"):
        hf.load(hf_config(), streaming=True)


@pytest.fixture
def stream_that_breaks(hf_config, parquet, monkeypatch):
    """A loader whose dataset raises at the given rows, counted over all tries."""
    from data import stream

    monkeypatch.setattr(stream, "RETRY_AFTER", (0, 0))

    def make(*broken_rows):
        cfg = hf_config(streaming=True)
        loader = StreamLoader(cfg, prepare(cfg, val_tokens=64, log=quiet), **SIZES)
        documents, seen = loader._documents, []

        def breaking():
            for document in documents():
                seen.append(None)
                if len(seen) in broken_rows:
                    raise ConnectionResetError("the Hub hung up")
                yield document

        monkeypatch.setattr(loader, "_documents", breaking)
        return loader

    return make


def test_a_stream_that_breaks_off_is_taken_up_where_it_was(stream_that_breaks, parquet, capsys):
    loader = stream_that_breaks(9, 30, 31)
    assert tokens_of(loader, 80) == expected_stream(parquet[0])[: 80 * 4 * 16]
    loader.close()
    assert capsys.readouterr().err.count("ConnectionResetError: the Hub hung up); trying again") == 3


def test_a_stream_that_stays_broken_ends_the_run_with_its_name(stream_that_breaks):
    loader = stream_that_breaks(*range(9, 100))
    with pytest.raises(DataError, match=r"data\.hf_path=parquet: the stream broke off .* could not be taken up again"):
        tokens_of(loader, 80)
    loader.close()
