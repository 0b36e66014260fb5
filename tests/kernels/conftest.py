"""Kernel tests run on the GPU if there is one, else in Triton's interpreter on CPU tensors."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before any test module is imported


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fill_uninitialized_memory():
    """torch.empty gives NaN (integers: the largest value), so that an element nobody wrote fails its test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
