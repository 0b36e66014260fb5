"""The parts of a step on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.training import compose_config
from tests.twell.small import batch, build
from twell import memory
from twell.errors import UserError
from twell.model import Transformer
from twell.routing import Routing
from twell.weights import Weights

GPU = torch.device("cuda", 0)


def test_masters_add_up_bf16_gradients_exactly():
    model = build(dtype=torch.bfloat16).to(GPU)
    weights = Weights(model, torch.bfloat16)
    sums = {name: torch.zeros_like(master) for name, master in weights.masters.items()}
    for seed in range(3):
        tokens, targets = (t.to(GPU) for t in batch(seed=seed))
        model(tokens, targets).loss_sum.backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.float()
        weights.begin(last=seed == 2)
        weights.accumulate()
    for name, master in weights.masters.items():
        assert torch.equal(master.grad, sums[name]), name
    with torch.no_grad():
        weights.masters["norm.weight"] += 1e-4
    weights.refresh()
    for name, p in model.named_parameters():
        assert torch.equal(p, weights.masters[name].bfloat16()), name


def gradients(model: Transformer) -> Tensor:
    """All of them in one row, fp32."""
    tokens, targets = (t.to(GPU) for t in batch())
    out = model(tokens, targets)
    (out.loss_sum + 0.1 * out.l1_sum.sum()).backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters()])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", ["dense_silu", "sparse", "sparse_nongated"])
def test_layers_share_one_compilation_and_recomputation_is_as_exact(kind: str, recompute: str):
    shape = {"d_model": 96, "d_ff": 128, "n_layers": 4}
    counters = torch._dynamo.utils.counters
    exact = gradients(build(kind, **shape).to(GPU))
    errors, graphs = [], []
    for how in (recompute, "none"):
        torch._dynamo.reset()
        counters.clear()
        model = build(kind, dtype=torch.bfloat16, **shape).to(GPU)
        model.recompute = how
        Weights(model, torch.bfloat16)
        Routing(model, GPU, torch.bfloat16)
        model.compile_parts()
        errors.append(((gradients(model) - exact).norm() / exact.norm()).item())
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [2 if recompute == "selective" else 1, 1]  # a block or its halves
    # Fused differently, a block rounds to bf16 elsewhere: other errors, but no larger ones.
    assert errors[0] < 1.3 * errors[1] < 0.15


def test_running_out_of_memory_is_explained():
    with pytest.raises(UserError, match=r"GiB asked for, .* free, .* GiB in use by tensors .* try batch.micro="):
        with memory.explain_out_of_memory(compose_config(), GPU):
            torch.empty(1 << 50, dtype=torch.int8, device=GPU)
