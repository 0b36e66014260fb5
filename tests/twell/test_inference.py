"""The engine: any number of prompts of any lengths through a few rows."""

import pytest
import torch

from tests.twell.small import N_VOCAB, build
from twell.errors import UserError
from twell.inference import Engine
from twell.model import Transformer
from twell.sampling import GREEDY, Sampling

HOT = Sampling(3.0, None, None)
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9], [7, 9, 3, 2]]


def recomputed(model: Transformer, prompt: list[int], n: int) -> list[int]:
    """Greedy continuation by full forward passes, without a cache."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt) :]


def greedy(model: Transformer, prompts: list[list[int]], n: int, rows: int = 1, **options) -> list[list[int]]:
    return Engine(model, rows, **options).generate(prompts, n, GREEDY, [0] * len(prompts))


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_ragged_prompts_equal_recomputation_whatever_shares_their_batch(rows: int):
    model = build()
    assert greedy(model, PROMPTS, 10, rows) == [recomputed(model, prompt, 10) for prompt in PROMPTS]


def test_through_the_kernels():
    model = build("sparse")
    assert greedy(model, PROMPTS, 3, rows=3, impl="triton") == [recomputed(model, prompt, 3) for prompt in PROMPTS]


def test_attention_reads_only_the_slots_in_use(monkeypatch: pytest.MonkeyPatch):
    model = build()
    monkeypatch.setattr("twell.inference.SLOTS", 4)
    engine, read = Engine(model, 2), []
    step = engine.decoder.step
    monkeypatch.setattr(engine.decoder, "step", lambda *args: read.append(args[-1]) or step(*args))
    answers = engine.generate([[1, 2, 3], [4]], 13, GREEDY, [0, 0])
    assert answers == [recomputed(model, [1, 2, 3], 13), recomputed(model, [4], 13)]
    assert read == [4, 8, 8, 8, 8, 12, 12, 12, 12, 16, 16, 16]


def test_requests_draw_from_their_own_numbers():
    """Not from those of what shares the batch, and a longer answer begins like a shorter one."""
    model = build()
    together = Engine(model, 3).generate(PROMPTS, 9, HOT, seeds=[5, 6, 7, 8, 9])
    for prompt, seed, answer in zip(PROMPTS, [5, 6, 7, 8, 9], together):
        assert Engine(model, 2).generate([prompt], 9, HOT, [seed]) == [answer]
        assert Engine(model, 1).generate([prompt], 4, HOT, [seed]) == [answer[:4]]
    same = Engine(model, 2).generate([[1], [1], [1]], 9, HOT, seeds=[1, 2, 1])
    assert same[0] == same[2] != same[1]


def test_an_answer_ends_before_a_stop_token():
    model = build()
    whole = recomputed(model, [3, 1, 4], 10)
    stop = whole[5]
    engine = Engine(model, 2)
    answers = engine.generate([[3, 1, 4], *PROMPTS[1:]], 10, GREEDY, [0] * 5, stop={stop})
    for prompt, answer in zip(PROMPTS, answers):
        expected = recomputed(model, prompt, 10)
        assert answer == (expected[: expected.index(stop)] if stop in expected else expected)
    assert engine.generate([[3, 1, 4]], 10, GREEDY, [0], stop={whole[0]}) == [[]]
    assert engine.generate([[3, 1, 4]], 10, GREEDY, [0]) == [whole]  # the engine can be used again


def test_tokens_come_one_by_one_and_each_request_ends_once():
    model = build()
    engine = Engine(model, 2)
    events = list(engine.stream(PROMPTS, 4, GREEDY, [0] * 5))
    for i, prompt in enumerate(PROMPTS):
        assert [token for request, token in events if request == i] == [*recomputed(model, prompt, 4), None]
    first_end = next(i for i, (_, token) in enumerate(events) if token is None)
    assert {request for request, _ in events[:first_end]} == {0, 1}  # the rows at work

    stream = engine.stream([[1]], 100, GREEDY, [0])
    assert next(stream) == (0, recomputed(model, [1], 1)[0])
    stream.close()  # who has seen enough may leave
    assert engine.generate([[1]], 3, GREEDY, [0]) == [recomputed(model, [1], 3)]


def test_the_host_stays_a_step_behind(monkeypatch: pytest.MonkeyPatch):
    engine, launched = Engine(build(), 1), []
    step = engine.decoder.step
    monkeypatch.setattr(engine.decoder, "step", lambda *args: launched.append(None) or step(*args))
    stream = engine.stream([[1]], 5, GREEDY, [0])
    assert [(next(stream).token is not None, len(launched)) for _ in range(5)] == [(True, n) for n in (1, 2, 3, 4, 4)]


def test_a_long_prompt_keeps_its_end():
    model = build()
    prompt = torch.randint(N_VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    assert greedy(model, [prompt], 1) == [recomputed(model, prompt[-17:], 1)]
    assert greedy(model, [prompt], 1, length=9) == [recomputed(model, prompt[-9:], 1)]


def test_a_full_row_goes_on_from_its_last_half(monkeypatch: pytest.MonkeyPatch):
    """17 tokens fill a row; the others do not notice."""
    model, fed = build(), []
    engine = Engine(model, 2)
    prefill = engine.decoder.prefill

    def spy(tokens, lengths, rows, cache):
        fed.append([row[:length].tolist() for row, length in zip(tokens, lengths)])
        return prefill(tokens, lengths, rows, cache)

    monkeypatch.setattr(engine.decoder, "prefill", spy)
    first, second = engine.generate([[5], [1, 2, 3]], 30, GREEDY, [0, 0])
    text, other = [5, *first], [1, 2, 3, *second]
    assert fed[0] == [[5], [1, 2, 3]]
    assert fed[1:] == [[other[10:18]], [text[10:18]], [other[20:28]], [text[20:28]], [other[30:38]]][: len(fed) - 1]
    assert first[:17] == recomputed(model, [5], 17)
    assert first[17] == recomputed(model, text[10:18], 1)[0]
    assert Engine(model, 1).generate([[5]], 30, GREEDY, [0]) == [first]


def test_a_prefill_pass_has_a_limit(monkeypatch: pytest.MonkeyPatch):
    model, shapes = build(), []
    monkeypatch.setattr("twell.inference.PREFILL_TOKENS", 8)
    engine = Engine(model, 5)
    prefill = engine.decoder.prefill
    monkeypatch.setattr(engine.decoder, "prefill", lambda *args: shapes.append(tuple(args[0].shape)) or prefill(*args))
    assert engine.generate(PROMPTS, 3, GREEDY, [0] * 5) == [recomputed(model, prompt, 3) for prompt in PROMPTS]
    assert shapes[:3] == [(2, 3), (1, 7), (2, 4)]


def test_padded_ids_are_never_drawn():
    model = build()
    with torch.no_grad():
        model.embed.weight[N_VOCAB:] *= 1000
    answers = Engine(model, 4).generate([[1]] * 8, 60, Sampling(5.0, None, None), range(8))
    assert all(0 <= token < N_VOCAB for answer in answers for token in answer)
    assert len({tuple(answer) for answer in answers}) == 8


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_a_diverged_model_is_refused(sampling: Sampling):
    model = build()
    with torch.no_grad():
        model.embed.weight[7] = torch.nan
    engine = Engine(model, 2)
    with pytest.raises(UserError, match=r"^the model's logits are not finite: its training has diverged"):
        engine.generate([[1], [7]], 5, sampling, [0, 0])


@pytest.mark.parametrize(("prompts", "seeds"), [([[1], []], [0, 0]), ([[1], [2]], [0])])
def test_every_prompt_needs_an_id_and_a_seed(prompts, seeds):
    with pytest.raises(ValueError, match="one each, and no prompt may be empty"):
        Engine(build(), 1).generate(prompts, 5, GREEDY, seeds)


def test_every_request_wants_a_token():
    with pytest.raises(ValueError, match="max_new_tokens=0: must be at least 1"):
        Engine(build(), 1).generate([[1]], 0, GREEDY, [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows=0: must be a whole number of at least 1"),
        ({"rows": -1}, "rows=-1: must be"),
        ({"rows": 1.5}, r"rows=1\.5: must be"),
        ({"length": -3}, "length=-3: must be"),
        ({"length": 0}, "length=0: must be"),
        ({"impl": "foo"}, "impl='foo': must be one of auto, triton, torch"),
    ],
)
@pytest.mark.parametrize("kind", ["sparse", "dense_silu"])
def test_wrong_options_are_named(kind: str, options: dict, message: str):
    with pytest.raises(ValueError, match="^" + message):
        Engine(build(kind), **{"rows": 1, **options})


def test_only_ids_stop_a_request():
    with pytest.raises(ValueError, match=r"^stop=\['\\n'\]: must hold ids of tokens"):
        Engine(build(), 1).stream([[1]], 5, GREEDY, [0], stop=["\n"])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, HOT, Sampling(2.0, 40, 0.9)])
def test_compiled(sampling: Sampling):
    torch._dynamo.reset()
    model, seeds = build(), [0] * 5
    expected = Engine(model, 2).generate(PROMPTS, 6, sampling, seeds)
    assert Engine(model, 2, compile=True).generate(PROMPTS, 6, sampling, seeds) == expected
