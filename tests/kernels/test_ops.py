"""`sparse_ffn(impl="triton")` against fp64: in the interpreter on a machine without a GPU, hence the small sizes."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernels.autograd import apply, forward_pass
from kernels.ops import sparse_ffn
from kernels.state import FFNState
from tests.kernels.ffn_cases import DL1, PATTERNS, Case, assert_accurate, differentiate, make_case, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, when the interpreter meets NaN


def triton_run(case: Case):
    return run(case, impl="triton")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern, gated, device):
    case = make_case(3, 24, 70, pattern, gated=gated, device=device)
    assert_accurate(case, *triton_run(case))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n, d, h", [(1, 16, 32), (2, 17, 33), (7, 5, 1), (33, 20, 64), (40, 16, 65)])
def test_odd_sizes(n, d, h, gated, device):
    case = make_case(n, d, h, "1 %" if n > 32 else "50 %", gated=gated, device=device, masked=True)
    assert_accurate(case, *triton_run(case))


@pytest.mark.parametrize("gated", [True, False])
def test_half_precision(gated, device):
    case = make_case(9, 24, 70, "1 %", gated=gated, device=device, dtype=torch.float16)
    assert_accurate(case, *triton_run(case))


def test_a_token_far_heavier_than_the_rest(device):
    case = make_case(4, 16, 200, "one token", device=device, masked=True)  # 200 entries: several pieces of a long row
    output, gradients = triton_run(case)
    assert output.nnz.tolist() == [0, 0, 200, 0]
    assert_accurate(case, output, gradients)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (2, 1, 3)])
def test_batch_shapes(shape, device):
    case = make_case(6, 16, 40, "50 %", device=device)
    x = case.x[: torch.Size(shape).numel()].view(*shape, 16).requires_grad_()
    output = sparse_ffn(x, *case.tensors[1:], impl="triton")
    expected = sparse_ffn(x, *case.tensors[1:], impl="torch")
    assert output.y.shape == x.shape
    torch.testing.assert_close(output, expected)
    (gradient,) = torch.autograd.grad(output.y.sum(), x)
    assert gradient.shape == x.shape


def test_strided_inputs(device):
    case = make_case(4, 16, 40, "50 %", device=device)
    strided = Case(
        case.x.repeat_interleave(2, 0)[::2],
        case.w_gate.T.contiguous().T,
        case.w_up.repeat(1, 2)[:, :16],
        case.w_down.T.contiguous().T,
        case.dy[:1].expand(4, 16),
    )
    case.dy = strided.dy.contiguous()
    expected = triton_run(case)
    torch.testing.assert_close(triton_run(strided), expected, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 5])  # 0 carries the biases: an infinity there silences or fires all neurons
@pytest.mark.parametrize("gated", [True, False])
def test_a_bad_token_spoils_only_itself(bad, column, gated, device):
    case = make_case(5, 16, 40, "1 %", gated=gated, device=device)
    clean_output, clean = triton_run(case)
    case.x[3, column] = bad
    output, gradients = triton_run(case)
    others = torch.tensor([0, 1, 2, 4], device=device)
    assert not output.y[3].isfinite().all()
    if column != 0 or bad != bad:  # an infinity that silences every neuron is told by y alone
        assert not gradients.x[3].isfinite().all()
    assert torch.equal(output.y[others], clean_output.y[others])
    assert torch.equal(gradients.x[others], clean.x[others])


def test_bad_gradients_stay_visible(device):
    case = make_case(4, 16, 40, "50 %", device=device)
    case.dy[1, 2] = float("nan")
    _, gradients = triton_run(case)
    assert gradients.x.isfinite().all(1).tolist() == [True, False, True, True]
    assert not gradients.w_down.isfinite().all()


def test_repeats_bit_for_bit(device):
    case = make_case(2, 16, 150, "50 %", device=device, masked=True)  # long rows, cut in pieces
    first, second = triton_run(case), triton_run(case)
    for one, other in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(one, other)


def test_without_gradients(device):
    case = make_case(3, 16, 70, "50 %", device=device, masked=True)
    expected, _ = triton_run(case)
    with torch.no_grad():
        output = sparse_ffn(*case.tensors, counted=case.counted, impl="triton")
    assert not output.y.requires_grad
    torch.testing.assert_close(output, expected)


def test_without_statistics(device):
    """Dense and sparse; a layer that was never measured measures all the same, or it would stay dense for ever."""
    case = make_case(9, 24, 70, "1 %", device=device)
    expected = run(case, impl="torch")[0].y
    state = FFNState(70, device)
    for impl in ("auto", "triton"):
        y = sparse_ffn(*case.tensors, impl=impl, state=state, stats=False).y
        torch.testing.assert_close(y, expected)
    x, *weights = case.tensors
    state = FFNState(70, device)
    y, *_ = forward_pass(
        x, *weights, None, None, state.handle, False, False, False
    )  # what auto does on a GPU: dense at first
    torch.testing.assert_close(y, expected)
    assert state.seen.numbers[0] == 1


@pytest.mark.parametrize("frozen", [(0,), (1, 2, 3), (3,)])
def test_only_some_inputs_need_gradients(frozen, device):
    case = make_case(4, 16, 40, "50 %", device=device)
    expected = [g for i, g in enumerate(triton_run(case)[1]) if i not in frozen]
    tensors = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(case.tensors)]
    output = sparse_ffn(*tensors, impl="triton")
    results = differentiate(output, [t for t in tensors if t.requires_grad], case.dy)
    torch.testing.assert_close(results, tuple(expected))


def test_l1_alone_or_y_alone(device):
    case = make_case(4, 16, 40, "50 %", device=device)
    for name in ("y", "l1"):
        results = {}
        for impl in ("triton", "torch"):
            w_up = case.w_up.detach().requires_grad_()
            output = sparse_ffn(case.x, case.w_gate, w_up, case.w_down, impl=impl)
            (results[impl],) = torch.autograd.grad(getattr(output, name).sum(), w_up)
        torch.testing.assert_close(results["triton"], results["torch"], rtol=1e-4, atol=1e-5)


def test_one_weight_used_twice(device):
    """Two layers share their weights, and the up weight serves as the down weight too: gradients add up."""
    case = make_case(4, 16, 40, "50 %", device=device)
    results = {}
    for impl in ("triton", "torch"):
        w_gate, w = (t.detach().requires_grad_() for t in (case.w_gate, 0.1 * case.w_up))
        hidden = sparse_ffn(case.x, w_gate, w, w, impl=impl).y
        output = sparse_ffn(hidden, w_gate, w, w, impl=impl)
        results[impl] = torch.autograd.grad(output.y.sum() + DL1 * output.l1, (w_gate, w))
    torch.testing.assert_close(results["triton"], results["torch"], rtol=1e-4, atol=1e-4)


def test_under_checkpointing(device):
    case = make_case(4, 16, 40, "50 %", device=device)
    _, expected = triton_run(case)
    leaves = [t.detach().requires_grad_() for t in case.tensors]
    output = checkpoint(lambda *tensors: sparse_ffn(*tensors, impl="triton"), *leaves, use_reentrant=False)
    torch.testing.assert_close(differentiate(output, leaves, case.dy), tuple(expected))


def test_compiles_without_a_graph_break(device):
    case = make_case(4, 16, 40, "50 %", device=device, masked=True)
    expected_output, expected = triton_run(case)
    leaves = [t.detach().requires_grad_() for t in case.tensors]
    compiled = torch.compile(sparse_ffn, fullgraph=True, backend="aot_eager")
    output = compiled(*leaves, counted=case.counted, impl="triton")
    torch.testing.assert_close(output, expected_output)
    torch.testing.assert_close(differentiate(output, leaves, case.dy), tuple(expected))


def test_triton_refuses_what_it_cannot_do(device):
    case = make_case(4, 16, 40, "50 %", device=device, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"impl=triton.*float64"):
        triton_run(case)
    assert_accurate(case, *run(case, impl="auto"))


def test_dtypes_and_devices_must_agree_and_a_state_must_fit(device):
    x, w_gate, w_up, w_down = make_case(4, 16, 40, "50 %", device=device).tensors
    with pytest.raises(ValueError, match=r"w_down is torch.float16 on .*, w_up torch.float32"):
        sparse_ffn(x, w_gate, w_up, w_down.half(), impl="triton")
    with pytest.raises(ValueError, match=r"x is torch.float16 on .*, the weights torch.float32"):
        sparse_ffn(x.half(), w_gate, w_up, w_down, impl="torch")
    with pytest.raises(ValueError, match=r"x is torch.float32 on .*, the weights torch.float32 on meta"):
        sparse_ffn(x, *(w.to("meta") for w in (w_gate, w_up, w_down)))
    with pytest.raises(ValueError, match="state is of a layer with 48 neurons, w_up has 40"):
        sparse_ffn(x, w_gate, w_up, w_down, impl="triton", state=FFNState(48, device))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("route", ["sparse", "dense", "torch"])
def test_a_residual_is_added(route, gated, device):
    case = make_case(6, 16, 200, "50 %", gated=gated, device=device)  # long rows
    leaves = [None if t is None else t.detach().requires_grad_() for t in case.tensors]
    residual = torch.randn_like(case.x).requires_grad_()
    if route == "dense":
        y = apply(*leaves, None, residual, None, False, True, True)[0]
    else:
        impl = "torch" if route == "torch" else "triton"
        y = sparse_ffn(*leaves, residual=residual, impl=impl).y
    torch.testing.assert_close(y, residual + sparse_ffn(*leaves, impl="torch").y, rtol=1e-4, atol=1e-4)
    wanted = [t for t in leaves if t is not None]
    d_residual, *gradients = torch.autograd.grad(y, [residual, *wanted], case.dy)
    assert torch.equal(d_residual, case.dy)
    expected = torch.autograd.grad(sparse_ffn(*leaves, impl="torch").y, wanted, case.dy)
    torch.testing.assert_close(gradients, list(expected), rtol=1e-4, atol=1e-4)


def test_a_residual_must_look_like_the_output(device):
    case = make_case(4, 16, 40, "50 %", device=device)
    with pytest.raises(ValueError, match=r"residual must have the shape of x, \(4, 16\), got \(4, 8\)"):
        sparse_ffn(*case.tensors, residual=case.dy[:, :8], impl="triton")
    with pytest.raises(ValueError, match=r"residual is torch.float16 on .*, but y torch.float32"):
        sparse_ffn(*case.tensors, residual=case.dy.half(), impl="torch")


@pytest.mark.parametrize("force", [True, False])
def test_a_second_derivative_is_refused(force, device):
    case = make_case(4, 16, 40, "50 %", device=device)
    leaves = [t.detach().requires_grad_() for t in case.tensors]
    y = apply(*leaves, None, None, None, force, True, True)[0]
    dy = case.dy.requires_grad_()
    (dx,) = torch.autograd.grad(y, leaves[0], dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("route", ["sparse", "dense"])
def test_operator_is_registered_properly(gated, route, device):
    case = make_case(2, 8, 20, "50 %", gated=gated, device=device, masked=True)
    tensors = [None if t is None else t.detach().requires_grad_() for t in case.tensors]
    state = FFNState(20, device)
    residual = case.dy.clone().requires_grad_()
    arguments = (*tensors, case.counted.view(torch.int8), residual, state.handle, route == "sparse", True, True)
    torch.library.opcheck(torch.ops.twell.ffn_forward.default, arguments)
