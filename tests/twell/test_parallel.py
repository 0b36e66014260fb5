import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twell import parallel
from twell.errors import UserError

ROOT = Path(parallel.__file__).parent.parent

TWO_RANKS = """
import sys, torch
from twell import parallel
ranks = parallel.start("cpu")
assert ranks.world_size == 2 and ranks.is_main == (ranks.rank == 0)
assert parallel.sum_over_ranks(torch.tensor(ranks.rank + 1.0)) == 3
assert parallel.max_over_ranks(torch.tensor(ranks.rank + 1.0)) == 2
assert parallel.from_main(("a", ranks.rank)) == ("a", 0)
order = []
with parallel.main_first(ranks):
    order.append(ranks.rank)
if sys.argv[1] == "main":
    with parallel.main_first(ranks):
        raise ValueError("main is broken")
if sys.argv[1] == "other":
    try:
        with parallel.main_first(ranks):
            if ranks.rank == 1:
                raise ValueError("the other is broken")
    except Exception as error:
        with open(f"{sys.argv[2]}/rank{ranks.rank}", "w") as file:
            file.write(f"{type(error).__name__} {error}")
parallel.finish()
"""


def torchrun(script: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_two_ranks_reduce_and_share(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    done = torchrun(str(script), "work")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_failure_on_the_main_rank_ends_the_others_too(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    done = torchrun(str(script), "main")
    assert done.returncode != 0 and "main is broken" in done.stderr


@pytest.mark.slow
def test_a_failure_on_another_rank_reaches_the_main_one(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    done = torchrun(str(script), "other", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0").read_text() == "UserError rank 1: the other is broken"
    assert (tmp_path / "rank1").read_text() == "ValueError the other is broken"


def test_one_process_needs_no_setup():
    ranks = parallel.start("cpu")
    assert (ranks.rank, ranks.world_size, ranks.device.type) == (0, 1, "cpu")
    assert parallel.from_main("x") == "x"
    assert parallel.sum_over_ranks(torch.tensor(2.0)) == 2


def test_errors_of_the_main_rank_pass_through():
    with pytest.raises(KeyError), parallel.main_first(parallel.start("cpu")):
        raise KeyError("x")


def test_world_size_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert parallel.world_size_from_environment() == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert parallel.world_size_from_environment() == 8


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="LOCAL_RANK=2: torch sees 2 GPUs"):
        parallel.start("cuda")
