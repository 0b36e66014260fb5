"""`sparse_ffn(impl="triton")` on a GPU: model-sized shapes, every dtype, and what an interpreter cannot show."""

import pytest
import torch

from kernels.ops import sparse_ffn
from kernels.reference import FFNGradients, ffn_forward
from kernels.state import FFNState, overflowed, update
from kernels.synthetic import FiringLaw, Problem
from tests.kernels.ffn_cases import PATTERNS, Case, assert_accurate, differentiate, make_case, run

DEVICE = "cuda"
SHAPES = [(768, 2048), (1536, 5504), (2048, 5632), (3072, 11008)]


def triton_run(case: Case):
    return run(case, impl="triton")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("d, h", SHAPES)
def test_patterns(d, h, pattern, gated):
    case = make_case(1000, d, h, pattern, gated=gated, dtype=torch.bfloat16, device=DEVICE, masked=True)
    assert_accurate(case, *triton_run(case))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 4097])
@pytest.mark.parametrize("pattern", ["1 %", "50 %"])
def test_numbers_of_tokens(n, pattern, gated):
    case = make_case(n, 768, 2048, pattern, gated=gated, dtype=torch.bfloat16, device=DEVICE)
    assert_accurate(case, *triton_run(case))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("d, h", [(8, 1), (72, 100), (264, 1000), (1000, 2050)])
def test_widths_that_divide_by_little(d, h, gated):
    case = make_case(130, d, h, "1 %", gated=gated, dtype=torch.bfloat16, device=DEVICE)
    assert_accurate(case, *triton_run(case))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("pattern", ["one token", "1 %", "50 %"])
def test_dtypes(dtype, pattern, gated):
    case = make_case(513, 768, 2048, pattern, gated=gated, dtype=dtype, device=DEVICE)
    assert_accurate(case, *triton_run(case))


@pytest.mark.parametrize("law", [FiringLaw(30), FiringLaw(30, token_sigma=1.0), FiringLaw(400, token_sigma=0.6)])
def test_realistic_firing(law):
    problem = Problem(law, 1024, 2816, device=DEVICE)
    x, dy = problem.batch(4096, 0)
    case = Case(x, *problem.weights, dy)
    assert_accurate(case, *triton_run(case))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 5])
@pytest.mark.parametrize("gated", [True, False])
def test_a_bad_token_spoils_only_itself(bad, column, gated):
    case = make_case(300, 768, 2048, "1 %", gated=gated, dtype=torch.bfloat16, device=DEVICE)
    clean_output, clean = triton_run(case)
    case.x[77, column] = bad
    output, gradients = triton_run(case)
    others = torch.arange(300, device=DEVICE) != 77
    assert not output.y[77].isfinite().all()
    if column != 0 or bad != bad:  # an infinity that silences every neuron is told by y alone
        assert not gradients.x[77].isfinite().all()
    assert torch.equal(output.y[others], clean_output.y[others])
    assert torch.equal(gradients.x[others], clean.x[others])


def test_strided_inputs():
    case = make_case(130, 768, 2048, "1 %", dtype=torch.bfloat16, device=DEVICE)
    strided = Case(
        case.x.repeat_interleave(2, 0)[::2],
        case.w_gate.T.contiguous().T,
        case.w_up.repeat(1, 2)[:, :768],
        case.w_down.T.contiguous().T,
        case.dy[:1].expand(130, 768),
    )
    case.dy = strided.dy.contiguous()
    torch.testing.assert_close(triton_run(strided), triton_run(case), rtol=0, atol=0)


@pytest.mark.parametrize("pattern", ["1 %", "one token", "50 %"])
def test_repeats_bit_for_bit(pattern):
    case = make_case(4097, 768, 2048, pattern, dtype=torch.bfloat16, device=DEVICE)
    first = [t.clone() for part in triton_run(case) for t in part]
    for _ in range(5):
        again = [t for part in triton_run(case) for t in part]
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("gated", [True, False])
def test_offsets_beyond_31_bits(gated):
    n, d, h, tail = 400_000, 256, 11008, 300  # n * h = 4.4e9
    assert n * h > 2**32
    case = make_case(n, d, h, "0.1 %", gated=gated, dtype=torch.bfloat16, device=DEVICE)
    output, gradients = triton_run(case)
    last = Case(case.x[-tail:], *case.tensors[1:], case.dy[-tail:])
    last_output, last_gradients = triton_run(last)
    assert_accurate(last, last_output, last_gradients)
    assert torch.equal(output.y[-tail:], last_output.y)
    assert torch.equal(gradients.x[-tail:], last_gradients.x)
    assert torch.equal(output.nnz[-tail:], last_output.nnz)
    first = ffn_forward(case.x[:tail], *case.tensors[1:])
    assert torch.equal(output.nnz[:tail], first.nnz)


