import subprocess
import sys

import pytest
import torch
from omegaconf.errors import OmegaConfBaseException

from tests.training import compose_config
from twell.checks import validate
from twell.config import (
    CONFIG_DIR,
    ConfigError,
    accumulation_steps,
    explain,
    padded_vocab_size,
    total_steps,
)

PRESETS = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ffn", ["dense_silu", "dense_relu", "sparse", "sparse_nongated"])
def test_every_preset_and_ffn_kind_is_valid(preset, ffn):
    cfg = compose_config(f"model={preset}", f"ffn={ffn}")
    validate(cfg)
    assert cfg.model.name == preset and cfg.ffn.kind == ffn
    assert cfg.ffn.d_ff == (cfg.model.d_ff_nongated if ffn == "sparse_nongated" else cfg.model.d_ff)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_valid(experiment):
    validate(compose_config(f"experiment={experiment}"))


@pytest.mark.parametrize("data", sorted(path.stem for path in (CONFIG_DIR / "data").glob("*.yaml")))
def test_every_data_preset_composes(data):
    needed = {"hf": ["data.hf_path=x"]} | {key: ["data.paths=[x]"] for key in ("text", "jsonl", "shards")}
    validate(compose_config(f"data={data}", *needed.get(data, [])))


def test_the_command_line_overrides_an_experiment():
    cfg = compose_config("experiment=paper_1p5b", "ffn=dense_silu", "batch.tokens=524288")
    assert cfg.ffn.kind == "dense_silu" and cfg.batch.tokens == 524288 and cfg.model.n_layers == 28


def test_paper_recipes_say_which_l1_they_mean():
    cfg = compose_config("experiment=paper_1p5b")
    assert (cfg.ffn.l1.norm, cfg.ffn.l1.coef, cfg.optim.schedule.warmup) == ("sum", 2e-5, 600)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("ffn.l1.norm=max", ["ffn.l1.norm=max", "sum, mean"]),
        ("resume=maybe", ["resume=maybe", "auto, never"]),
        ("batch.micro=0", ["batch.micro=0", "at least 1"]),
        ("optim.lr=-1", ["optim.lr=-1", "at least 0"]),
        ("optim.lr=nan", ["optim.lr=nan"]),
        ("optim.lr=inf", ["optim.lr=inf", "finite"]),
        ("model.norm_eps=-1", ["model.norm_eps=-1", "above 0"]),
        ("seed=99999999999999999999", ["seed=99999999999999999999", "2^63"]),
        ("ffn.dead.after_tokens=99999999999999999999999", ["ffn.dead.after_tokens=9999", "2^63"]),
        ("ffn.l1.coef=1e300", ["ffn.l1.coef=1e+300", "at most 1e+06"]),
        ("ffn.l1.decay_to=1e30", ["ffn.l1.decay_to=1e+30", "at most 1e+06"]),
        ("optim.schedule.kind=wsd", ["wsd", "optim.schedule.decay"]),
        ("data.val_fraction=1.0", ["data.val_fraction=1.0", "[0, 1)"]),
        ("optim.betas=[0.9]", ["optim.betas=[0.9]", "two numbers"]),
        ("model.n_kv_heads=3", ["model.n_kv_heads=3", "model.n_heads=4"]),
        ("model.n_heads=5", ["model.n_heads=5", "model.d_model"]),
        ("steps=null", ["steps=null and tokens=null"]),
        ("data=jsonl", ["data.paths"]),
        ("data.streaming=true", ["data.streaming=true", "stdlib"]),
        (
            "batch.tokens=5000",
            ["batch.tokens=5000", "batch.micro", "model.seq_len", "WORLD_SIZE=1", "use 4096 or 8192"],
        ),
        ("optim.schedule.horizon=10", ["optim.schedule.horizon=10", "optim.schedule.warmup=100"]),
    ],
)
def test_what_cannot_work_is_refused_naming_flag_value_and_choices(override, parts):
    with pytest.raises(ConfigError) as caught:
        validate(
            compose_config(
                "batch.tokens=4096", "batch.micro=16", "model.n_heads=4", "optim.schedule.warmup=100", override
            )
        )
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("key", ["+foo", "+model.layers", "++stepz"])
def test_keys_added_by_force_are_refused_too(key):
    with pytest.raises(OmegaConfBaseException) as caught:
        validate(compose_config(f"{key}=3"))
    assert key.lstrip("+") in explain(caught.value) and "allowed here" in explain(caught.value)


