"""The Triton path as torch operators: what torch.compile, autograd and DDP see of it.

Two custom operators, forward and backward, each opaque to the compiler. Which route a pass takes (sparse stages or
dense products) and how large its buffers are is read from the layer's state when the operator runs, not when it is
traced, so a layer that becomes sparse, or reorders its neurons, recompiles nothing. What backward needs travels in one
byte buffer whose size only the run knows: a data-dependent shape to the compiler.
"""

import functools

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import dense, sparse
from kernels.compact import RowsShape
from kernels.dispatch import Shape
from kernels.order import natural
from kernels.products import over_tokens
from kernels.state import Decision, FFNState
from kernels.summary import summarize

# A compiled graph may contain tensors whose size is known only when it runs (`memory` below). Without this, tracing
# stops there: an error with fullgraph=True.
torch._dynamo.config.capture_dynamic_output_shape_ops = True

DENSE, SPARSE = 0, 1


def _decision(state: FFNState | None, version: int | None, h: int, device: torch.device) -> Decision:
    if state is None:
        return _without_state(h, device)
    return state.decision if version is None else state.decisions[version]


@functools.cache
def _without_state(h: int, device: torch.device) -> Decision:
    order = natural(h, device)
    return Decision(0, order, order)


def _mask(counted: Tensor | None) -> Tensor | None:
    """The bool mask as the kernels read it."""
    return None if counted is None else counted.view(torch.int8)


def forward_pass(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, counted: Tensor | None, residual: Tensor | None,
    handle: Tensor | None, force: bool, save: bool, stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y [n, d], l1, nnz [n], fired [h], memory uint8, layout int64 [4] on the host) of contiguous x [n, d].

    residual [n, d] or None: added to y. handle: of the layer's FFNState, or None. force: the sparse route, whatever is
    predicted. save: a backward follows. Without stats, all but y may be undefined.
    """
    n, d = x.shape
    h = w_up.shape[0]
    counted = _mask(counted)
    state = None if handle is None else FFNState.of(handle)
    decision = _decision(state, None, h, x.device)
    shape = Shape(n, d, h, w_gate is not None, x.element_size())
    if state is not None and (save or state.shape is None):
        state.shape, state.dtype = shape, x.dtype
    seen = None if state is None else state.seen
    captured = state is not None and state.captured
    # A layer that was never measured would stay dense for ever if passes without statistics did not measure it.
    measures = stats or (state is not None and decision.room is None)
    if not force and not decision.runs_sparse(shape, save, x.device, x.dtype, captured):
        out = _dense_forward(x, w_gate, w_up, w_down, counted, residual, seen, save, measures)
        return *out, torch.tensor([DENSE, 0, 0, 0])
    room = None if decision.room is None else decision.room_for(n, h, save)
    sample = None if state is None or not save else state.new_sample(n)
    slots = decision.slots if room is not None and x.element_size() == 2 else 0
    out = sparse.forward(
        x, w_gate, w_up, w_down, counted, decision.order(save), room, seen, save, sample, slots, measures, residual
    )
    memory = out.memory if save else out.memory.new_empty(0)
    layout = torch.tensor([SPARSE, decision.version, out.shape.entries, out.shape.segments])
    return out.y, out.l1, out.rows.count, out.fired, memory, layout


def _dense_forward(x, w_gate, w_up, w_down, counted, residual, seen, save, stats):
    (n, _d), h, size = x.shape, w_up.shape[0], x.element_size()
    gated = w_gate is not None
    # Gated: pre-activations z and u, and a. Non-gated: a, made in place of z; its zeros are the pattern.
    parts = (3 if save else 2) if gated else 1
    memory = torch.empty(parts * n * h * size, dtype=torch.uint8, device=x.device)
    matrices = memory.view(x.dtype).view(parts, n, h)
    z, u, a = (matrices[0], matrices[1], matrices[-1]) if gated else (matrices[0], None, matrices[0])
    torch.mm(x, (w_gate if gated else w_up).T, out=z)
    if gated:
        torch.mm(x, w_up.T, out=u)
    count, fired, l1_parts = dense.activate(z, u, a, counted, stats)
    y = a @ w_down if residual is None else torch.addmm(residual, a, w_down)
    if stats:
        l1, fired = summarize(l1_parts, count, fired, counted, seen, None)
    else:
        l1 = l1_parts.new_empty(())
    return y, l1, count, fired, memory if save else memory.new_empty(0)


ffn_forward = torch.library.custom_op("twell::ffn_forward", forward_pass, mutates_args=())


@ffn_forward.register_fake
def _(x, w_gate, w_up, w_down, counted, residual, handle, force, save, stats):
    n, h = x.shape[0], w_up.shape[0]
    size = torch.library.get_ctx().new_dynamic_size()
    return (
        torch.empty_like(x), x.new_empty((), dtype=torch.float32), x.new_empty(n, dtype=torch.int32),
        x.new_empty(h, dtype=torch.int32), x.new_empty(size, dtype=torch.uint8),
        torch.empty(4, dtype=torch.int64, device="cpu"),
    )  # fmt: skip


def backward_pass(
    dy: Tensor, dl1: Tensor, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, counted: Tensor | None,
    handle: Tensor | None, count: Tensor, memory: Tensor, layout: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dw_gate, dw_up, dw_down); dw_gate is empty if non-gated."""
    h = w_up.shape[0]
    gated = w_gate is not None
    dy, counted = dy.contiguous(), _mask(counted)
    route, version, entries, segments = layout.tolist()
    if route == DENSE:
        dx, dw_gate, dw_up, dw_down = _dense_backward(dy, dl1, x, w_gate, w_up, w_down, counted, memory)
    else:
        state = None if handle is None else FFNState.of(handle)
        decision = _decision(state, version, h, x.device)
        order = decision.order(True)
        n, tiles = x.shape[0], sparse.cold_tiles(h, order)
        rows = RowsShape(n, h, tiles, entries, segments, gated).carve(memory, x.dtype, count)
        blocks = min(entries, n * tiles) if decision.room is None else decision.room_for(n, h, True).blocks
        seen = None if state is None else state.seen
        dx, dw_gate, dw_up, dw_down = sparse.backward(
            dy, dl1, x, w_gate, w_up, w_down, counted, order, blocks, seen, rows
        )
    return dx, dw_gate if gated else w_up.new_empty(0), dw_up, dw_down


