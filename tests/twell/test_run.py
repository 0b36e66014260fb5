import json
import math
from contextlib import ExitStack

import pytest
import torch
from omegaconf import OmegaConf

from data.tokenizer import ByteTokenizer, load_tokenizer
from tests.training import compose_config
from twell import checkpoint
from twell.config import ConfigError
from twell.errors import UserError
from twell.run import Progress, describe_run, open_run, run_name, start_from, swept_keys

BYTES = ByteTokenizer()


def start(tmp_path, *overrides, lines=None, tokenizer=BYTES):
    cfg = compose_config(f"out={tmp_path}", "name=a", *overrides)
    with ExitStack() as closing:
        return cfg, *open_run(cfg, "a", tokenizer, (lines if lines is not None else []).append, closing)


def save_checkpoint(cfg, run, step=3):
    meta = {"config": OmegaConf.to_container(cfg, resolve=True), "tokenizer": BYTES.identity}
    checkpoint.save(run, step, {"model.w": torch.ones(2)}, meta)


def test_the_same_command_gives_the_same_name():
    overrides = ["optim.lr=1e-3", "ffn=dense_relu", "seed=7", "wandb.mode=disabled", "eval.interval=3"]
    cfg = compose_config(*overrides)
    assert run_name(cfg, overrides) == run_name(cfg, overrides[::-1]) == "nano-dense_relu-stdlib-optim.lr=0.001-seed=7"


@pytest.mark.parametrize(
    ("spellings", "part"),
    [
        (["ffn.l1.coef=3e-4", "ffn.l1.coef=0.0003", "ffn.l1.coef=0.30e-3"], "ffn.l1.coef=0.0003"),
        (["ffn.l1.coef=0", "ffn.l1.coef=0.0"], "ffn.l1.coef=0"),
        (["optim.lr=0.123456789"], "optim.lr=0.123456789"),
        (["steps=1000", "steps=1_000"], "steps=1000"),
        (["compile=true", "compile=True"], "compile=true"),
        (["ffn.l1.layer_weights=[1,2,1,1e-1]", "ffn.l1.layer_weights=[1.0, 2, 1, 0.1]"], "_1_2_1_0.1_"),
        (["data.tokenizer=gpt2", "data.tokenizer='gpt2'"], "data.tokenizer=gpt2"),
        (["optim=muon"], "optim=muon"),
        (["tokens=null"], "tokens=null"),
    ],
)
def test_a_value_has_one_name_however_it_is_written(spellings, part):
    (name,) = {run_name(compose_config(spelling), [spelling]) for spelling in spellings}
    assert name.endswith(part)


def test_a_name_that_looks_like_a_number_stays_as_it_is_written():
    for name in ("1e5", "007", "1_000", "true"):
        assert run_name(compose_config(f"name={name}"), [f"name={name}"]) == name
    assert run_name(compose_config('name="a=1"'), ['name="a=1"']) == "a=1"


def test_the_runs_of_a_sweep_cannot_share_a_name():
    cfg = compose_config("name=a")
    with pytest.raises(ConfigError, match=r"name=a in a sweep: .* out=runs/a"):
        run_name(cfg, ["name=a", "seed=1"], sweep=["seed"])
    assert run_name(cfg, ["name=a"], sweep=["name"]) == "a"
    assert swept_keys(["-m", "name=a", "seed=1,2", "ffn.l1.layer_weights=[1,2]", "optim=adamw,muon"]) == [
        "seed",
        "optim",
    ]


def test_a_name_given_is_the_name():
    assert run_name(compose_config("name=mine"), ["name=mine"]) == "mine"
    with pytest.raises(ConfigError, match=r"name=a/b: must be a plain folder name"):
        run_name(compose_config("name=a/b"), ["name=a/b"])


def test_paths_in_overrides_make_a_valid_folder_name():
    override = "data.paths=[/some/where/*.txt]"
    name = run_name(compose_config(override), [override])
    assert "/" not in name and "*" not in name


def test_long_names_are_cut_but_stay_different():
    overrides = [[f"data.paths=[{'x' * 300}]", f"seed={seed}"] for seed in (1, 2)]
    a, b = (run_name(compose_config(*each), each) for each in overrides)
    assert a != b and len(a) < 120


def test_a_fresh_run_has_nothing_to_resume_and_is_described_when_all_is_accepted(tmp_path):
    cfg, run, resumed = start(tmp_path)
    assert resumed is None and [path.name for path in run.iterdir()] == [".lock"]
    describe_run(run, cfg, BYTES)
    assert OmegaConf.load(run / "config.yaml").model.name == "nano"
    assert load_tokenizer(run / "tokenizer").identity == BYTES.identity


def test_a_run_in_use_is_refused_to_others_until_it_ends(tmp_path):
    cfg = compose_config(f"out={tmp_path}", "name=a")
    with ExitStack() as closing:
        open_run(cfg, "a", BYTES, print, closing)
        for resume in ("auto", "never"):
            with pytest.raises(UserError, match="a is in use by another process"):
                start(tmp_path, f"resume={resume}")
    start(tmp_path)


def test_another_tokenizer_is_refused(tmp_path):
    class Other(ByteTokenizer):
        identity = "f" * 64

    cfg, run, _ = start(tmp_path)
    save_checkpoint(cfg, run)
    with pytest.raises(UserError, match=r"data\.tokenizer=bytes: .* trained with another one"):
        start(tmp_path, tokenizer=Other())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out=.*file: cannot use"):
        start(tmp_path / "file")


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


def test_a_loss_that_is_not_finite_is_never_the_best():
    at = Progress(step=2, val_step=2, val_loss=math.nan)
    at.note_checkpoint()
    at.step, at.val_step, at.val_loss = 4, 4, 5.0
    at.note_checkpoint()
    assert at.best_step == 4


def test_progress_survives_json():
    at = Progress(step=3, train_seconds=1.5)
    assert Progress(**json.loads(json.dumps(at.__dict__))) == at


def test_a_run_to_start_from_that_is_not_there_is_named_with_its_key(tmp_path):
    with pytest.raises(UserError, match=r"^init=.*/nope: no checkpoint there"):
        start_from(tmp_path / "nope", {}, BYTES)
