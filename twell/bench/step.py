"""The whole training step, dense against sparse, on this machine: tokens/s, MFU, where the time goes, memory, energy.

    python -m twell.bench step model=1p5b nnz=30 out=results/step.json
    python -m twell.bench step model=1p5b,0p5b variants=relu_l1,sparse     several models in one process
    python -m twell.bench step run=runs/NAME                               real firing: a run's weights and text
    python -m twell.bench step variants=sparse,sparse_uncounted            what it costs to measure the firing
    python -m twell.bench step model=nano layers=2 vocab=300 micro=2       a smoke test, on any machine

A step is what train.py does in one: n_micro micro-batches forward and backward, gradients added up in fp32, clipping,
AdamW, casting the weights, one host read. All variants work on the same weights, gradients and optimizer state, each
compiled, and take turns. The weights fire as forced (twell/forced.py) and stay as they are, since the learning rate is
0. Sparse layers learn how sparse they are before the clock starts. Memory, energy and the profile come from runs of
their own, in this order, after the timing.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from data.loader import Batch
from twell import graphs
from twell.bench.measure import synchronize
from twell.bench.step_measure import Call, CompareOptions, compare, firing_by_layer, run_models
from twell.bench.step_model import Setup, selected
from twell.forced import force_firing
from twell.optim import build_optimizer, optimizer_state, set_lr
from twell.routing import Routing
from twell.sparsity import SparsityMeter
from twell.step import Step
from twell.weights import Weights

COUNTED = ("dense_relu", "sparse")  # variants whose firing is counted, as in training
UNCOUNTED = "sparse_uncounted"  # sparse without the statistics of every micro-batch
LEARNING = (
    3  # steps in which sparse layers learn how sparse they are, which neurons fire together, how much room it takes
)


@dataclass
class Options(CompareOptions):
    n_micro: int = 4  # micro-batches per step


class Training:
    """What the variants share: weights, their gradients, the optimizer's state, and the tokens."""

    def __init__(self, setup: Setup, n_micro: int):
        cfg, options = setup.cfg, setup.options
        self.device, self.clip = setup.device, cfg.optim.clip
        self.model = setup.build()
        self.weights = Weights(self.model, setup.dtype)
        self.set_batches(setup.batches(n_micro))
        if setup.forced:
            tokens, masters = self.batches[0].tokens, self.weights.masters
            force_firing(self.model, options.nnz, tokens, token_sigma=options.spread, masters=masters)
        self.optimizers = build_optimizer(self.weights.masters, cfg.optim, self.device, self.weights.flat)
        set_lr(self.optimizers, 0.0)
        self.state = optimizer_state(self.weights.masters, self.optimizers)
        n_layers = cfg.model.n_layers
        self.l1_weight = torch.full((n_layers,), cfg.ffn.l1.coef / n_layers, device=self.device)

    def set_batches(self, batches: list[Batch]) -> None:
        """The micro-batches of a step."""
        self.batches = batches
        self.n_tokens = sum(batch.tokens.numel() for batch in batches)

    def memory(self) -> dict[str, int]:
        """Bytes of what stays from step to step."""
        masters = {} if self.weights.masters["embed.weight"] is self.model.embed.weight else self.weights.masters
        return {
            "weights": sum(p.nbytes for p in self.model.parameters()),
            "masters": sum(p.nbytes for p in masters.values()),
            "gradients": self.weights.grad.nbytes,
            "optimizer": sum(t.nbytes for t in self.state.values()),
        }


class Contender:
    """One variant; a call is one optimizer step."""

    def __init__(self, variant: str, training: Training, setup: Setup):
        kind = "sparse" if variant == UNCOUNTED else variant
        self.model, self.training = setup.twin(kind, training.model), training
        if setup.compiled:
            self.model.compile_parts()
        self.routing = Routing(self.model, setup.device, setup.dtype)
        self.repeats, self.seconds = 0, 0.0
        self._learns = kind == "sparse"
        shape = setup.cfg.model
        self._meter = SparsityMeter(shape.n_layers, setup.cfg.ffn.d_ff, shape.seq_len, setup.device)
        self._launched = self._make_step(variant, None)
        self._step = self._launched
        if graphs.wanted(setup.cfg, setup.device, 1, self.model.n_params):
            self.routing.expect_graph()
            self._step = self._make_step(variant, self.routing.signature)

    def _make_step(self, variant: str, graph_signature: Callable[[], Hashable] | None) -> Step:
        training = self.training
        return Step(
            self.model,
            training.weights,
            training.optimizers,
            l1_weight=training.l1_weight,
            batch_tokens=training.n_tokens,
            clip=training.clip,
            overflowed=self.routing.overflowed,
            count=self._meter.add if variant in COUNTED else None,
            graph_signature=graph_signature,
        )

    def __call__(self, _i: int) -> None:
        self._do(self._step)

    def launched(self, _i: int) -> None:
        self._do(self._launched)

    def _do(self, step: Step) -> None:
        """One step, repeated while a buffer of the sparse kernels is too small, as in train.py."""
        while True:
            self._meter.drop()
            step.gradients(self.training.batches)
            word = step.finish()
            if not word.overflowed:
                break
            self.repeats += 1
            self.routing.update()
        if word.nonfinite:
            raise RuntimeError("the loss or the gradient norm is not finite")
        step.update()
        self._meter.accept()

    def warm_up(self) -> None:
        """Compile, let sparse layers learn, record CUDA graphs; then see how long a step takes."""
        for _ in range(LEARNING if self._learns else 1):
            self(0)
            self.routing.update()
        if self._step is not self._launched:  # the last update may have changed what is to be recorded
            for _ in range(1 + graphs.WARM_UP // len(self.training.batches)):
                self(0)
        synchronize(self.training.device)
        started = time.perf_counter()
        self(0)
        synchronize(self.training.device)
        self.seconds = time.perf_counter() - started


def run(options: Options) -> None:
    variants = selected(options, also=(UNCOUNTED,))

    def measure_model(setup: Setup, name: str) -> dict:
        training = Training(setup, options.n_micro)
        firing = firing_by_layer(setup.twin("dense_relu", training.model), training.batches[0])
        contenders = {variant: Contender(variant, training, setup) for variant in variants}
        for contender in contenders.values():
            contender.warm_up()
        fixed = sum(training.memory().values())
        call = Call(True, 1, training.n_tokens, fixed, flat=training.weights.grad.numel())
        return setup.describe(name, training.model, len(training.batches)) | {
            "firing": firing,
            "variants": compare(contenders, call, firing, setup),
        }

    run_models(options, measure_model)
