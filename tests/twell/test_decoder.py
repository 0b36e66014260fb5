"""The inference path computes what the model computes."""

import pytest
import torch

from tests.twell.small import KINDS, N_VOCAB, build
from twell.decoder import Decoder, KVCache
from twell.errors import UserError
from twell.model import Transformer

VARIANTS = ({}, {"qk_norm": True, "qkv_bias": True, "tied": False}, {"n_kv_heads": 6})


def model(kind: str = "sparse", **changes) -> Transformer:
    model = build(kind, **changes)
    if changes.get("qkv_bias"):
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv_bias.normal_(generator=torch.Generator().manual_seed(0))
    return model


def assert_same_logits(model: Transformer, decoder: Decoder) -> None:
    """Three prompts of different lengths in some rows of a cache, and five steps: against full forward passes."""
    tokens = torch.randint(N_VOCAB, (3, 17), generator=torch.Generator().manual_seed(1))
    each, lengths, rows = torch.arange(3), torch.tensor([5, 1, 9]), torch.tensor([3, 0, 1])
    expected = model(tokens).logits  # [3, 17, vocab_size]
    cache = KVCache(decoder, rows=4, length=17)
    logits = decoder.prefill(tokens[:, :9], lengths, rows, cache)
    torch.testing.assert_close(logits, expected[each, lengths - 1], rtol=1e-4, atol=1e-5)
    inputs, positions = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for i in range(5):
        inputs[rows], positions[rows] = tokens[each, lengths + i], lengths + i
        logits = decoder.step(inputs, positions, cache, slots=14 + i % 2)
        torch.testing.assert_close(logits[rows], expected[each, lengths + i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_models(kind: str, changes: dict):
    it = model(kind, **changes)
    assert_same_logits(it, Decoder(it, "torch", max_rows=4))


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in KINDS), ("sparse", VARIANTS[1])], ids=str)
def test_through_the_kernels(kind: str, changes: dict):
    it = model(kind, **changes)
    decoder = Decoder(it, "triton", max_rows=4)
    assert decoder.fused and decoder.shape.sparse == (kind != "dense_silu")
    assert_same_logits(it, decoder)


def test_many_rows_take_dense_products():
    assert not Decoder(model(), "triton", max_rows=65).shape.sparse
    assert not Decoder(model("dense_silu"), "triton", max_rows=1).shape.sparse


def test_steps_run_dense_in_layers_that_are_dense(monkeypatch: pytest.MonkeyPatch):
    it = model()
    decoder = Decoder(it, "triton", max_rows=4)
    shares = {id(ffn): share for ffn, share in zip(decoder.ffns, (0.1, 0.9, None))}
    monkeypatch.setattr("twell.relu_ffn.ReluFFN.share_fired", lambda self, rows: shares[id(self)] if rows == 4 else 0)
    assert_same_logits(it, decoder)
    assert [s.sparse for s in decoder.shapes] == [True, True, True]  # not all is known yet
    shares[id(decoder.ffns[2])] = 0.4
    assert_same_logits(it, decoder)
    assert [s.sparse for s in decoder.shapes] == [True, False, True]


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("twell.relu_ffn.unsupported", lambda *_: "no GPU")
    with pytest.raises(UserError, match=r"^impl=triton: no GPU; use impl=auto or impl=torch"):
        Decoder(model(), "triton", max_rows=1)
    assert not Decoder(model(), "auto", max_rows=1).shape.sparse


def test_weights_are_in_the_compute_dtype():
    it = build(dtype=torch.bfloat16)
    decoder = Decoder(it, "torch", max_rows=2)
    cache = KVCache(decoder, rows=2, length=17)
    tokens = torch.randint(N_VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = decoder.prefill(tokens, torch.tensor([9, 9]), torch.tensor([0, 1]), cache)
    assert logits.dtype == cache.k[0].dtype == torch.bfloat16
    torch.testing.assert_close(logits, it(tokens).logits[:, -1], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "impl"), [("dense_silu", "torch"), ("sparse", "triton")])
def test_compiled(kind: str, impl: str):
    it = model(kind)
    torch._dynamo.reset()
    decoder = Decoder(it, impl, max_rows=4, compile=True)
    with torch._dynamo.config.patch(error_on_recompile=True):  # all layers and slots share one compilation
        assert_same_logits(it, decoder)
