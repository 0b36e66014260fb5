import hashlib
import json
import resource

import numpy as np
import pytest
import torch

from data import DataError
from data.loader import IGNORE, Loader, validation_batches


@pytest.fixture
def stream():
    return np.random.default_rng(0).integers(0, 256, size=1000)


def cat(batches, name="tokens"):
    return torch.cat([getattr(batch, name) for batch in batches])


def digest(batches):
    return hashlib.sha256(b"".join(cat(batches, name).numpy().tobytes() for name in ("tokens", "targets"))).hexdigest()


def test_every_token_is_predicted_once_per_epoch_in_an_order_of_its_own(make_set, stream):
    prepared = make_set([stream[:333], stream[333:334], stream[334:]])  # windows cross shard borders
    loader = Loader(prepared, seq_len=9, batch_sequences=1, micro=1, seed=5)
    assert loader.n_windows == 111
    expected = {tuple(stream[i : i + 10]) for i in range(0, 999, 9)}
    orders = []
    for epoch in range(3):
        rows = []
        for step in range(epoch * 111, (epoch + 1) * 111):
            (batch,) = loader.step_batches(step)
            assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
            rows.append((*batch.tokens[0].tolist(), int(batch.targets[0, -1])))
        assert set(rows) == expected
        orders.append(rows)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_batches_may_be_larger_than_an_epoch(make_set, stream):
    loader = Loader(make_set([stream[:21]]), seq_len=10, batch_sequences=4, micro=4)
    (batch,) = loader.step_batches(0)
    starts = [stream.tolist().index(row[0]) for row in batch.tokens.tolist()]
    assert sorted(starts[:2]) == [0, 10] and sorted(starts[2:]) == [0, 10]


def test_seed_and_step_decide_the_batch(make_set, stream):
    prepared = make_set([stream])
    sizes = {"seq_len": 7, "batch_sequences": 6, "micro": 3}
    first, second, other = (Loader(prepared, **sizes, seed=seed) for seed in (1, 1, 2))
    assert [digest(first.step_batches(s)) for s in (3, 0)] == [digest(second.step_batches(s)) for s in (3, 0)]
    assert digest(first.step_batches(0)) != digest(other.step_batches(0))
    assert digest(first.step_batches(0)) != digest(first.step_batches(1))


@pytest.mark.parametrize("world_size, micro", [(1, 12), (1, 1), (1, 4), (2, 6), (2, 1), (3, 2), (4, 3), (12, 1)])
def test_ranks_and_micro_batches_only_slice_the_global_batch(make_set, stream, world_size, micro):
    prepared = make_set([stream])
    (whole,) = Loader(prepared, seq_len=5, batch_sequences=12, micro=12).step_batches(2)
    parts = []
    for rank in range(world_size):
        loader = Loader(
            prepared, seq_len=5, batch_sequences=12, micro=micro, rank=rank, world_size=world_size, mask_documents=True
        )
        batches = loader.step_batches(2)
        assert len(batches) == 12 // (micro * world_size)
        assert all(batch.tokens.shape == batch.targets.shape == batch.doc_ids.shape == (micro, 5) for batch in batches)
        parts += batches
    assert torch.equal(cat(parts), whole.tokens)
    assert torch.equal(cat(parts, "targets"), whole.targets)


def test_a_batch_that_does_not_divide_is_refused(make_set, stream):
    with pytest.raises(DataError, match=r"10 sequences do not divide into 2 ranks x micro-batches of 2"):
        Loader(make_set([stream]), seq_len=5, batch_sequences=10, micro=2, world_size=2)


def test_next_gives_the_steps_in_order_and_resumes_across_an_epoch_end(make_set, stream):
    prepared = make_set([stream])
    sizes = {"seq_len": 10, "batch_sequences": 8, "micro": 4, "seed": 3}  # 99 windows: an epoch ends within step 12
    loader = Loader(prepared, **sizes)
    hashes = [digest(loader.next()) for _ in range(30)]
    assert hashes == [digest(loader.step_batches(step)) for step in range(30)]
    assert loader.epoch == pytest.approx(30 * 8 / 99)
    assert loader.wait_seconds > 0
    loader.close()

    first = Loader(prepared, **sizes)
    head = [digest(first.next()) for _ in range(11)]
    state = first.state_dict()  # taken while later steps are already prefetched
    first.close()
    second = Loader(prepared, **sizes)
    second.next()
    second.load_state_dict(state)
    middle = [digest(second.next()) for _ in range(5)]
    third = Loader(prepared, **sizes)
    third.load_state_dict(second.state_dict())
    second.close()
    tail = [digest(third.next()) for _ in range(14)]
    third.close()
    assert head + middle + tail == hashes


