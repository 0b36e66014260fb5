"""How long neurons have been silent, against brute force, and what is done about the dead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import train
from tests.training import compose_config, forward_with_nan, losses, tiny_overrides, train_tiny
from tests.twell.small import build
from twell import checkpoint
from twell.config import DeadConfig
from twell.ffn import DenseFFN, SparseFFN
from twell.model import Transformer
from twell.neurons import DeadNeurons, reinitialize
from twell.optim import build_optimizer, optimizer_state
from twell.weights import Weights

LAYERS, H = 2, 7


def history(n_steps: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(fired int [steps, layers, h], n_counted [steps]): some neurons fire often, some never."""
    generator = torch.Generator().manual_seed(seed)
    rate = torch.rand(LAYERS, H, generator=generator) ** 4
    fired = (torch.rand(n_steps, LAYERS, H, generator=generator) < rate).int() * 3
    return fired, torch.randint(1, 9, (n_steps,), generator=generator)


def silence(fired: Tensor, n_counted: Tensor) -> Tensor:
    """int64 [layers, h], token by token: the tokens of the steps since the last firing."""
    result = torch.zeros(fired.shape[1:], dtype=torch.int64)
    for layer, neuron in torch.cartesian_prod(torch.arange(LAYERS), torch.arange(H)).tolist():
        steps = fired[:, layer, neuron].nonzero()
        since = int(steps[-1]) + 1 if len(steps) else 0
        result[layer, neuron] = n_counted[since:].sum()
    return result


def test_silence_equals_brute_force():
    fired, n_counted = history()
    neurons = DeadNeurons(DeadConfig(after_tokens=60), LAYERS, H, "cpu")
    for step, (f, n) in enumerate(zip(fired, n_counted), 1):
        neurons.update(f, n.double())  # a float, as the trainer counts them
        expected = silence(fired[:step], n_counted[:step])
        assert torch.equal(neurons.silent, expected)
        assert torch.equal(neurons.dead(), expected >= 60)
    share = (expected >= 60).float().mean(1)
    summary = neurons.summary()
    assert share.min() > 0 and share.max() < 1
    assert [summary[f"sparsity/dead_share/layer_0{i}"] for i in range(LAYERS)] == share.tolist()
    assert summary["sparsity/dead_share"] == pytest.approx(share.mean().item())


def test_two_ranks_know_what_one_knows():
    """Each rank sees its own firings; merging now and then changes nothing."""
    parts = [history(seed=1)[0], history(seed=2)[0]]
    n_counted = history()[1]
    ranks = [DeadNeurons(DeadConfig(after_tokens=60), LAYERS, H, "cpu") for _ in parts]
    for step in range(len(n_counted)):
        for rank, fired in zip(ranks, parts):
            rank.update(fired[step], n_counted[step])
        if step % 7 == 0:
            merge(ranks)
    merge(ranks)
    expected = silence(parts[0] + parts[1], n_counted)
    assert all(torch.equal(rank.silent, expected) for rank in ranks)


def merge(ranks: list[DeadNeurons]) -> None:
    largest = torch.maximum(-ranks[0].silent, -ranks[1].silent)
    for rank in ranks:
        rank.merge(lambda mine: mine.copy_(largest))


def test_a_check_is_due_once_for_every_after_tokens():
    neurons = DeadNeurons(DeadConfig(after_tokens=100), LAYERS, H, "cpu")
    assert [n for n in range(30, 331, 30) if neurons.due(n, 30)] == [120, 210, 300]
    assert all(neurons.due(n, 128) for n in range(128, 1000, 128))


def test_who_fires_after_a_check_has_revived():
    neurons = DeadNeurons(DeadConfig(after_tokens=10), 1, 3, "cpu")
    revived = []
    for firing in ([1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 0, 0], [1, 0, 1]):
        neurons.update(torch.tensor([firing]), torch.tensor(10))
        neurons.check({}, lambda tensor: tensor, seed=0, step=0)
        revived.append(neurons.summary()["sparsity/revived"])
    assert revived == [0, 0, 1, 2, 2, 3]  # the second neuron at 3, the third at 4 and 6


