"""compute-sanitizer finds no out-of-bounds access and no race in any kernel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer (part of CUDA) on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool):
    command = [
        "compute-sanitizer",
        f"--tool={tool}",
        "--error-exitcode=9",
        sys.executable,
        "-m",
        "tests.gpu.small_case",
    ]
    # Allocations of their own, or an access beyond a tensor would land in a neighbour and look legal.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "accurate" in done.stdout
