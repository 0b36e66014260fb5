"""Kernels run on the GPU if there is one, else in Triton's interpreter; this must be said before any is imported."""

import importlib.metadata
import importlib.util
import os

import pytest
import torch
from packaging.version import Version

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seed() -> None:
    """A test draws the same numbers whatever ran before it, alone or among others."""
    torch.manual_seed(0)


def pytest_configure() -> None:
    """Say once what the interpreter would say in every test of a kernel."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    numpy, triton = (Version(importlib.metadata.version(name)) for name in ("numpy", "triton"))
    if triton < Version("3.7") and numpy >= Version("2.4"):
        raise pytest.UsageError(f"triton {triton} cannot interpret kernels with numpy {numpy}: pip install 'numpy<2.4'")
