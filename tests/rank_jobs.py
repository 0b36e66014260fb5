"""What each rank runs: python -m torch.distributed.run ... -m tests.rank_jobs FOLDER JOB [JOB ...]

A job is a list of overrides, joined by spaces, for one whole training run; see `tests.ranks`. "nan_at=N" is none: it
makes the loss of rank 1 NaN in its N-th forward pass.
"""

import os
import sys
from pathlib import Path

import torch

from tests.training import forward_with_nan, train_tiny
from twell import sharded
from twell.model import Transformer

if __name__ == "__main__":
    torch.set_num_threads(1)
    sharded.UNITS = 1  # the tiny model's two blocks together, as small blocks of large models are
    for job in sys.argv[2:]:
        overrides = job.split()
        for override in [o for o in overrides if o.startswith("nan_at=")]:
            overrides.remove(override)
            if os.environ["RANK"] == "1":
                Transformer.forward = forward_with_nan(int(override.removeprefix("nan_at=")))
        train_tiny(Path(sys.argv[1]), *overrides)
