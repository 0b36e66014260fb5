"""FFN problems with chosen firing patterns, and the comparison of `sparse_ffn` with fp64 that all tests of it share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import FFNOutput, sparse_ffn
from kernels.reference import FFNGradients, ffn_backward, ffn_forward

DL1 = 0.2  # gradient of the L1 sum
# Errors not worth telling. In fp32 those of the order of summation: a neuron that just fires has a pre-activation near
# zero, of which the terms that cancelled leave a larger relative error.
FLOOR = {torch.float64: 1e-14, torch.float32: 5e-6, torch.float16: 7e-4, torch.bfloat16: 5e-3}
ON, OFF = 40.0, -40.0  # biases far outside what the rest of a pre-activation reaches

PATTERNS = ("none", "one token", "one neuron", "one neuron always", "0.1 %", "1 %", "50 %", "all")


@dataclass
class Case:
    x: Tensor  # [n, d]
    w_gate: Tensor | None  # [h, d]
    w_up: Tensor
    w_down: Tensor
    dy: Tensor  # [n, d]
    counted: Tensor | None = None  # bool [n]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return self.x, self.w_gate, self.w_up, self.w_down


def make_case(
    n: int,
    d: int,
    h: int,
    pattern: str,
    *,
    gated: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    masked: bool = False,
    seed: int = 0,
) -> Case:
    """A problem whose neurons fire as `pattern` says: x[:, 0] = 1 gives every neuron its bias, x[:, 1] every token."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, firing, up, down, dy = normal(n, d), normal(h, d) / d**0.5, normal(h, d), normal(h, d), normal(n, d)
    x[:, 0], firing[:, 0] = 1, OFF
    x[:, 1], firing[:, 1] = 0, 1
    some_neuron, some_token = h * 2 // 3, n // 2
    if pattern == "one token" and n:
        x[some_token, 1] = ON - OFF
    elif pattern in ("one neuron", "one neuron always"):
        firing[some_neuron, 0] = 0 if pattern == "one neuron" else ON
    elif pattern == "all":
        firing[:, 0] = ON
    elif pattern.endswith("%"):
        share = torch.tensor(float(pattern.removesuffix(" %")) / 100, dtype=torch.float64)
        firing[:, 0] = torch.special.ndtri(share).item()
    weights = (firing, up) if gated else (None, firing)
    tensors = [None if t is None else t.to(dtype) for t in (x, *weights, down / h**0.5, dy)]
    counted = torch.rand(n, generator=generator, device=device) < 0.6 if masked else None
    return Case(*tensors, counted)


def run(case: Case, **kwargs) -> tuple[FFNOutput, FFNGradients]:
    """`sparse_ffn` forward and backward."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in case.tensors]
    output = sparse_ffn(*leaves, counted=case.counted, **kwargs)
    gradients = iter(differentiate(output, [t for t in leaves if t is not None], case.dy))
    return output, FFNGradients(*(None if t is None else next(gradients) for t in leaves))


def differentiate(output: FFNOutput, leaves: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((output.y, output.l1), leaves, (dy, torch.full_like(output.l1, DL1)))


def relative_error(result: Tensor, exact: Tensor) -> float:
    difference, size = (result.double() - exact).norm().item(), exact.norm().item()
    return difference / size if size else difference


def assert_accurate(case: Case, output: FFNOutput, gradients: FFNGradients) -> None:
    """Output and every gradient at most twice as far from fp64 as dense torch in the same dtype; counts exact."""
    dense_output, dense_gradients = run(case, impl="torch")
    exact_inputs = [None if t is None else t.double() for t in case.tensors]
    exact_output = ffn_forward(*exact_inputs, case.counted)
    exact_gradients = ffn_backward(*exact_inputs, case.dy.double(), DL1, case.counted)

    triples = {
        name: (getattr(output, name), getattr(dense_output, name), getattr(exact_output, name)) for name in ("y", "l1")
    }
    triples |= {f"d{name}": t for name, *t in zip(FFNGradients._fields, gradients, dense_gradients, exact_gradients)}
    for name, (result, dense, exact) in triples.items():
        if exact is None:
            assert result is None
            continue
        assert (result.shape, result.dtype) == (dense.shape, dense.dtype), name
        assert not result.isnan().any(), f"{name} holds NaN"
        error, dense_error = relative_error(result, exact), relative_error(dense, exact)
        limit = max(2 * dense_error, FLOOR[case.x.dtype])
        assert error <= limit, f"{name}: relative error {error:.2e}, dense {dense_error:.2e}"
    assert_counts(case, output)


def assert_counts(case: Case, output: FFNOutput) -> None:
    """`nnz` and `fired`, but for pre-activations so close to zero that the order of a sum decides their sign."""
    w_firing = case.w_up if case.w_gate is None else case.w_gate
    z = F.linear(case.x.double(), w_firing.double())  # [n, h]
    counted = torch.ones(len(z), dtype=torch.bool, device=z.device) if case.counted is None else case.counted
    surely, perhaps = z > 1e-5, z > -1e-5
    assert (output.nnz >= surely.sum(1)).all() and (output.nnz <= perhaps.sum(1)).all()
    assert (output.fired >= surely[counted].sum(0)).all() and (output.fired <= perhaps[counted].sum(0)).all()
    assert (output.nnz.dtype, output.fired.dtype) == (torch.int32, torch.int32)
