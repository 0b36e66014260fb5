import re

import pytest
import torch

from tests.training import compose_config, train_tiny
from tests.twell.small import ffn_config, model_config
from twell.checkpoint import valid_steps
from twell.checks import validate
from twell.config import ConfigError
from twell.errors import UserError
from twell.forced import force_firing
from twell.model import Transformer

VOCAB = 512
SHAPE = {"d_model": 48, "d_ff": 160, "d_ff_nongated": 160, "seq_len": 64, "n_layers": 3}


def build(kind: str, dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    model = Transformer(model_config(**SHAPE, **changes), ffn_config(kind, SHAPE["d_ff"]), VOCAB, VOCAB, dtype)
    model.init_weights(1)
    return model


def ids(seed: int, b: int = 32) -> torch.Tensor:
    return torch.randint(VOCAB, (b, SHAPE["seq_len"]), generator=torch.Generator().manual_seed(seed))


def firing(model, tokens) -> torch.Tensor:
    """float [layers, n], neurons that fire on each token."""
    counts = []
    count = lambda _, __, out: counts.append(out.nnz.float())  # noqa: E731
    hooks = [block.ffn.register_forward_hook(count) for block in model.blocks]
    with torch.no_grad():
        model(tokens, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(counts)


@pytest.mark.parametrize("kind", ["sparse", "sparse_nongated", "dense_relu"])
@pytest.mark.parametrize("nnz", [6, 40])
def test_every_layer_fires_as_asked(kind, nnz):
    model = build(kind)
    reached = force_firing(model, nnz, ids(0))
    assert reached == pytest.approx([nnz] * 3, rel=0.011)
    assert firing(model, ids(0)).mean(1).tolist() == pytest.approx(reached)
    assert firing(model, ids(1)).mean(1).tolist() == pytest.approx([nnz] * 3, rel=0.05)  # on other tokens


def test_tokens_are_unequal_and_a_share_of_the_neurons_is_dead():
    model = build("sparse")
    force_firing(model, 12, ids(0))
    nnz = firing(model, ids(1))
    spread = nnz.std(1) / nnz.mean(1)
    assert ((spread > 0.6) & (spread < 1.0)).all()  # log-normal 0.6 gives 0.66; chance adds to it
    dead = torch.stack([block.ffn.w_gate[:, 0] < -5 for block in model.blocks])
    assert (dead.float().mean(1) - 0.3).abs().max() < 0.1
    assert not torch.equal(dead[0], dead[1])  # each layer has its own
    with torch.no_grad():
        out = model(ids(1), ids(1))
    never = (out.stats.fired == 0).float()
    assert (never[dead] == 1).all() and never[~dead].mean() < 0.2

    even = build("sparse")
    force_firing(even, 12, ids(0), token_sigma=0)
    assert firing(even, ids(1)).std() < 0.7 * nnz.std()


def test_equal_ids_fire_unequal_neurons():
    model = build("sparse")
    force_firing(model, 12, ids(0))
    masks = []
    model.blocks[-1].ffn.register_forward_pre_hook(lambda ffn, args: masks.append(args[0] @ ffn.w_gate.T > 0))
    with torch.no_grad():
        model(ids(1))
    fires, flat = masks[0].flatten(0, 1), ids(1).flatten()
    a, b = fires[flat == flat[0]][:2]
    assert (a != b).any()


def test_the_loss_is_that_of_guessing():
    model = build("sparse")
    force_firing(model, 12, ids(0))
    loss = model(ids(1), ids(2)).loss_sum / ids(2).numel()
    assert loss.item() == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=0.2)


def test_bf16_and_query_norms():
    model = build("sparse", dtype=torch.bfloat16, qk_norm=True, qkv_bias=True)
    assert force_firing(model, 12, ids(0)) == pytest.approx([12] * 3, rel=0.011)


def test_what_cannot_be_forced_is_refused():
    with pytest.raises(UserError, match=r"cannot make 120 of 160 neurons fire per token .* another number"):
        force_firing(build("sparse"), 120, ids(0))


@pytest.mark.parametrize("kind", ["sparse", "sparse_nongated", "dense_relu"])
def test_train_measures_at_a_forced_sparsity(kind, tmp_path, capsys):
    records = train_tiny(tmp_path, "name=run", f"ffn={kind}", "forced_nnz=8", "steps=3", "batch.tokens=512")
    steps = [record for record in records if "train/loss" in record]
    assert [record["train/lr"] for record in steps] == [0, 0, 0]
    assert all(record["sparsity/l0_mean"] == pytest.approx(8, rel=0.3) for record in steps)  # of other text
    assert "only speed means anything" in capsys.readouterr().out
    assert valid_steps(tmp_path / "runs" / "run") == []


@pytest.mark.parametrize(
    "override, message",
    [
        ("forced_nnz=0", "forced_nnz=0.0: must be above 0 and at most 0.3 * ffn.d_ff = 153.6"),
        ("forced_nnz=200", "forced_nnz=200.0: must be above 0 and at most"),
        ("ffn=dense_silu", "forced_nnz=5.0 with ffn.kind=dense_silu"),
        ("ffn.dead.remedy=reinit", "forced_nnz=5.0 with ffn.dead.remedy=reinit"),
    ],
)
def test_the_trainer_refuses_what_cannot_be_forced(override, message):
    overrides = [override] if "forced_nnz" in override else ["forced_nnz=5", override]
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(compose_config(*overrides))


def test_a_compiled_model_is_fitted_too():
    model = build("sparse")
    model.compile_parts()
    assert force_firing(model, 12, ids(0)) == pytest.approx([12] * 3, rel=0.011)