def _dense_backward(dy, dl1, x, w_gate, w_up, w_down, counted, memory):
    n, h = x.shape[0], w_up.shape[0]
    gated = w_gate is not None
    matrices = memory.view(x.dtype).view(-1, n, h)
    z, u, a = (matrices[0], matrices[1], matrices[2]) if gated else (matrices[0], None, matrices[0])
    da = dy @ w_down.T
    du = torch.empty_like(da) if gated else None
    dense.activate_backward(z, u, da, du, dl1, counted)
    if not gated:
        return da @ w_up, None, over_tokens(da, x), over_tokens(a, dy)
    dx = (da @ w_gate).addmm_(du, w_up)
    return dx, over_tokens(da, x), over_tokens(du, x), over_tokens(a, dy)


ffn_backward = torch.library.custom_op("twell::ffn_backward", backward_pass, mutates_args=())


@ffn_backward.register_fake
def _(dy, dl1, x, w_gate, w_up, w_down, counted, handle, count, memory, layout):
    dw_gate = w_up.new_empty(0) if w_gate is None else torch.empty_like(w_gate)
    return torch.empty_like(x), dw_gate, torch.empty_like(w_up), torch.empty_like(w_down)


def _setup_context(ctx, inputs, output):
    x, w_gate, w_up, w_down, counted, _, handle, _, _, _ = inputs
    _, _, count, fired, memory, layout = output
    ctx.mark_non_differentiable(count, fired, memory, layout)
    ctx.set_materialize_grads(False)  # else backward would begin with a zero gradient as large as `memory`
    ctx.save_for_backward(x, w_gate, w_up, w_down, counted, handle, count, memory, layout)


def _gradients(ctx, dy: Tensor | None, dl1: Tensor | None, backward) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, w_down, counted, handle, count, memory, layout = ctx.saved_tensors
    d_residual = dy if ctx.needs_input_grad[5] else None
    dy = torch.zeros_like(x) if dy is None else dy
    dl1 = x.new_zeros((), dtype=torch.float32) if dl1 is None else dl1
    dx, dw_gate, dw_up, dw_down = backward(dy, dl1, x, w_gate, w_up, w_down, counted, handle, count, memory, layout)
    return dx, None if w_gate is None else dw_gate, dw_up, dw_down, None, d_residual, None, None, None, None


ffn_forward.register_autograd(
    lambda ctx, dy, dl1, *_: _gradients(ctx, dy, dl1, ffn_backward), setup_context=_setup_context
)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, which costs the host more than a launch each time."""

    @staticmethod
    def forward(*inputs):
        return forward_pass(*inputs)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dl1, *_):
        return _gradients(ctx, dy, dl1, backward_pass)


def apply(*inputs) -> tuple[Tensor, ...]:
    """`ffn_forward(*inputs)`, by the shortest way there is."""
    if torch.compiler.is_compiling():
        return ffn_forward(*inputs)
    save = inputs[-2]
    return _Eager.apply(*inputs) if save else forward_pass(*inputs)
