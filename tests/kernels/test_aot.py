"""Every kernel compiles for every GPU generation, fits into its shared memory, and does not spill on 80 and 90."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.aot import ARCHS

ROOT = Path(__file__).parents[2]
SOURCES = {path.stem: path.read_text() for path in sorted((ROOT / "kernels").glob("*.py"))}
STAGES = [name for name, source in SOURCES.items() if "def aot_cases(" in source]


def compile_all(*arguments: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return compile_all(*(f"kernels.{stage}" for stage in STAGES))


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_and_fits(results, arch):
    of_arch = [result for result in results if result["arch"] == arch]
    failures = [f"{result['name']}: {result['error']}" for result in of_arch if "error" in result]
    assert not failures, "\n".join(failures)
    defined = {name for source in SOURCES.values() for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert {result["kernel"] for result in of_arch} == defined


def test_the_checks_find_known_faults():
    results = compile_all("tests.kernels.aot_examples", "--arch", "80", "90")
    error = {(result["name"], result["arch"]): result.get("error", "") for result in results}
    for arch in (80, 90):
        assert error["sound", arch] == ""
        assert "no_such_function" in error["misspelt", arch]
        assert "bytes of shared memory exceed" in error["too_many_stages", arch]
        assert "spills" in error["spilling", arch]
