import json

import pytest
import torch
from omegaconf import OmegaConf

from tests.training import compose_config
from twell import checkpoint
from twell.config import ConfigError
from twell.run import Progress, open_run, run_name


def start(tmp_path, *overrides, lines=None):
    cfg = compose_config(f"out={tmp_path}", "name=a", *overrides)
    return cfg, *open_run(cfg, "a", (lines if lines is not None else []).append)


def save_checkpoint(cfg, run, step=3):
    meta = {"config": OmegaConf.to_container(cfg, resolve=True)}
    checkpoint.save(run, step, {"model.w": torch.ones(2)}, meta)


def test_the_same_command_gives_the_same_name():
    overrides = ["optim.lr=1e-3", "ffn=dense_relu", "seed=7", "wandb.mode=disabled", "eval.interval=3"]
    cfg = compose_config(*overrides)
    assert run_name(cfg, overrides) == run_name(cfg, overrides[::-1]) == "nano-dense_relu-stdlib-lr=1e-3-seed=7"


def test_a_name_given_is_the_name():
    assert run_name(compose_config("name=mine"), ["name=mine"]) == "mine"
    with pytest.raises(ConfigError, match=r"name=a/b: must be a plain folder name"):
        run_name(compose_config("name=a/b"), ["name=a/b"])


def test_paths_in_overrides_make_a_valid_folder_name():
    name = run_name(compose_config(), ["data.paths=[/some/where/*.txt]"])
    assert "/" not in name and "*" not in name


def test_long_names_are_cut_but_stay_different():
    cfg = compose_config()
    a, b = (run_name(cfg, [f"data.paths=[{'x' * 300}]", f"seed={seed}"]) for seed in (1, 2))
    assert a != b and len(a) < 120


def test_a_fresh_run_has_its_config_and_nothing_to_resume(tmp_path):
    _, run, resumed = start(tmp_path)
    assert resumed is None and OmegaConf.load(run / "config.yaml").model.name == "nano"


def test_an_existing_run_is_resumed_from_its_newest_checkpoint(tmp_path):
    cfg, run, _ = start(tmp_path)
    save_checkpoint(cfg, run, 3)
    save_checkpoint(cfg, run, 5)
    assert start(tmp_path)[2]["step"] == 5


def test_resume_never_keeps_the_earlier_run(tmp_path):
    cfg, run, _ = start(tmp_path)
    save_checkpoint(cfg, run)
    lines = []
    _, _, resumed = start(tmp_path, "resume=never", lines=lines)
    assert resumed is None and "a.old-1" in lines[0]
    assert checkpoint.valid_steps(tmp_path / "a.old-1") == [3]


@pytest.mark.parametrize("override", ["model.d_model=256", "seed=2", "ffn=dense_relu", "data.val_fraction=0.5"])
def test_another_experiment_is_not_continued(tmp_path, override):
    cfg, run, _ = start(tmp_path)
    save_checkpoint(cfg, run)
    with pytest.raises(ConfigError, match=r"resume=never"):
        start(tmp_path, override)


def test_harmless_changes_are_reported(tmp_path):
    cfg, run, _ = start(tmp_path)
    save_checkpoint(cfg, run)
    lines = []
    start(tmp_path, "optim.lr=0.5", "eval.interval=3", lines=lines)
    assert len(lines) == 1 and "optim.lr" in lines[0] and "-> 0.5" in lines[0] and "eval" not in lines[0]


def test_what_a_killed_save_left_is_reported_and_removed(tmp_path):
    _, run, _ = start(tmp_path)
    torn = run / "checkpoints" / ".unfinished-step-00000004"
    torn.mkdir(parents=True)
    lines = []
    _, _, resumed = start(tmp_path, lines=lines)
    assert resumed is None and not torn.exists() and "did not finish" in lines[0]


def test_progress_knows_the_best_checkpoint():
    at = Progress(step=2, val_step=2, val_loss=3.0)
    at.note_checkpoint()
    at.step, at.val_step, at.val_loss = 4, 4, 5.0
    at.note_checkpoint()
    assert (at.best_step, at.best_loss) == (2, 3.0)
    at.step, at.val_loss = 5, 1.0  # validated at step 4, not at the step that is saved
    at.note_checkpoint()
    assert at.best_step == 2


def test_progress_survives_json():
    at = Progress(step=3, train_seconds=1.5)
    assert Progress(**json.loads(json.dumps(at.__dict__))) == at
