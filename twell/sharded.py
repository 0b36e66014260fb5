"""Weights that are divided among ranks, by PyTorch's FSDP2 (fully_shard): zero1 and fsdp.

Each rank holds a share of every parameter: some of its rows, in fp32. These shares are the masters, and the optimizer
sees nothing else. The weights of a unit, one block or some small ones, are gathered in the compute dtype before it
runs, as ordinary tensors in their ordinary layout, so that kernels read them as they are.

zero1   they stay until the last backward pass of the step: one gathering and one scattering of gradients a step.
fsdp    they are dropped after each use, and gathered again for backward.

Gradients of micro-batches add up whole, in fp32, and only the last backward pass sums them over ranks, unit by unit
while it runs; with shard_gradients each pass does, and what adds up are the shares.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from twell.config import ParallelConfig
from twell.model import Transformer
from twell.parallel import Ranks
from twell.weights import flat_views

# The collectives of a unit cost the host about as much time as a small sparse block keeps the GPU busy. So a unit may
# have this many parameters, but there are UNITS at least: what runs beside a unit's collectives are the others.
UNIT_PARAMETERS, UNITS = 200_000_000, 4


class ShardedWeights:
    """The parameters of `model`, divided; the same face as `twell.weights.Weights`.

    masters, grad: of this rank's shares. FSDP adds to them and gathers them, so that there is nothing `flat`.
    """

    flat = None

    def __init__(self, model: Transformer, compute_dtype: torch.dtype, cfg: ParallelConfig, ranks: Ranks):
        """`model` lies on `ranks.device` with equal values on all ranks, or on "meta": then fill it afterwards."""
        self._model, self._shard_gradients, self._keep = model, cfg.shard_gradients, cfg.mode == "zero1"
        shard_size = cfg.shard_size or ranks.world_size
        self._n_copies = ranks.world_size // shard_size
        mesh = _mesh(ranks, self._n_copies, shard_size)
        low = None if compute_dtype == torch.float32 else compute_dtype
        # Inputs stay as they are: the rotary table is fp32 on purpose.
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        model.hook_blocks()
        parts = units(model.blocks)
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not self._keep)
        # What is left, embedding, head and norm, is used at both ends of a pass and stays in between.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        # Each gathers the next one's weights before it runs, and not only when the host has come there.
        for module, (following, *_) in zip((model, *(part[0] for part in parts)), parts):
            module.set_modules_to_forward_prefetch([following])
        for module in (*model.blocks, model):  # sums, not means: the step divides by the tokens that counted
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if model.embed.weight.is_meta:
            model.to_empty(device=ranks.device)

        self._parameters: dict[str, DTensor] = dict(model.named_parameters())
        shares = [parameter.detach().to_local() for parameter in self._parameters.values()]
        self.masters = {name: nn.Parameter(share) for name, share in zip(self._parameters, shares)}
        self.grad, views = flat_views(shares)
        for parameter, master, view in zip(self._parameters.values(), self.masters.values(), views):
            master.grad = view
            parameter.grad = _like(parameter, view)  # FSDP adds to what it finds there

    def zero_grad(self, always_add: bool = True) -> None:
        """Begin a step: the gradients are zero, at the same addresses. FSDP always adds."""
        self.grad.zero_()

    def begin(self, last: bool) -> None:
        """A micro-batch comes, the `last` one of its step or not."""
        self._model.set_requires_gradient_sync(last or self._shard_gradients)
        self._model.set_requires_all_reduce(last)
        self._model.set_reshard_after_backward(last or not self._keep)

    def accumulate(self) -> None:
        """Nothing: backward has added the gradients up."""

    def join(self) -> None:
        """Nothing: the last backward pass has summed the gradients."""

    def norm(self, grad: Tensor) -> Tensor:
        """The norm [] of all ranks' gradients together, `grad` being this rank's buffer."""
        square = torch.linalg.vector_norm(grad).square()  # not the sum of grad.square(), which is as large as grad
        dist.all_reduce(square)
        return (square / self._n_copies).sqrt()

    def refresh(self) -> None:
        """Nothing: the next pass gathers what the masters are then."""

    def state(self) -> dict[str, Tensor]:
        """The masters under their checkpoint names, each a DTensor: whole, but divided."""
        return {f"model.{name}": parameter.detach() for name, parameter in self._parameters.items()}

    def whole_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """`optimizer_state` of the masters, what has their shape as DTensors."""
        whole = {}
        for key, tensor in state.items():
            parameter = self._parameters[key.removeprefix("optim.").rpartition(".")[0]]
            is_share = tensor.ndim > 0
            whole[key] = _like(parameter, tensor) if is_share else tensor
        return whole


def units(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Equal blocks in their order, put together to what is gathered at a time."""
    n_params = sum(parameter.numel() for parameter in blocks[0].parameters())
    size = max(1, min(UNIT_PARAMETERS // n_params, -(-len(blocks) // UNITS)))
    return [list(blocks[first : first + size]) for first in range(0, len(blocks), size)]


def _mesh(ranks: Ranks, n_copies: int, shard_size: int) -> DeviceMesh:
    """Consecutive ranks share a copy: torchrun numbers those of a node consecutively."""
    if n_copies == 1:
        return init_device_mesh(ranks.device.type, (shard_size,), mesh_dim_names=("shard",))
    return init_device_mesh(ranks.device.type, (n_copies, shard_size), mesh_dim_names=("copy", "shard"))


def _like(parameter: DTensor, share: Tensor) -> DTensor:
    """A tensor divided as `parameter` is, with this rank's `share`."""
    return DTensor.from_local(
        share, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """(this rank's rows of `tensor`, sharing its memory; the index of the first): all rows if it is not divided."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    dim = tensor.placements.index(Shard(0))
    per_rank = -(-tensor.shape[0] // tensor.device_mesh.size(dim))
    first = min(tensor.device_mesh.get_local_rank(dim) * per_rank, tensor.shape[0])
    return tensor.detach().to_local(), first


def copy_rows(tensor: Tensor, value: Tensor) -> None:
    """Fill this rank's rows of `tensor` from the whole `value`."""
    rows, first = local_rows(tensor)
    rows.copy_(value[first : first + len(rows)] if value.ndim else value)


def belongs_to_first_copy(tensor: Tensor) -> bool:
    """Whether this rank's rows of a divided tensor are those of the first copy, when there are several."""
    return tensor.device_mesh.ndim == 1 or tensor.device_mesh.get_local_rank(0) == 0


def with_share(tensor: DTensor, share: Tensor) -> DTensor:
    """`tensor` with `share` as this rank's rows, also if that lies in the host's memory (from_local would move it)."""
    return DTensor(share, tensor._spec, requires_grad=False)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """In the block every rank has all weights, and can run the model without the others. A collective call."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
