"""Kernel tests run on the GPU if there is one, else in Triton's interpreter (tests/conftest.py) on CPU tensors."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fill_uninitialized_memory():
    """torch.empty gives NaN (integers: the largest value), so that an element nobody wrote fails its test."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
