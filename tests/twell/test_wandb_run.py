import urllib.parse

import wandb

from twell.wandb_run import has_wandb_key


def test_a_key_is_found_where_wandb_stores_it(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_wandb_key()
    address = urllib.parse.urlparse(wandb.Settings().base_url).hostname
    for host, found in ((address, True), ("api.wandb.ai", True), ("example.org", False)):
        (tmp_path / ".netrc").write_text(f"machine {host} login user password {'k' * 40}\n")
        (tmp_path / ".netrc").chmod(0o600)
        assert has_wandb_key() == found