@pytest.mark.parametrize("kind", ["sparse", "sparse_nongated", "dense_relu"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_reinit_touches_the_dead_rows_and_their_moments_only(kind: str, optim: str):
    model = build(kind)
    optimizers = build_optimizer(
        dict(model.named_parameters()), compose_config(f"optim={optim}").optim, torch.device("cpu")
    )
    tensors = checkpoint.model_tensors(model) | optimizer_state(dict(model.named_parameters()), optimizers)
    for name, tensor in tensors.items():
        if name.startswith("optim."):
            tensor.fill_(3)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    dead = torch.zeros(3, model.blocks[0].ffn.w_up.shape[0], dtype=torch.bool)
    dead[0, [2, 5, 39]] = True
    dead[2, 7] = True
    assert reinitialize(tensors, dead, seed=1, step=9) == 4

    weight = "w_up" if kind == "sparse_nongated" else "w_gate"
    moments = ["momentum_buffer"] if optim == "muon" else ["exp_avg", "exp_avg_sq"]
    touched = {f"model.blocks.{i}.ffn.{weight}": i for i in (0, 2)}
    cleared = {f"optim.blocks.{i}.ffn.{weight}.{moment}": i for i in (0, 2) for moment in moments}
    assert touched.keys() | cleared.keys() <= tensors.keys()
    for name, tensor in tensors.items():
        rows = dead[touched.get(name, cleared.get(name, 1))]  # those of layer 1: none
        if tensor.ndim == 0 or len(tensor) != len(rows):
            assert torch.equal(tensor, before[name])
            continue
        assert torch.equal(tensor[~rows], before[name][~rows])
        if name in cleared:
            assert (tensor[rows] == 0).all()
    noise = torch.cat([(tensors[n] - 0.9 * before[n])[dead[i]] for n, i in touched.items()]) / 0.1
    assert noise.std().item() == pytest.approx(0.02, rel=0.2) and abs(noise.mean().item()) < 0.01
    assert len(noise.flatten().unique()) == noise.numel()


def test_reinit_draws_the_same_numbers_at_the_same_step():
    def shaken(seed: int, step: int) -> Tensor:
        tensors = checkpoint.model_tensors(build())
        reinitialize(tensors, torch.ones(3, 40, dtype=torch.bool), seed=seed, step=step)
        return tensors["model.blocks.1.ffn.w_gate"]

    assert torch.equal(shaken(1, 9), shaken(1, 9))
    assert not torch.equal(shaken(1, 9), shaken(1, 10)) and not torch.equal(shaken(1, 9), shaken(2, 9))


def test_masters_and_the_weights_computed_with_both_change():
    model = build(dtype=torch.bfloat16)
    weights = Weights(model, torch.bfloat16)
    before = model.blocks[1].ffn.w_gate.detach().clone()
    dead = torch.zeros(3, 40, dtype=torch.bool)
    dead[1, 11] = True
    reinitialize(weights.state(), dead, seed=1, step=1)
    weights.refresh()
    after, master = model.blocks[1].ffn.w_gate.detach(), weights.masters["blocks.1.ffn.w_gate"].detach()
    assert torch.equal(after, master.bfloat16())
    assert (after != before).any(1).nonzero().flatten().tolist() == [11]


# A penalty so strong that neurons die, and a limit so low that it happens within a tiny run.
DEADLY = ("optim.lr=1e-2", "optim.schedule.kind=constant", "ffn.dead.after_tokens=600", "optim.weight_decay=0")


@pytest.mark.parametrize("ffn", ["dense_relu", "sparse", "sparse_nongated"])
def test_a_run_counts_silence_on_every_path(tmp_path, monkeypatch, ffn):
    seen = []  # (layer, fires bool [tokens, h]) of each FFN call in training
    for cls in (DenseFFN, SparseFFN):

        def forward(ffn, x, counted, *args, original=cls.forward, **kwargs):
            if torch.is_grad_enabled():
                w = ffn.w_up if ffn.w_gate is None else ffn.w_gate
                seen.append((x.detach() @ w.detach().T > 0)[counted])
            return original(ffn, x, counted, *args, **kwargs)

        monkeypatch.setattr(cls, "forward", forward)
    strong = ("ffn.l1.coef=3e-2",) if ffn != "dense_relu" else ()
    train_tiny(tmp_path, "name=a", "steps=12", f"ffn={ffn}", *strong, *DEADLY)

    calls = torch.stack([fires.any(0) for fires in seen]).unflatten(0, (12, 2, 2))  # [steps, micro-batches, layers, h]
    fired = calls.any(1)  # [steps, layers, h]
    since = torch.stack([(~fired[i:]).all(0) for i in range(12)]).sum(0) * 256  # tokens; every token is counted
    assert torch.equal(stored(tmp_path, "a", "sparsity.silent"), since)
    assert since.max() > 0


def stored(folder: Path, name: str, key: str) -> Tensor:
    """One tensor of a run's last checkpoint."""
    run = folder / "runs" / name
    step = checkpoint.valid_steps(run)[-1]
    entry = checkpoint.dcp.FileSystemReader(checkpoint.folder(run, step)).read_metadata().state_dict_metadata[key]
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    assert not checkpoint.load(run, step, {key: tensor})
    return tensor


REINIT = ("ffn.l1.coef=3e-2", "ffn.dead.remedy=reinit", *DEADLY)


def test_reinit_in_a_run_revives_and_resumes_exactly(tmp_path):
    whole = train_tiny(tmp_path, "name=whole", "steps=30", *REINIT)
    train_tiny(tmp_path, "name=parts", "steps=17", *REINIT)
    parts = train_tiny(tmp_path, "name=parts", "steps=30", *REINIT)
    assert losses(parts) == losses(whole)
    for key in ("sparsity/dead_share", "sparsity/revived", "sparsity/reinitialized"):
        assert [r[key] for r in parts if key in r] == [r[key] for r in whole if key in r]
    last = [r for r in whole if "sparsity/revived" in r][-1]
    assert last["sparsity/reinitialized"] >= last["sparsity/revived"] > 0


def test_a_check_that_falls_on_a_skipped_step_is_made(tmp_path, monkeypatch):
    checked, check = [], DeadNeurons.check
    monkeypatch.setattr(
        DeadNeurons, "check", lambda *args, **kwargs: (checked.append(kwargs["step"]), check(*args, **kwargs))[1]
    )
    monkeypatch.setattr(Transformer, "forward", forward_with_nan(at_call=5))  # two micro-batches a step: in step 3
    train_tiny(tmp_path, "name=a", "steps=6", "ffn.dead.after_tokens=768")
    assert checked == [2, 5]


@pytest.mark.parametrize(("remedy", "changed"), [("none", False), ("reinit", True)])
def test_a_check_says_whether_weights_have_changed(remedy: str, changed: bool):
    neurons = DeadNeurons(DeadConfig(after_tokens=10, remedy=remedy), 3, 40, "cpu")
    tensors = checkpoint.model_tensors(build())
    assert not neurons.check(tensors, lambda tensor: tensor, seed=1, step=1)
    neurons.silent += 10
    assert neurons.check(tensors, lambda tensor: tensor, seed=1, step=2) == changed


@pytest.mark.slow
def test_two_ranks_count_and_shake_what_one_does(tmp_path):
    train_tiny(tmp_path, "name=one", "steps=10", *REINIT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(Path(train.__file__))
    done = subprocess.run(
        [*launcher, script, *tiny_overrides(tmp_path, "name=two", "steps=10", *REINIT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path, "one", "sparsity.reinitialized") > 0
    for key in ("silent", "was_dead", "revived", "reinitialized"):
        assert torch.equal(stored(tmp_path, "two", f"sparsity.{key}"), stored(tmp_path, "one", f"sparsity.{key}"))
    for i in range(2):
        key = f"model.blocks.{i}.ffn.w_gate"
        assert_close(stored(tmp_path, "two", key), stored(tmp_path, "one", key), rtol=1e-3, atol=1e-4)
