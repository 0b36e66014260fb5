"""Kernels run on the GPU if there is one, else in Triton's interpreter; this must be said before any is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
