import pytest
import torch
import torch.nn.functional as F

from kernels.ops import sparse_ffn
from kernels.reference import ffn_backward, ffn_forward


def problem(gated: bool, shape=(3, 7), d=5, h=11, dtype=torch.float64, masked=False, seed=0):
    """(x, w_gate, w_up, w_down), counted; the weights require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = leaf(*shape, d), leaf(h, d) if gated else None, leaf(h, d), leaf(h, d)
    return tensors, torch.rand(*shape, generator=generator) < 0.6 if masked else None


def assert_same(results, expected, **tolerance):
    for result, want in zip(results, expected, strict=True):
        torch.testing.assert_close(result, want, **tolerance)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dl1", [0.0, 0.3])
def test_written_out_backward_agrees_with_autograd(gated, masked, dl1):
    tensors, counted = problem(gated, masked=masked)
    out = ffn_forward(*tensors, counted)
    dy = torch.randn_like(out.y)
    leaves = [t for t in tensors if t is not None]
    expected = torch.autograd.grad((out.y * dy).sum() + dl1 * out.l1, leaves)
    gradients = [t for t in ffn_backward(*tensors, dy, dl1, counted) if t is not None]
    assert_same(gradients, expected)


@pytest.mark.parametrize("gated", [True, False])
def test_forward_against_one_token_at_a_time(gated):
    tensors, counted = problem(gated, shape=(6,), masked=True)
    x, w_gate, w_up, w_down = (None if t is None else t.detach() for t in tensors)
    y, l1, fired = [], 0.0, torch.zeros(len(w_up), dtype=torch.int32)
    for t in range(len(x)):
        up = w_up @ x[t]
        gate = (w_gate @ x[t]).clamp(min=0) if gated else up.clamp(min=0)
        a = gate * up if gated else gate
        y.append(sum(a[j] * w_down[j] for j in range(len(a))))
        if counted[t]:
            l1 += a.abs().sum()
            fired += gate > 0
    out = ffn_forward(x, w_gate, w_up, w_down, counted)
    assert_same((out.y, out.l1), (torch.stack(y), l1))
    assert torch.equal(out.fired, fired)
    gate = F.linear(x, w_gate if gated else w_up)
    assert torch.equal(out.nnz, (gate > 0).sum(-1).int())  # uncounted tokens included


def test_shapes_and_dtypes():
    tensors, counted = problem(True, dtype=torch.bfloat16, masked=True)
    out = sparse_ffn(*tensors, counted=counted)
    assert (out.y.shape, out.y.dtype) == ((3, 7, 5), torch.bfloat16)
    assert (out.l1.shape, out.l1.dtype) == ((), torch.float32)
    assert (out.nnz.shape, out.nnz.dtype) == ((21,), torch.int32)
    assert (out.fired.shape, out.fired.dtype) == ((11,), torch.int32)
    assert not out.nnz.requires_grad
    assert out.fired.sum() == out.nnz[counted.flatten()].sum()
    for gradient, tensor in zip(ffn_backward(*tensors, out.y.detach(), 0.1, counted), tensors):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)


def test_counts_are_exact_in_low_precision():
    x, weight = torch.ones(700, 1, dtype=torch.bfloat16), torch.ones(300, 1, dtype=torch.bfloat16)
    out = ffn_forward(x, weight, weight, weight)
    assert out.nnz.unique().tolist() == [300]  # bf16 itself would count to 256
    assert out.fired.unique().tolist() == [700]
    assert out.l1 == 700 * 300


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_only_itself(bad):
    tensors, _ = problem(True, shape=(4,))
    clean = ffn_forward(*tensors)
    x = tensors[0].detach().clone()
    x[2, 1] = bad
    counted = torch.tensor([True, True, False, True])
    out = ffn_forward(x, *tensors[1:], counted)
    assert not out.y[2].isfinite().all()
    assert torch.equal(out.y[counted], clean.y[counted])
    assert out.l1.isfinite()  # it was not counted
    dx = ffn_backward(x, *tensors[1:], torch.ones_like(x), 0.1, counted).x
    assert not dx[2].isfinite().all()
    assert dx[counted].isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,), (2, 3, 4)])
def test_any_batch_shape(shape):
    tensors, _ = problem(True, shape=shape)
    out = sparse_ffn(*tensors)
    (out.y.sum() + out.l1).backward()
    assert out.y.shape == (*shape, 5)
    assert all(t.grad.shape == t.shape for t in tensors)


@pytest.mark.parametrize("gated", [True, False])
def test_all_neurons_dead(gated):
    tensors, _ = problem(gated)
    x = tensors[0].detach().abs()
    weights = [None if t is None else -t.detach().abs() for t in tensors[1:]]
    out = sparse_ffn(x, *weights)
    assert not out.y.any() and not out.l1 and not out.nnz.any() and not out.fired.any()
    gradients = ffn_backward(x, *weights, torch.ones_like(x), 1.0)
    assert not any(g.any() for g in gradients if g is not None)


def test_compiles_without_a_graph_break():
    tensors, counted = problem(True, dtype=torch.float32, masked=True)

    def loss(x, w_gate, w_up, w_down):
        out = sparse_ffn(x, w_gate, w_up, w_down, counted=counted)
        return out.y.square().sum() + 0.1 * out.l1, out.nnz, out.fired

    expected = loss(*tensors)
    result = torch.compile(loss, fullgraph=True, backend="aot_eager")(*tensors)
    assert_same(result, expected)
    assert_same(torch.autograd.grad(result[0], tensors), torch.autograd.grad(expected[0], tensors))


def test_autocast_computes_in_low_precision():
    tensors, _ = problem(True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = sparse_ffn(*tensors)
    assert out.y.dtype == torch.bfloat16
    assert out.l1.dtype == torch.float32
    torch.testing.assert_close(out.y.float(), ffn_forward(*tensors).y, rtol=0.05, atol=0.2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"impl": "cuda"}, "impl='cuda' is not one of auto, triton, torch"),
        ({"x": torch.zeros(5)}, r"x must be \[..., tokens, d\], got shape \(5,\)"),
        ({"w_gate": torch.zeros(5, 11)}, r"w_gate has shape \(5, 11\).*must be \(11, 5\)"),
        ({"w_down": torch.zeros(5, 11)}, r"w_down has shape \(5, 11\).*row j is neuron j"),
        ({"counted": torch.ones(3, 7)}, r"counted must be bool of shape \(3, 7\), got torch.float32"),
        (
            {"counted": torch.ones(7, dtype=torch.bool)},
            r"counted must be bool of shape \(3, 7\), got torch.bool \(7,\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    x, w_gate, w_up, w_down = problem(True)[0]
    arguments = {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down} | change
    with pytest.raises(ValueError, match=message):
        sparse_ffn(**arguments)
