"""`decode_ffn` on a GPU: model-sized shapes, every dtype, and inside a CUDA graph."""

import pytest
import torch

from kernels.decode import MAX_TOKENS, decode_ffn
from kernels.reference import ffn_forward
from kernels.synthetic import FiringLaw, Problem
from tests.kernels.ffn_cases import PATTERNS, make_case
from tests.kernels.test_decode import assert_close

DEVICE = "cuda"


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n", [1, 3, 16, 31, MAX_TOKENS])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern, n, gated):
    assert_close(make_case(n, 2048, 5632, pattern, gated=gated, dtype=torch.bfloat16, device=DEVICE))


@pytest.mark.parametrize("d, h", [(8, 1), (264, 1000), (1000, 2050), (768, 2048), (4096, 14336)])
def test_widths(d, h):
    assert_close(make_case(5, d, h, "1 %", dtype=torch.bfloat16, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 20, MAX_TOKENS])
def test_dtypes(n, dtype):
    assert_close(make_case(n, 768, 2048, "1 %", dtype=dtype, device=DEVICE))


def test_in_a_cuda_graph_it_follows_its_inputs():
    problem = Problem(FiringLaw(30), 1024, 2816, device=DEVICE)
    x = problem.batch(8, 0)[0].clone()
    decode_ffn(x, *problem.weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_ffn(x, *problem.weights)
    for number in range(1, 4):
        x.copy_(problem.batch(8, number)[0])
        graph.replay()
        assert torch.equal(y, decode_ffn(x, *problem.weights))
        expected = ffn_forward(x, *problem.weights).y
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_compiled():
    problem = Problem(FiringLaw(30), 1024, 2816, device=DEVICE)
    x = problem.batch(8, 0)[0]
    compiled = torch.compile(lambda x, *weights: x + decode_ffn(x, *weights), fullgraph=True)
    torch.testing.assert_close(compiled(x, *problem.weights), x + decode_ffn(x, *problem.weights), rtol=2e-2, atol=2e-2)
