"""The reference path, pinned: whoever changes these numbers changes what is trained, and should know it."""

import pytest

from tests.training import losses, train_tiny

# train/loss of steps 1 to 8, and then val/loss; fp32 on a CPU
GOLDEN = {
    "dense_silu": ([5.535302, 5.386831, 5.026345, 4.656498, 4.443049, 4.136028, 4.086848, 3.999130], 3.963392),
    "dense_relu": ([5.530797, 5.368332, 4.976932, 4.601907, 4.388935, 4.088139, 4.025551, 3.930749], 3.902923),
    "sparse": ([5.530797, 5.367710, 4.977429, 4.601814, 4.389030, 4.089079, 4.025940, 3.931515], 3.903848),
    "sparse_nongated": ([5.589020, 5.338871, 4.949987, 4.547740, 4.317170, 4.014342, 3.963599, 3.870555], 3.842661),
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_losses_are_what_they_were(tmp_path, kind):
    records = train_tiny(tmp_path, "name=a", f"ffn={kind}", "ffn.impl=torch", "steps=8", "optim.lr=1e-2")
    training, validation = GOLDEN[kind]
    # Versions of torch sum in different orders: about 1e-6 after these steps.
    assert list(losses(records).values()) == pytest.approx(training, rel=1e-4)
    assert records[-1]["val/loss"] == pytest.approx(validation, rel=1e-4)
