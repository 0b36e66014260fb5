"""What the trainer does for the sparse kernels: gives each layer its memory, and lets it learn between steps.

A layer's `kernels.state.FFNState` holds buffer sizes, neuron order and the choice between sparse stages and dense
products. Passes read it on the host and leave their measurements on the device, so no step waits. On the torch path
there is nothing to decide and everything here does nothing.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.ops import unsupported
from twell.ffn import SparseFFN

LONGEST = 200  # steps between updates, which add up firing tokens in int32


class Routing:
    """The states of a model's sparse layers, in the order of the layers."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype):
        """Attach a state to every layer of `model` that runs the Triton path in `dtype` on `device`."""
        self._device = device
        self._layers = [module for module in model.modules() if isinstance(module, SparseFFN)]
        self._states = []
        self._steps = self._updated = 0  # steps so far, and when `after_step` last learnt
        for layer in self._layers:
            d_ff, d_model = layer.w_up.shape
            # auto on a CPU is torch: there the kernels only run in Triton's interpreter
            wanted = layer.impl == "triton" or (layer.impl == "auto" and device.type == "cuda")
            if wanted and unsupported(device, dtype, d_model) is None:
                from kernels.state import FFNState  # needs triton

                layer.state = FFNState(d_ff, device)
                layer.state.forced = layer.impl == "triton"
                self._states.append(layer.state)

    def overflowed(self) -> Tensor:
        """bool [], on the device: some buffer was too small since the last update, so the results are incomplete."""
        if not self._states:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        from kernels.state import overflowed

        return overflowed(self._states)

    def update(self) -> None:
        """Let every layer decide anew from what it saw since the last update. Waits for the device, once."""
        if self._states:
            from kernels.state import update

            update(self._states)

    def expect_graph(self) -> None:
        """Passes will run from CUDA graphs: let the layers decide as if launching a kernel cost the host nothing."""
        for state in self._states:
            state.captured = True

    def signature(self) -> Hashable:
        """What a graph of training passes has baked in: equal as long as it is valid."""
        if not self._states:
            return ()
        from kernels.state import signature

        return signature(self._states)

    def after_step(self, logging: bool) -> None:
        """Call after every optimizer step: learns after the 1st, 2nd, 4th, 8th, ... and, if some time has passed, when
        `logging`.

        Layers become sparse within the first few hundred steps and change ever more slowly. An update waits for the
        device, and what it decides may cost a new CUDA graph: so the next one comes when an eighth more steps are done.
        """
        self._steps += 1
        has_passed = self._steps - self._updated >= min(self._steps // 8, LONGEST)
        if (logging and has_passed) or self._steps & (self._steps - 1) == 0:
            self._updated = self._steps
            self.update()

    def state_dict(self) -> dict[str, Any] | None:
        """What this rank has learnt, in plain types and tensors; None if there is nothing to decide.

        Ranks learn from their own tokens and clocks, and may decide differently: a decision changes a layer's rounding
        and time, never what it computes, and the ranks' sums, so also their weights, stay equal.
        """
        if not self._states:
            return None
        layers = [state.state_dict() for state in self._states]
        for layer in layers:
            layer["room"] = None if layer["room"] is None else tuple(layer["room"])
        return {"steps": self._steps, "updated": self._updated, "layers": layers}

    def load_state_dict(self, saved: dict[str, Any] | None) -> None:
        """Go on from what `state_dict` gave, if it fits; otherwise learn anew."""
        if saved is None or len(saved["layers"]) != len(self._states):
            return
        from kernels.room import Needs

        self._steps = saved["steps"]
        self._updated = saved.get("updated", self._steps)  # not in early checkpoints
        for state, layer in zip(self._states, saved["layers"]):
            room = None if layer["room"] is None else Needs(*layer["room"])
            state.load_state_dict({**layer, "room": room})

    def metrics(self) -> dict[str, float]:
        """sparsity/route/layer_00 ...: 1 where the next training pass computes only the non-zeros, else 0."""
        return {
            f"sparsity/route/layer_{i:02d}": float(layer.state is not None and layer.state.runs_sparse())
            for i, layer in enumerate(self._layers)
        }
