"""Out of memory, and garbage."""

import gc
import weakref

import pytest
import torch

from tests.training import compose_config, train_tiny
from twell import memory
from twell.errors import UserError
from twell.step import Step

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.25 GiB is "
    "free. Including non-PyTorch memory, this process has 138.40 GiB memory in use."
)


def message(*overrides: str) -> str:
    with (
        pytest.raises(UserError) as caught,
        memory.explain_out_of_memory(compose_config(*overrides), torch.device("cpu")),
    ):
        raise torch.cuda.OutOfMemoryError(TORCH_SAYS)
    return str(caught.value)


def test_out_of_memory_says_what_was_asked_and_what_would_help():
    assert message("ffn=dense_relu", "batch.micro=6", "cuda_graph=off") == (
        "out of GPU memory: 2.50 GiB asked for, 1.25 GiB free; try batch.micro=3 (the same training, in smaller "
        "pieces), ffn=sparse (keeps only what is not zero), recompute=selective, recompute=full"
    )
    assert message("batch.micro=1", "recompute=selective").endswith("free; try recompute=full, cuda_graph=off")
    nothing_left = ("batch.micro=1", "recompute=full", "cuda_graph=off")
    assert message(*nothing_left).endswith("try a smaller model.seq_len or model")


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match="else"):
        with memory.explain_out_of_memory(compose_config(), torch.device("cpu")):
            raise RuntimeError("something else")


def test_a_run_that_does_not_fit_ends_with_that_message(tmp_path, monkeypatch):
    def too_large(self, batches):
        raise torch.cuda.OutOfMemoryError(TORCH_SAYS)

    monkeypatch.setattr(Step, "gradients", too_large)
    with pytest.raises(UserError, match=r"2.50 GiB asked for.*batch.micro=2"):
        train_tiny(tmp_path, "name=a", "steps=2", "batch.micro=4")
    assert gc.isenabled()


def test_garbage_waits_until_asked_for():
    class Cycle:
        def __init__(self):
            self.me = self

    with memory.collecting_by_hand():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        garbage = weakref.ref(Cycle())
        for _ in range(2000):  # enough to start an automatic collection
            Cycle()
        assert garbage() is not None
        memory.collect_garbage()
        assert garbage() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0
