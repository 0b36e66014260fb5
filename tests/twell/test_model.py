"""The Transformer against a second implementation written without its shortcuts, and its promises."""

import functools
import math
import warnings

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.testing import assert_close

from tests.twell.small import KINDS, N_VOCAB, VOCAB_SIZE, batch, build, ffn_config, model_config
from twell.config import CONFIG_DIR, register
from twell.model import Transformer, rope_table, rotate
from twell.routing import Routing


def plain_forward(model: Transformer, weights: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of a sparse model, one head and one position at a time."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name]

    def turn(x: Tensor) -> Tensor:  # [b, t, head_dim] as complex numbers
        half = x.shape[-1] // 2
        frequency = model.rope_theta ** (-2 * torch.arange(half, dtype=x.dtype) / x.shape[-1])
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1)

    attention = model.blocks[0].attn
    n_heads, group, width = attention.n_heads, attention.n_heads // attention.n_kv_heads, attention.head_dim
    x = weights["embed.weight"][tokens]
    for i in range(len(model.blocks)):
        w = {name.removeprefix(f"blocks.{i}."): weight for name, weight in weights.items() if f"blocks.{i}." in name}
        y = norm(x, f"blocks.{i}.attn_norm.weight")
        bias = w["attn.qkv_bias"].split([n_heads * width, n_heads // group * width, n_heads // group * width])
        q, k, v = (y @ w[f"attn.{name}.weight"].T + b for name, b in zip("qkv", bias))
        heads = []
        for head in range(n_heads):
            mine = slice(head * width, (head + 1) * width)
            shared = slice(head // group * width, (head // group + 1) * width)
            query = turn(norm(q[..., mine], f"blocks.{i}.attn.q_norm.weight"))
            key = turn(norm(k[..., shared], f"blocks.{i}.attn.k_norm.weight"))
            scores = query @ key.transpose(1, 2) / math.sqrt(width)
            future = torch.ones(scores.shape[1:]).triu(1).bool()
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[..., shared])
        x = x + torch.cat(heads, -1) @ w["attn.o.weight"].T
        y = norm(x, f"blocks.{i}.ffn_norm.weight")
        x = x + ((y @ w["ffn.w_gate"].T).relu() * (y @ w["ffn.w_up"].T)) @ w["ffn.w_down"]
    logits = (norm(x, "norm.weight") @ weights["embed.weight"].T)[..., :N_VOCAB]
    loss = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return (loss * (targets >= 0)).sum()


def test_loss_and_every_gradient_match_a_plain_implementation():
    model = build(qkv_bias=True, qk_norm=True).double()
    model.compute_dtype = torch.float64
    with torch.no_grad():
        for parameter in model.parameters():  # off the initial ones and zeros
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=torch.manual_seed(0))
    tokens, targets = batch(masked=5)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = plain_forward(model, weights, tokens, targets)
    loss = model(tokens, targets).loss_sum
    assert_close(loss, expected.float(), rtol=1e-5, atol=0, check_dtype=False)
    expected.backward()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_grouped_query_attention_equals_repeated_heads():
    shared, full = build(n_kv_heads=2), build(n_kv_heads=6)
    weights = shared.state_dict()
    for name in weights:
        if name.endswith(("attn.k.weight", "attn.v.weight")):
            weights[name] = weights[name].view(2, 1, 4, 24).expand(2, 3, 4, 24).reshape(24, 24)
    full.load_state_dict(weights)
    tokens, _ = batch()
    assert_close(shared(tokens).logits, full(tokens).logits)


def test_rope_scores_depend_on_the_distance_only():
    generator = torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator, dtype=torch.float64)

    table = rope_table(200, 8, 10000.0).double()

    def score(i: int, j: int) -> Tensor:
        return (rotate(q, table[:, i : i + 1]) * rotate(k, table[:, j : j + 1])).sum()

    assert_close(score(5, 2), score(105, 102), rtol=1e-4, atol=1e-5)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-2
    assert_close(rotate(q, table[:, 7:8]).norm(), q.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n_kv_heads", [2, 6])
def test_documents_do_not_see_each_other(n_kv_heads: int):
    model = build(n_kv_heads=n_kv_heads)
    tokens, _ = batch(b=1)
    doc_ids = torch.tensor([[0] * 6 + [1] * 7 + [2] * 4])
    logits = model(tokens, doc_ids=doc_ids).logits
    others = tokens.clone()
    others[:, :6] = (tokens[:, :6] + 1) % N_VOCAB
    assert_close(model(others, doc_ids=doc_ids).logits[:, 6:], logits[:, 6:], rtol=0, atol=0)
    assert not torch.allclose(model(others).logits[:, 6:], model(tokens).logits[:, 6:])
    assert_close(model(tokens[:, 6:13]).logits, logits[:, 6:13], rtol=1e-4, atol=1e-5)  # positions are relative
    assert_close(model(tokens, doc_ids=torch.zeros_like(tokens)).logits, model(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_padded_ids_are_never_scored(tied: bool):
    model = build(tied=tied)
    tokens, targets = batch()
    loss = model(tokens, targets).loss_sum
    logits = model(tokens).logits
    assert logits.shape[-1] == VOCAB_SIZE
    assert (logits[..., N_VOCAB:] == -math.inf).all() and logits[..., :N_VOCAB].isfinite().all()
    head = model.embed if tied else model.head
    with torch.no_grad():
        head.weight[N_VOCAB:] = 100.0
    assert_close(model(tokens, targets).loss_sum, loss, rtol=0, atol=0)
    model(tokens, targets).loss_sum.backward()
    assert (head.weight.grad[N_VOCAB:] == 0).all() and (head.weight.grad[:N_VOCAB] != 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_masked_targets_add_nothing(kind: str):
    model = build(kind)
    tokens, targets = batch(masked=0)
    targets[1] = -100
    both, first = model(tokens, targets), model(tokens[:1], targets[:1])
    assert_close(both.loss_sum, first.loss_sum)
    assert_close(both.l1_sum, first.l1_sum)
    if both.stats is not None:
        assert_close(both.stats.fired, first.stats.fired)
        assert both.stats.counted.tolist() == [[True] * 17, [False] * 17]
    none = model(tokens, torch.full_like(targets, -100))
    assert none.loss_sum == 0 and (none.l1_sum == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_does_not_change_the_gradients(kind: str):
    """One batch of 4 and four of 1, with L1 and an uneven number of masked targets."""
    tokens, targets = batch(b=4, masked=20)

    def gradients(size: int) -> dict[str, Tensor]:
        model = build(kind)
        weight = torch.tensor([0.1, 0.2, 0.3])  # of each layer
        for i in range(0, 4, size):
            out = model(tokens[i : i + size], targets[i : i + size])
            ((out.loss_sum + (weight * out.l1_sum).sum()) / (targets >= 0).sum()).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    for (name, a), b in zip(gradients(1).items(), gradients(4).values()):
        assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["dense_relu", "sparse"])
def test_statistics_count_what_fires(kind: str):
    model = build(kind)
    tokens, targets = batch(masked=9)
    fires = []
    for block in model.blocks:  # the input of each FFN gives its firing pattern
        block.ffn.register_forward_pre_hook(lambda ffn, args: fires.append((args[0] @ ffn.w_gate.T > 0)[targets >= 0]))
    stats = model(tokens, targets).stats
    fires = torch.stack(fires)  # [layers, counted tokens, h]
    assert torch.equal(stats.counted, targets >= 0)
    assert_close(stats.nnz[:, stats.counted], fires.sum(2).int())
    assert_close(stats.fired, fires.sum(1).int())
    assert build("dense_silu")(tokens, targets).stats is None


def test_dense_relu_and_sparse_start_equal():
    """Same keys, same weights and the same first loss; the non-gated kind shares everything outside the FFN."""
    tokens, targets = batch()
    dense, sparse, nongated, silu = (build(kind) for kind in ("dense_relu", "sparse", "sparse_nongated", "dense_silu"))
    assert dense.state_dict().keys() == sparse.state_dict().keys()
    for model in (sparse, silu):
        for (name, a), b in zip(dense.state_dict().items(), model.state_dict().values()):
            assert torch.equal(a, b), name
    assert_close(dense(tokens, targets).loss_sum, sparse(tokens, targets).loss_sum)
    for name, parameter in nongated.named_parameters():
        assert ".ffn.w_" in name or torch.equal(parameter, sparse.get_parameter(name))
    assert not torch.equal(build(seed=2).embed.weight, sparse.embed.weight)


def test_a_model_from_the_meta_device_is_whole_after_init_weights():
    with torch.device("meta"):
        model = Transformer(model_config(), ffn_config("sparse"), VOCAB_SIZE, N_VOCAB)
    model.to_empty(device="cpu")
    model.init_weights(1)
    tokens, targets = batch()
    assert_close(model(tokens, targets).loss_sum, build()(tokens, targets).loss_sum, rtol=0, atol=0)
    assert "rope" not in model.state_dict()


def test_initial_scales():
    model = build(d_model=96, d_ff=160, n_layers=8)
    block = model.blocks[3]
    for parameter, std in (
        (model.embed.weight, 0.02),
        (block.attn.q.weight, 96**-0.5),
        (block.ffn.w_up, 96**-0.5),
        (block.ffn.w_down, 160**-0.5 / 4),
        (block.attn.o.weight, 96**-0.5 / 4),
    ):
        assert parameter.std().item() == pytest.approx(std, rel=0.03)
    assert not torch.equal(block.ffn.w_up, block.ffn.w_gate)  # each parameter has draws of its own
    tokens, targets = batch()
    assert model(tokens, targets).loss_sum.item() / targets.numel() == pytest.approx(math.log(N_VOCAB), rel=0.02)


def test_bf16_computes_in_bf16_on_fp32_masters():
    model, exact = build(dtype=torch.bfloat16), build()
    tokens, targets = batch()
    out = model(tokens, targets)
    assert out.loss_sum.dtype == out.l1_sum.dtype == torch.float32
    assert model(tokens).logits.dtype == torch.bfloat16
    assert_close(out.loss_sum, exact(tokens, targets).loss_sum, rtol=1e-2, atol=0)
    out.loss_sum.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_parameter_counts_and_flops():
    model, untied = build(), build(tied=False)
    attention, ffn, norms = 24 * 24 * 2 + 24 * 8 * 2, 3 * 24 * 40, 2 * 24
    blocks = 3 * (attention + ffn + norms) + 24
    assert model.n_params == blocks + 64 * 24 and model.n_params_without_embedding == blocks
    assert untied.n_params == blocks + 2 * 64 * 24 and untied.n_params_without_embedding == blocks + 64 * 24
    flops = 6 * (3 * (attention + ffn) + 64 * 24) + 6 * 3 * 24 * 17
    assert model.flops_per_token() == untied.flops_per_token() == flops


PRESETS = {  # millions of parameters, gated, with 50304 rows of vocabulary (byte tokens: 384)
    "nano": 1.0989,
    "124m": 123.6,
    "350m": 359.8,
    "0p5b": 514.2,
    "1b": 1028.2,
    "1p5b": 1542.2,
    "2b": 2056.1,
    "8b": 7391.9,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_on_the_meta_device(name: str, kind: str):
    register()
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        cfg = hydra.compose("config", [f"model={name}", f"ffn={kind}"])
    vocab_size = 384 if name == "nano" else 50304
    with torch.device("meta"):
        model = Transformer(cfg.model, cfg.ffn, vocab_size, vocab_size - 47)
        tokens = torch.zeros(1, cfg.model.seq_len, dtype=torch.int64)
        assert model(tokens, tokens).loss_sum.shape == ()
    tolerance = 0.05 if kind == "sparse_nongated" else 0.001  # the paper's non-gated width is slightly below 1.5x
    assert model.n_params / 1e6 == pytest.approx(PRESETS[name], rel=tolerance)
    assert OmegaConf.missing_keys(cfg) == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_model_agrees(kind: str):
    tokens, targets = batch(masked=4)
    doc_ids = torch.tensor([[0] * 6 + [1] * 11] * 2)
    model, twin = build(kind, n_layers=1), build(kind, n_layers=1)
    twin.compile_parts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for documents in (None, doc_ids):
            eager, fast = model(tokens, targets, documents), twin(tokens, targets, documents)
            assert_close(fast.loss_sum, eager.loss_sum)
            assert_close(fast.l1_sum, eager.l1_sum)
            for a, b in zip(eager.stats or (), fast.stats or ()):
                assert_close(a, b)
            for out in (eager, fast):
                (out.loss_sum + 1e-3 * out.l1_sum.sum()).backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert twin.state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_equal_layers_share_one_compilation(impl: str):
    """Also those whose sparse kernels each have a memory of their own."""
    dynamo = pytest.importorskip("torch._dynamo")
    dynamo.reset()
    dynamo.utils.counters.clear()
    model = build("sparse", n_layers=4, seq_len=8)
    for block in model.blocks:
        block.ffn.impl = impl
    routing = Routing(model, torch.device("cpu"), torch.float32)
    model.compile_parts()
    tokens, targets = batch()
    model(tokens[:, :8], targets[:, :8]).loss_sum.backward()
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1
    routing.update()
    model(tokens[:, :8], targets[:, :8]).loss_sum.backward()
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_one_process_compiles_models_of_many_shapes(monkeypatch):
    """All of them through one function, of which torch's own limit is eight versions."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    tokens, _ = batch(t=4)
    for n_neurons in range(8, 18):
        model = build("dense_silu", n_layers=1, d_ff=n_neurons)
        model.compile_parts()
        assert model(tokens).logits.isfinite().any()


def note_calls(model: Transformer) -> list[str]:
    """From now on notes each call of an FFN or an attention of `model`."""
    calls = []
    for block in model.blocks:
        for part in ("attn", "ffn"):
            getattr(block, part).register_forward_pre_hook(lambda *_, part=part: calls.append(part))
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("recompute", "again"), [("none", []), ("selective", ["ffn"]), ("full", ["attn", "ffn"])])
def test_recomputation_changes_no_gradient(kind: str, recompute: str, again: list[str]):
    model, plain = build(kind), build(kind)
    model.recompute = recompute
    calls = note_calls(model)
    tokens, targets = batch(masked=4)
    for m in (model, plain):
        out = m(tokens, targets)
        (out.loss_sum + 0.1 * out.l1_sum.sum()).backward()
    assert sorted(calls) == sorted(3 * ["attn", "ffn", *again])
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_of_compiled_blocks_and_sparse_kernels(impl: str, recompute: str):
    models = [build("sparse", n_layers=2, seq_len=8) for _ in range(2)]
    for model, how in zip(models, (recompute, "none")):
        model.recompute = how
        for block in model.blocks:
            block.ffn.impl = impl
        Routing(model, torch.device("cpu"), torch.float32)
        model.compile_parts()
        tokens, targets = batch()
        out = model(tokens[:, :8], targets[:, :8])
        (out.loss_sum + 0.1 * out.l1_sum.sum()).backward()
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters()):
        assert_close(p.grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")
