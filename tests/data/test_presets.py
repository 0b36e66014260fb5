from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from data.prepare import prepare
from twell.checks import validate
from twell.config import register

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = sorted(path.stem for path in (CONFIGS / "data").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_the_schema_and_names_itself(name):
    register()
    paths = ["data.paths=[x]"] if name in ("text", "jsonl", "shards") else []
    hub = ["data.hf_path=x"] if name == "hf" else []
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = OmegaConf.to_object(compose("config", overrides=[f"data={name}", *paths, *hub]))
    validate(OmegaConf.structured(cfg))
    assert cfg.data.name == name


def test_default_prepares_the_standard_library_with_bytes(tmp_path):
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = OmegaConf.to_object(compose("config", overrides=[f"data.dir={tmp_path}", "data.workers=1"])).data
    prepared = prepare(cfg, log=lambda line: None)
    assert prepared.tokenizer.name == "bytes" and prepared.folder.name.startswith("stdlib-bytes-")
    assert prepared.train_tokens > 5_000_000 and prepared.val_tokens > 20_000
    assert prepared.meta["text_bytes"][0] + prepared.meta["documents"][0] == prepared.train_tokens
