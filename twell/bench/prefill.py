"""Reading a prompt, dense against sparse: a forward pass without gradients that ends in the last position's logits.

    python -m twell.bench prefill model=1p5b nnz=30 out=results/prefill.json
    python -m twell.bench prefill run=runs/NAME                                 real firing: a run's weights and text
    python -m twell.bench prefill model=nano layers=2 vocab=300 micro=2         a smoke test, on any machine

All variants work on the same weights, in the compute dtype, each compiled, and take turns. Sparse layers learn how
sparse they are from training passes before, as those of a trained model have. Memory, energy and the profile come from
runs of their own, in this order, after the timing.
"""

import time
from dataclasses import dataclass

import torch

from data.loader import Batch
from twell.arguments import check_values
from twell.bench.measure import synchronize
from twell.bench.step_measure import Call, CompareOptions, compare, firing_by_layer, run_models
from twell.bench.step_model import Setup, selected
from twell.errors import UserError
from twell.forced import force_firing
from twell.model import Transformer
from twell.routing import Routing

N_BATCHES = 2  # in turn, so that one's data does not stay in the caches
LEARNING = 3  # passes: how sparse a layer is, which neurons fire together, how much room that takes


@dataclass
class Options(CompareOptions):
    variants: str = "dense_silu,dense_relu,sparse"


class Contender:
    """One variant; a call reads one batch of prompts."""

    def __init__(self, variant: str, model: Transformer, batches: list[Batch], setup: Setup):
        self.model, self.batches, self.device = setup.twin(variant, model), batches, setup.device
        if setup.compiled:
            self.model.compile_parts()
        self.routing = Routing(self.model, setup.device, setup.dtype)
        self.repeats, self.seconds = 0, 0.0
        if variant == "sparse":
            self._learn()
        # Only the last position goes on to the head: what the others predict is in the prompt.
        self.model.norm.register_forward_pre_hook(lambda _norm, inputs: inputs[0][:, -1:])

    def _learn(self) -> None:
        batch = self.batches[0]
        for _ in range(LEARNING):
            out = self.model(batch.tokens, batch.targets, batch.doc_ids)
            (out.loss_sum / batch.tokens.numel()).backward()
            self.model.zero_grad(set_to_none=True)
            self.routing.update()

    @torch.no_grad()
    def __call__(self, i: int) -> None:
        self.model(self.batches[i].tokens, None, self.batches[i].doc_ids)

    launched = __call__

    def warm_up(self) -> None:
        for i in range(N_BATCHES):
            started = time.perf_counter()
            self(i)
            synchronize(self.device)
            self.seconds = time.perf_counter() - started
        # Nobody looks for overflow between prompts; what was seen here would have shown it.
        while self.routing.overflowed():
            self.repeats += 1
            self.routing.update()
            self(0)


def run(options: Options) -> None:
    variants = selected(options)
    if "relu_l1" in variants:
        raise UserError(f"variants={options.variants}: without gradients, relu_l1 is dense_relu")
    rules = (
        (options.rounds >= 0, "rounds", "must be at least 1, or 0 for about `seconds` worth"),
        (options.seconds >= 0, "seconds", "must be at least 0"),
    )
    check_values(options, rules)

    def measure_model(setup: Setup, name: str) -> dict:
        model = setup.build()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(setup.dtype)
        batches = setup.batches(N_BATCHES)
        if setup.forced:
            force_firing(model, options.nnz, batches[0].tokens, token_sigma=options.spread)
        firing = firing_by_layer(setup.twin("dense_relu", model), batches[0])
        contenders = {variant: Contender(variant, model, batches, setup) for variant in variants}
        for contender in contenders.values():
            contender.warm_up()
        fixed = sum(p.nbytes for p in model.parameters())
        call = Call(False, N_BATCHES, batches[0].tokens.numel(), fixed)
        return setup.describe(name, model, 1) | {
            "firing": firing,
            "variants": compare(contenders, call, firing, setup),
        }

    run_models(options, measure_model)
