"""`twell.sparsify` on small Hugging Face models."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import twell
from twell.hf.sparse_mlp import SparseMLP, UnsupportedModelError

transformers = pytest.importorskip("transformers")
ROOT = Path(twell.__file__).parents[1]
SHAPE = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("twell.relu_ffn.FEW", 4)  # in the interpreter every token takes its time


def llama(**changes) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHAPE, "hidden_act": "relu", **changes})
    return transformers.LlamaForCausalLM(config).eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2, 3)])  # the last are too many for decode_ffn
@torch.no_grad()
def test_logits_stay_the_same(shape, impl):
    model = llama()
    expected = model(ids(*shape)).logits
    assert twell.sparsify(model, impl=impl) is model
    assert sum(isinstance(module, SparseMLP) for module in model.modules()) == 2
    torch.testing.assert_close(model(ids(*shape)).logits, expected, rtol=1e-4, atol=1e-5)


def test_an_unknown_implementation_changes_nothing():
    model = llama()
    with pytest.raises(ValueError, match=r"^impl='foo': must be one of auto, triton, torch"):
        twell.sparsify(model, impl="foo")
    assert not any(isinstance(module, SparseMLP) for module in model.modules())


def test_generation_stays_the_same():
    model = llama()
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids(2, 1), **arguments)
    assert torch.equal(twell.sparsify(model, impl="triton").generate(ids(2, 1), **arguments), expected)


def test_parameters_keep_names_and_values(tmp_path):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    twell.sparsify(model)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.model.layers[1].mlp.down_proj.weight.T.is_contiguous()
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids(1, 4)).logits, model(ids(1, 4)).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_weights_may_change_afterwards():
    model, other = twell.sparsify(llama(), impl="triton"), llama()
    model(ids(1, 4))
    for parameter in other.parameters():
        parameter.mul_(1.1)
    model.double().float()  # the same values in other places
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(ids(1, 4)).logits, other(ids(1, 4)).logits, rtol=1e-4, atol=1e-5)
    model.double(), other.double()  # which the kernels do not have
    twell.sparsify(llama())
    with pytest.raises(twell.errors.UserError, match=r"impl=triton: dtype torch\.float64"):
        model(ids(1, 4))


@pytest.mark.parametrize("shape", [(1, 4), (2, 3)])
def test_gradients_are_those_of_the_dense_model(shape):
    model, dense = twell.sparsify(llama(), impl="triton"), llama()
    for m in (model, dense):
        m(ids(*shape), labels=ids(*shape)).loss.backward()
    for (name, parameter), expected in zip(model.named_parameters(), dense.parameters()):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("shape", [(1, 4), (2, 3)])
@torch.no_grad()
def test_compiles_without_graph_breaks(shape):
    mlp = twell.sparsify(llama(), impl="triton").model.layers[0].mlp
    x = torch.randn(*shape, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), mlp(x), rtol=1e-4, atol=1e-5)


class Doubled(nn.Module):
    """Looks like the MLP, and computes something else."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = mlp.gate_proj, mlp.up_proj, mlp.down_proj, nn.ReLU()

    def forward(self, x):
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def doubled() -> nn.Module:
    model = llama()
    model.model.layers[1].mlp = Doubled(model.model.layers[1].mlp)
    return model


def with_another_linear() -> nn.Module:
    class Quantized(nn.Linear):
        pass

    model = llama()
    model.model.layers[0].mlp.up_proj = Quantized(24, 40, bias=False)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return llama()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llama(hidden_act="silu"), r"model\.layers\.0\.mlp \(LlamaMLP\): its activation is SiLU.*, not ReLU"),
        (lambda: llama(mlp_bias=True), r"model\.layers\.0\.mlp \(LlamaMLP\): gate_proj has a bias"),
        (doubled, r"model\.layers\.1\.mlp \(Doubled\): it computes something else"),
        (with_another_linear, r"model\.layers\.0\.mlp \(LlamaMLP\): up_proj is a Quantized, not a plain Linear"),
        (on_meta, r"model\.layers\.0\.mlp \(LlamaMLP\): gate_proj has no values yet"),
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(n_layer=1, n_embd=24, n_head=2, vocab_size=61)
            ),
            "GPT2LMHeadModel: has no MLP with gate_proj, up_proj, down_proj",
        ),
        (lambda: twell.sparsify(llama()), "LlamaForCausalLM: has no MLP with"),  # any more
    ],
)
def test_other_models_are_refused_and_left_alone(make, message):
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match="^" + message):
        twell.sparsify(model)
    assert [type(module) for module in model.modules()] == before


def test_importing_twell_imports_nothing_else():
    script = (
        "import sys, twell\n"
        "assert not {'torch', 'transformers', 'triton'} & sys.modules.keys()\n"
        "assert callable(twell.sparsify) and 'transformers' not in sys.modules\n"
        "try:\n    twell.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("module 'twell' has no attribute 'nothing'\n", 0), done.stderr
