"""Divided weights, summed gradients and background saves on GPUs; with two of them also whole runs."""

import pytest
import torch
from torch.testing import assert_close

from data.loader import Batch
from tests.ranks import run_ranks
from tests.training import losses, read_metrics, train_tiny
from tests.twell.small import N_VOCAB, VOCAB_SIZE, batch, ffn_config, model_config
from twell import checkpoint, parallel
from twell.config import FFNConfig, OptimConfig, ParallelConfig
from twell.model import Transformer
from twell.optim import build_optimizer, optimizer_state
from twell.parallel import Ranks
from twell.routing import Routing
from twell.saver import Saver
from twell.sharded import ShardedWeights, copy_rows, gathered
from twell.step import Step
from twell.weights import Weights

GPU = torch.device("cuda", 0)
SHAPE = {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "d_ff": 256, "seq_len": 64}


@pytest.fixture
def ranks(monkeypatch):
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)
    yield parallel.start("cuda")
    parallel.finish()


def make(ffn: FFNConfig) -> Transformer:
    return Transformer(model_config(**SHAPE), ffn, VOCAB_SIZE, N_VOCAB, torch.bfloat16)


def train(model: Transformer, weights, compiled: bool, n_steps: int = 4) -> list[float]:
    """Losses of a few steps of two micro-batches."""
    if compiled:
        model.compile_parts()
    routing = Routing(model, GPU, torch.bfloat16)
    optimizers = build_optimizer(weights.masters, OptimConfig(kind="adamw", lr=1e-2), GPU, weights.flat)
    weights.whole_state(optimizer_state(weights.masters, optimizers))
    options = {"l1_weight": torch.full((3,), 1e-3, device=GPU), "batch_tokens": 4 * 64, "clip": 1.0}
    step = Step(model, weights, optimizers, overflowed=routing.overflowed, **options)
    batches = [Batch(*(part.to(GPU) for part in batch(t=64, seed=i))) for i in range(2)]
    seen = []
    for _ in range(n_steps):
        step.gradients(batches)
        while step.finish().overflowed:
            routing.update()
            step.gradients(batches)
        step.update()
        routing.update()
        seen.append(step.sums[0].item())
    return seen


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_shares_train_like_whole_weights(ranks: Ranks, mode: str, compiled: bool, impl: str):
    ffn = ffn_config("sparse", SHAPE["d_ff"])
    ffn.impl = impl
    plain = make(ffn)
    plain.init_weights(1)
    expected = train(plain.to(GPU), Weights(plain, torch.bfloat16), compiled)
    with torch.device("meta"):
        model = make(ffn)
    weights = ShardedWeights(model, torch.bfloat16, ParallelConfig(mode), ranks)
    model.init_weights(1, copy_rows)
    assert train(model, weights, compiled) == pytest.approx(expected, rel=2e-3)
    assert expected[-1] < expected[0]
    with gathered(model):
        w_up = model.blocks[2].ffn.w_up
        assert w_up.dtype == torch.bfloat16 and w_up.data_ptr() % 16 == 0
        assert_close(w_up.float(), weights.masters["blocks.2.ffn.w_up"].view_as(w_up), rtol=2**-8, atol=0)


def test_a_save_in_the_background_holds_what_was_there(ranks: Ranks, tmp_path):
    tensors = {f"model.{i}": torch.full((1 << 22,), float(i), device=GPU) for i in range(8)}
    lines = []
    saver = Saver(tmp_path, tensors, ranks, background=True, log=lines.append)
    for step in (1, 2):
        saver.save(step, {}, None, keep=2, best=None, wait=False)
        saver.before_update()  # the device waits for the copy; the host does not
        for tensor in tensors.values():
            tensor.add_(100)
    saver.finish(wait=True)
    for step in (1, 2):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        checkpoint.restore(tmp_path, step, loaded, 0, GPU)
        for i in range(8):
            assert (loaded[f"model.{i}"] == i + 100 * (step - 1)).all()
    assert len(lines) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_does(tmp_path):
    common = (
        "device=cuda dtype=bf16 steps=20 optim.lr=1e-2 eval.interval=10 ffn.l1.coef=1e-2 model.d_model=128 "
        "model.d_ff=256 model.n_heads=4 model.n_kv_heads=2 batch.micro=2 ffn.impl=triton checkpoint.interval=10"
    )
    expected = losses(train_tiny(tmp_path, "name=one", *common.split()))
    modes = {"ddp": "", "zero1": "", "fsdp": " parallel.shard_gradients=true", "moving": ""}
    jobs = [f"name={mode} parallel={mode} {common}{more}" for mode, more in modes.items() if mode != "moving"]
    jobs += [f"name=moving parallel=fsdp {common} steps=12 optim.schedule.horizon=20"]
    jobs += [f"name=moving parallel=ddp {common} optim.schedule.horizon=20"]
    done = run_ranks(tmp_path, 2, *jobs)
    assert done.returncode == 0, done.stderr
    for name in modes:
        assert losses(read_metrics(tmp_path / "runs" / name)) == pytest.approx(expected, rel=5e-3), name