def test_what_the_machine_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"compile=true on a CPU needs a C\+\+ compiler"):
        validate(compose_config("compile=true"))
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no GPU"):
        validate(compose_config("device=cuda"))
    monkeypatch.setattr("twell.checks.unsupported", lambda device, dtype, d_model: "no GPU")
    with pytest.raises(ConfigError, match=r"ffn\.impl=triton: no GPU; use ffn\.impl=auto"):
        validate(compose_config("ffn.impl=triton"))


def test_l1_and_triton_are_refused_for_dense_kinds():
    with pytest.raises(ConfigError, match=r"ffn\.l1\.coef=0\.1 with ffn\.kind=dense_relu"):
        validate(compose_config("ffn=dense_relu", "ffn.l1.coef=0.1"))
    with pytest.raises(ConfigError, match=r"ffn\.impl=triton with ffn\.kind=dense_silu"):
        validate(compose_config("ffn=dense_silu", "ffn.impl=triton"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("ffn.l1.coeff=1", ["ffn.l1.coeff", "did you mean 'coef'", "warmup_steps"]),
        ("modle.d_model=1", ["modle", "did you mean 'model'"]),
        ("optim.lr=fast", ["optim.lr", "'fast'"]),
        ("batch.micro=1.5", ["batch.micro", "1.5"]),
        ("data.paths=x", ["data.paths", "data.paths=[...]"]),
        ("model=huge", ["model/huge", "allowed are", "124m", "nano"]),
        ("steps", ["steps"]),
        ("name=a=b", ["name=a=b", """'name="..."'"""]),
    ],
)
def test_unknown_keys_and_wrong_types_are_explained(override, parts):
    with pytest.raises(Exception) as caught:
        compose_config(override)
    message = explain(caught.value)
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_a_config_mistake_is_one_line_on_the_command_line(tmp_path):
    command = [sys.executable, str(CONFIG_DIR.parent / "train.py"), "ffn.l1.coeff=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().count("\n") == 0 and "did you mean 'coef'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_accumulation_divides_among_the_ranks_that_run():
    cfg = compose_config("batch.tokens=8192", "batch.micro=4", "model.seq_len=256")
    assert accumulation_steps(cfg, 1) == 8 and accumulation_steps(cfg, 2) == 4
    with pytest.raises(ConfigError, match="WORLD_SIZE=3 = 3072; use 6144 or 9216"):
        accumulation_steps(cfg, 3)


def test_run_length_in_tokens_rounds_up_to_whole_steps():
    assert total_steps(compose_config("tokens=10000", "batch.tokens=4096")) == 3


def test_vocabulary_is_padded_or_refused():
    assert padded_vocab_size(compose_config(), 257) == 384
    assert padded_vocab_size(compose_config("model.vocab_size=300"), 257) == 300
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100 is smaller than the 257 ids"):
        padded_vocab_size(compose_config("model.vocab_size=100"), 257)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.mode=dp"], r"parallel\.mode=dp: allowed are ddp, zero1, fsdp"),
        (["parallel.shard_size=2"], r"parallel\.shard_size=2 with parallel\.mode=ddp"),
        (["parallel=fsdp", "parallel.shard_size=3"], r"parallel\.shard_size=3 does not divide WORLD_SIZE=4"),
        (["parallel=zero1", "optim=muon"], r"optim=muon with parallel\.mode=zero1"),
    ],
)
def test_what_cannot_be_divided_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        validate(compose_config(*overrides), world_size=4)
