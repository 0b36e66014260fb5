"""The FFN layers: each kind is the formula it claims to be."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.twell.small import ffn_config
from twell.ffn import FFN, build_ffn

D, H, B, T = 12, 20, 2, 5


def layer(kind: str) -> FFN:
    ffn = build_ffn(ffn_config(kind, H), D).double()
    generator = torch.manual_seed(0)
    with torch.no_grad():
        for parameter in ffn.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return ffn


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.manual_seed(1))
    counted = torch.tensor([[True] * 5, [True, False, True, False, False]])
    return x, counted


def hidden(ffn: FFN, kind: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what decides firing, a), both [b, t, h]."""
    up = x @ ffn.w_up.T
    if kind == "sparse_nongated":
        return up, up.relu()
    gate = x @ ffn.w_gate.T
    return gate, (gate * gate.sigmoid() if kind == "dense_silu" else gate.relu()) * up


@pytest.mark.parametrize("kind", ["dense_silu", "dense_relu", "sparse", "sparse_nongated"])
def test_output_and_gradients(kind: str):
    ffn, (x, counted) = layer(kind), inputs()
    _, a = hidden(ffn, kind, x)
    assert_close(ffn(x, counted).y, a @ ffn.w_down)
    leaves = (x.requires_grad_(), *ffn.parameters())
    expected = torch.autograd.grad(((hidden(ffn, kind, x)[1] @ ffn.w_down) ** 2).sum(), leaves)
    for got, want in zip(torch.autograd.grad((ffn(x, counted).y ** 2).sum(), leaves), expected):
        assert_close(got, want)


@pytest.mark.parametrize("kind", ["dense_relu", "sparse", "sparse_nongated"])
def test_statistics(kind: str):
    ffn, (x, counted) = layer(kind), inputs()
    result = ffn(x, counted)
    fires = hidden(ffn, kind, x)[0] > 0
    assert_close(result.nnz, fires.flatten(0, 1).sum(1).int())
    assert_close(result.fired, fires[counted].sum(0).int())
    assert not result.nnz.requires_grad and not result.fired.requires_grad


@pytest.mark.parametrize("kind", ["sparse", "sparse_nongated"])
def test_l1_and_its_gradients(kind: str):
    ffn, (x, counted) = layer(kind), inputs()
    leaves = (x.requires_grad_(), *(w for w in (ffn.w_gate, ffn.w_up) if w is not None))
    expected = hidden(ffn, kind, x)[1].abs()[counted].sum()
    l1 = ffn(x, counted).l1
    assert_close(l1, expected, check_dtype=False)
    for got, want in zip(torch.autograd.grad(l1, leaves), torch.autograd.grad(expected, leaves)):
        assert_close(got, want)


def test_dense_kinds_have_no_l1_and_silu_no_statistics():
    x, counted = inputs()
    assert layer("dense_relu")(x, counted).l1 is None
    assert layer("dense_silu")(x, counted)[1:] == (None, None, None)
    assert layer("dense_relu")(x, None).nnz is None


def test_weights_have_one_row_per_neuron():
    for kind in ("dense_silu", "dense_relu", "sparse"):
        assert {name: tuple(p.shape) for name, p in layer(kind).named_parameters()} == dict.fromkeys(
            ("w_gate", "w_up", "w_down"), (H, D)
        )
    assert [name for name, _ in layer("sparse_nongated").named_parameters()] == ["w_up", "w_down"]


def test_impl_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def sparse_ffn(x, *weights, counted, residual, impl, state):
        seen.append((residual, impl, state))
        return x, None, None, None

    monkeypatch.setattr("twell.ffn.sparse_ffn", sparse_ffn)
    cfg = ffn_config("sparse", H)
    cfg.impl = "torch"
    x, counted = inputs()
    ffn = build_ffn(cfg, D)
    ffn.state = "what it remembers"
    ffn(x, counted, residual="a tensor")
    assert seen == [("a tensor", "torch", "what it remembers")]


@pytest.mark.parametrize("kind", ["dense_silu", "dense_relu", "sparse", "sparse_nongated"])
def test_a_residual_is_added(kind: str):
    ffn, (x, counted) = layer(kind), inputs()
    residual = torch.randn_like(x)
    torch.testing.assert_close(ffn(x, counted, residual=residual).y, residual + ffn(x, counted).y)


def test_bf16_activations_use_bf16_weights():
    ffn, (x, counted) = layer("dense_silu").float(), inputs()
    y = ffn(x.bfloat16(), counted).y
    assert y.dtype == torch.bfloat16
    w_gate, w_up, w_down = (w.bfloat16() for w in (ffn.w_gate, ffn.w_up, ffn.w_down))
    assert_close(y, (F.silu(x.bfloat16() @ w_gate.T) * (x.bfloat16() @ w_up.T)) @ w_down, rtol=0, atol=0.1)


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"ffn\.kind=swish.*sparse_nongated"):
        build_ffn(ffn_config("swish"), D)
