"""The FFN of a few tokens: every pattern, width and number of tokens against the reference."""

import pytest
import torch

from kernels.decode import MAX_TOKENS, SPLITS, decode_ffn
from kernels.reference import ffn_forward
from tests.kernels.ffn_cases import FLOOR, PATTERNS, Case, make_case, relative_error


def assert_close(case: Case) -> None:
    """As close to fp64 as twice the distance of the dense product in the same dtype."""
    inputs = case.tensors
    y = decode_ffn(*inputs)
    dense, exact = ffn_forward(*inputs).y, ffn_forward(*(None if t is None else t.double() for t in inputs)).y
    assert (y.shape, y.dtype) == (dense.shape, dense.dtype) and not y.isnan().any()
    assert relative_error(y, exact) <= max(2 * relative_error(dense, exact), FLOOR[y.dtype])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern, gated, device):
    assert_close(make_case(5, 72, 200, pattern, gated=gated, device=device))


@pytest.mark.parametrize("n", [1, 2, 16, 17, 33, MAX_TOKENS])
def test_numbers_of_tokens(n, device):
    assert_close(make_case(n, 40, 150, "1 %", device=device))


@pytest.mark.parametrize("d, h", [(8, 1), (24, 31), (130, 33), (40, 1100)])
def test_widths_that_divide_by_little(d, h, device):
    """The last has more than one group of blocks, whose numbers differ."""
    case = make_case(3, d, h, "50 %", device=device)
    case.w_gate[h // 3 : h // 2, 0] = -40.0  # nothing fires there
    assert_close(case)


@pytest.mark.parametrize("gated", [True, False])
def test_half_precision(gated, device):
    assert_close(make_case(9, 24, 70, "1 %", gated=gated, device=device, dtype=torch.float16))


def test_any_batch_shape_and_strides(device):
    case = make_case(6, 40, 70, "50 %", device=device)
    expected = ffn_forward(*case.tensors).y
    x = torch.empty(40, 2, 3, device=device).permute(1, 2, 0).copy_(case.x.view(2, 3, 40))
    weights = [w.T.contiguous().T for w in case.tensors[1:]]
    torch.testing.assert_close(decode_ffn(x, *weights), expected.view(2, 3, 40), rtol=1e-4, atol=1e-4)


def test_a_token_does_not_depend_on_the_others_and_runs_repeat(device):
    case = make_case(7, 40, 150, "50 %", device=device)
    together = decode_ffn(*case.tensors)
    assert torch.equal(together, decode_ffn(*case.tensors))
    alone = torch.cat([decode_ffn(case.x[i : i + 1], *case.tensors[1:]) for i in range(7)])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 5])
def test_a_broken_token_breaks_alone_and_as_in_the_dense_product(column, bad, gated, device):
    case = make_case(4, 40, 70, "1 %", gated=gated, device=device)
    case.x[2, column] = bad
    y, dense = decode_ffn(*case.tensors), ffn_forward(*case.tensors).y
    assert torch.equal(y.isfinite(), dense.isfinite())
    sound = [0, 1, 3]
    torch.testing.assert_close(y[sound], dense[sound], rtol=1e-4, atol=1e-4)


def test_compiles_without_graph_breaks(device):
    case = make_case(3, 24, 40, "50 %", device=device)
    f = torch.compile(lambda *inputs: decode_ffn(*inputs) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(f(*case.tensors), decode_ffn(*case.tensors) + 1)


def test_the_operator_is_sound(device):
    case = make_case(3, 24, 40, "50 %", device=device)
    assert torch.ops.twell.decode_ffn(*case.tensors).shape == (SPLITS, 3, 24)
    torch.library.opcheck(torch.ops.twell.decode_ffn, case.tensors)


def test_refuses_too_many_tokens_and_wrong_shapes(device):
    case = make_case(4, 24, 40, "1 %", device=device)
    x, *weights = case.tensors
    for n in (0, MAX_TOKENS + 1):
        with pytest.raises(ValueError, match=f"1 to 64 tokens, not {n}: use sparse_ffn"):
            decode_ffn(x.new_zeros(n, 24), *weights)
    with pytest.raises(ValueError, match=r"w_down \(24, 40\) must all be \(h, 24\)"):
        decode_ffn(x, weights[0], weights[1], weights[2].T)