@pytest.mark.parametrize(
    "change, name",
    [({"seed": 4}, "seed"), ({"seq_len": 11}, "seq_len"), ({"batch_sequences": 16}, "batch_sequences"), ({}, "data")],
)
def test_state_of_another_stream_is_refused(make_set, stream, tmp_path, change, name):
    sizes = {"seq_len": 10, "batch_sequences": 8, "micro": 4, "seed": 3}
    state = Loader(make_set([stream]), **sizes).state_dict()
    other = make_set([stream if change else stream[::-1]], folder=tmp_path / "other")
    with pytest.raises(DataError, match=f"cannot continue the data stream: {name} was"):
        Loader(other, **(sizes | change)).load_state_dict(state)


def test_state_of_other_data_says_what_may_have_changed(make_set, stream, tmp_path):
    sizes = {"seq_len": 10, "batch_sequences": 8, "micro": 4}
    state = Loader(make_set([stream]), **sizes).state_dict()
    with pytest.raises(DataError, match=r"data was \w+ and is now \w+ .its text, data.tokenizer or data.val_fraction"):
        Loader(make_set([stream[1:]], folder=tmp_path / "other"), **sizes).load_state_dict(state)


def test_state_fits_the_same_tokens_in_other_shards(make_set, stream, tmp_path):
    sizes = {"seq_len": 10, "batch_sequences": 8, "micro": 4}
    one = Loader(make_set([stream]), **sizes)
    one.next()
    several = Loader(make_set([stream[:1], stream[1:400], stream[400:]], folder=tmp_path / "other"), **sizes)
    several.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert digest(several.next()) == digest(one.next())
    one.close()
    several.close()


def test_state_fits_any_number_of_ranks(make_set, stream):
    prepared = make_set([stream])
    sizes = {"seq_len": 10, "batch_sequences": 8, "micro": 2, "seed": 3}
    one = Loader(prepared, **sizes)
    one.next()
    wanted = cat(one.next())
    state = one.state_dict() | {"step": 1}
    one.close()
    parts = []
    for rank in range(2):
        loader = Loader(prepared, **sizes, rank=rank, world_size=2)
        loader.load_state_dict(state)
        parts += loader.next()
        loader.close()
    assert torch.equal(cat(parts), wanted)


def test_doc_ids_count_documents_within_the_window(make_set):
    loader = Loader(
        make_set([[1, 2, 256, 256, 3, 256, 4]]), seq_len=6, batch_sequences=1, micro=1, mask_documents=True, eot=256
    )
    (batch,) = loader.step_batches(0)
    assert batch.tokens.tolist() == [[1, 2, 256, 256, 3, 256]]
    assert batch.doc_ids.tolist() == [[0, 0, 0, 1, 2, 2]]  # an end of text belongs to the document that it ends
    assert batch.doc_ids.dtype == torch.int32


def test_too_little_text_for_one_sequence(make_set):
    prepared = make_set([np.arange(10)], val=[1])
    Loader(prepared, seq_len=9, batch_sequences=1, micro=1)
    with pytest.raises(DataError, match=r"the train split has 10 tokens, one sequence of model\.seq_len=10 needs 11"):
        Loader(prepared, seq_len=10, batch_sequences=1, micro=1)
    with pytest.raises(DataError, match=r"the val split has 1 tokens"):
        validation_batches(prepared, tokens=10, seq_len=4, micro=1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 7, 24, 25, 60, 1000])
def test_validation_windows_cover_the_start_of_the_split_once(make_set, stream, world_size, tokens):
    prepared = make_set([[0, 1]], val=stream[:62])
    targets, shapes, counts = [], set(), set()
    for rank in range(world_size):
        batches = validation_batches(
            prepared, tokens=tokens, seq_len=8, micro=3, rank=rank, world_size=world_size, mask_documents=True
        )
        counts.add(len(batches))
        for batch in batches:
            shapes |= {tuple(t.shape) for t in (batch.tokens, batch.targets, batch.doc_ids)}
            counted = batch.targets != IGNORE
            assert torch.equal(batch.tokens[:, 1:][counted[:, 1:]], batch.targets[:, :-1][counted[:, 1:]])
            targets += batch.targets[counted].tolist()
    assert shapes == {(3, 8)} and len(counts) == 1
    assert sorted(targets) == sorted(stream[1 : min(tokens, 61) + 1].tolist())


def test_an_error_in_the_background_thread_reaches_the_caller(make_set, stream, monkeypatch):
    loader = Loader(make_set([stream]), seq_len=10, batch_sequences=8, micro=4)
    monkeypatch.setattr(loader, "_window_starts", lambda sequences: 1 / 0)
    for _ in range(2):  # and again if it tries again
        with pytest.raises(ZeroDivisionError):
            loader.next()


def test_memory_stays_flat_over_10000_batches(make_set):
    """Peak resident memory; the warm-up touches every page of the set, so that mapped pages do not count as growth.

    A batch has 10 KB: 100 MB if each were kept.
    """
    prepared = make_set([np.tile(np.arange(256), 1000)])
    loader = Loader(prepared, seq_len=64, batch_sequences=8, micro=4, mask_documents=True)
    for _ in range(1000):
        loader.next()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    for _ in range(10_000):
        loader.next()
    loader.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16_384
