import pytest
from omegaconf import OmegaConf

from tests.twell.report.making import write_run


@pytest.fixture(scope="package")
def runs(tmp_path_factory):
    """A dense run, and a sweep of two sparse ones that lose less, in one folder."""
    folder = tmp_path_factory.mktemp("runs")
    sweep = ["ffn.l1.coef=0.001", "ffn.l1.coef=0.0003"]
    write_run(folder, "ffn=dense_silu", started=1e9)
    for i, override in enumerate(sweep, start=1):
        write_run(folder, override, "optim.lr=0.004", started=1e9 + 1000 * i, loss=3 - 0.1 * i)
    tasks = {
        "hydra": {"overrides": {"task": ["ffn.l1.coef=1e-3,3e-4,5e-5", "optim.lr=4e-3"]}}
    }  # the last has not started
    OmegaConf.save(OmegaConf.create(tasks), folder / "multirun.yaml")
    return folder