def test_compiled_like_eager():
    case = make_case(1000, 768, 2048, "1 %", dtype=torch.bfloat16, device=DEVICE, masked=True)
    expected_output, expected = triton_run(case)
    leaves = [t.detach().requires_grad_() for t in case.tensors]
    output = torch.compile(sparse_ffn, fullgraph=True)(*leaves, counted=case.counted, impl="triton")
    torch.testing.assert_close(output, expected_output)
    torch.testing.assert_close(differentiate(output, leaves, case.dy), tuple(expected))


def test_autocast():
    case = make_case(1000, 768, 2048, "1 %", device=DEVICE)
    low = Case(*(t.bfloat16() for t in case.tensors), case.dy.bfloat16())
    expected_output, expected = triton_run(low)
    leaves = [t.detach().requires_grad_() for t in case.tensors]
    with torch.autocast("cuda", torch.bfloat16):
        output = sparse_ffn(*leaves, impl="triton")
    assert output.y.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected_output)
    gradients = differentiate(output, leaves, low.dy)
    assert all(g.dtype == torch.float32 for g in gradients)
    torch.testing.assert_close(gradients, tuple(t.float() for t in expected))


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("mean", [30, 1000])
def test_never_waits_for_the_device(impl, mean):
    problem = Problem(FiringLaw(mean), 1024, 2816, device=DEVICE)
    state = FFNState(2816, DEVICE)
    batches = [Case(x, *problem.weights, dy) for x, dy in (problem.batch(4096, number) for number in range(3))]
    for _ in range(2):
        for case in batches[:2]:
            run(case, impl=impl, state=state)
        update([state])
    run(batches[2], impl=impl, state=state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, gradients = run(batches[2], impl=impl, state=state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not overflowed([state])
    assert_accurate(batches[2], output, gradients)


def test_a_compiled_layer_changes_its_route_without_recompiling():
    problem = Problem(FiringLaw(20), 1024, 2816, device=DEVICE)
    state = FFNState(2816, DEVICE)
    state.captured = True  # a slow host is no reason to stay dense here
    x, dy = problem.batch(16384, 0)
    case = Case(x, *problem.weights, dy)
    compiled = torch.compile(sparse_ffn, fullgraph=True)
    routes = []
    for _ in range(3):
        leaves = [t.detach().requires_grad_() for t in case.tensors]
        with torch._dynamo.config.patch(error_on_recompile=bool(routes)):
            output = compiled(*leaves, state=state)
        gradients = FFNGradients(*differentiate(output, leaves, dy))
        assert_accurate(case, output, gradients)
        routes.append(state.decision.rate is not None)
        update([state])
    assert routes == [False, True, True]
    assert not overflowed([state])


@pytest.mark.parametrize("packing", ["bitmap", "twell"])
@pytest.mark.parametrize("mean", [30, 1000])
def test_a_captured_step_repeats_the_launched_one(packing, mean):
    problem = Problem(FiringLaw(mean, token_sigma=0.6), 1024, 2816, device=DEVICE)
    state = FFNState(2816, DEVICE, packing)
    state.captured = True
    x, dy = problem.batch(4096, 0)
    case = Case(x, *problem.weights, dy)
    for _ in range(4):
        run(case, state=state)
        update([state])
    output, gradients = run(case, state=state)
    assert_accurate(case, output, gradients)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_output, captured_gradients = run(case, state=state)
    graph.replay()
    assert not overflowed([state])
    assert torch.equal(captured_output.y, output.y) and torch.equal(captured_output.fired, output.fired)
    assert all(torch.equal(one, other) for one, other in zip(captured_gradients, gradients))


def test_little_is_held_for_backward():
    """A step at nnz 30 holds for its backward a small part of what dense torch holds."""
    problem = Problem(FiringLaw(30), 2048, 5632, device=DEVICE)
    x, dy = problem.batch(16384, 0)
    state = FFNState(5632, DEVICE)
    case = Case(x, *problem.weights, dy)
    for _ in range(2):
        run(case, impl="triton", state=state)
        update([state])
    leaves = [t.detach().requires_grad_() for t in case.tensors]
    before = torch.cuda.memory_allocated()
    output = sparse_ffn(*leaves, impl="triton", state=state)
    held = torch.cuda.memory_allocated() - before - output.y.numel() * 2
    assert held < 90e6
