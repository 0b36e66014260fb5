import json
import re
import sys

import pytest

from twell import dashboard
from twell.config import ConfigError
from twell.dashboard import OVER_TOKENS, DashboardConfig, build
from twell.errors import UserError
from twell.tracking import METRICS

ws = pytest.importorskip("wandb_workspaces.workspaces")


def spec_of(workspace) -> dict:
    """What the server would get."""
    return workspace._to_model().model_dump(by_alias=True, exclude_none=True)["spec"]


@pytest.fixture
def server(monkeypatch):
    """A key, and in place of the server a dictionary of the workspaces saved, by URL."""
    saved = {}

    def save(self):
        if not self._internal_name:
            self._internal_name = f"nw-new{len(saved)}-v"
        saved[self.url] = self
        return self

    def from_url(url):
        if url not in saved:
            raise ValueError(f"Workspace `{url}` not found in project `twell`")
        return ws.Workspace._from_model(saved[url]._to_model())

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(ws.Workspace, "save", save)
    monkeypatch.setattr(ws.Workspace, "from_url", from_url)
    monkeypatch.setattr(
        ws.Workspace, "url", property(lambda self: f"https://server/{self.entity}/{self._internal_name}")
    )
    return saved


def test_panels_show_documented_metrics():
    keys = [key for entries in OVER_TOKENS.values() for _, key in entries]
    assert set(keys) <= METRICS.keys() and len(set(keys)) == len(keys)
    section = spec_of(build(DashboardConfig(), "me"))["section"]
    assert section["settings"]["shouldAutoGeneratePanels"] and section["settings"]["xAxis"] == "tokens"
    sections = section["panelBankConfig"]["sections"]
    configs = [panel["config"] for section in sections for panel in section["panels"] if "metrics" in panel["config"]]
    shown = {config["chartTitle"]: config for config in configs}
    assert shown["Validation loss"]["metrics"] == ["val/loss"] and shown["Validation loss"]["xAxis"] == "tokens"
    wall_clock = shown["Validation loss over wall-clock time"]
    assert (wall_clock["metrics"], wall_clock["xAxis"]) == (["val/loss"], "_runtime")
    assert shown["Training loss over seconds of training"]["xAxis"] == "perf/train_seconds"
    assert {"Tokens per second", "Share of dead neurons", "Peak memory, GB"} <= shown.keys()
    layers = shown["Active neurons per token, by layer"]
    assert layers["useMetricRegex"] and layers["yLogScale"]
    assert re.fullmatch(layers["metricRegex"], "sparsity/l0/layer_07")
    assert not re.fullmatch(layers["metricRegex"], "sparsity/l0_max/layer_07")
    scatter = next(p["config"] for p in sections[0]["panels"] if p["viewType"] == "Scatter Plot")
    assert (scatter["xAxis"], scatter["yAxis"]) == ("summary:sparsity/l0_mean", "summary:val/loss")


def test_runs_are_chosen_by_group_and_tag():
    def filters(**choice):
        spec = spec_of(build(DashboardConfig(**choice), "me"))
        leaves = spec["section"]["runSets"][0]["filters"]["filters"]
        return [(leaf["key"]["name"], leaf["op"], leaf["value"]) for leaf in leaves]

    assert filters() == []
    assert filters(group="124m-corpus") == [("group", "=", "124m-corpus")]
    assert filters(group="g", tag="l1") == [("group", "=", "g"), ("tags", "IN", ["l1"])]


def test_without_a_key_it_is_built_and_the_upload_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(dashboard, "has_wandb_key", lambda: False)
    with pytest.raises(UserError, match="not uploaded: no wandb key"):
        dashboard.main([f"out={tmp_path}"])
    assert "built 'dense and sparse' for project twell" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_same_command_updates(server, tmp_path, capsys):
    command = ["entity=me", f"out={tmp_path}/runs", "group=a"]
    dashboard.main(command)
    dashboard.main([*command[:2], "group=b"])
    assert len(server) == 1
    (url,) = server
    assert "'b'" in server[url].runset_settings.filters
    assert json.loads((tmp_path / "runs" / "dashboards.json").read_text()) == {"me/twell/dense and sparse": url}
    assert capsys.readouterr().out.count(f"uploaded: {url}") == 2
    server.clear()  # deleted by hand: created again
    dashboard.main(command)
    dashboard.main([*command, "name=another"])
    assert len(server) == 2


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"a": 1}', b"\xff", b"[" * 100_000])
def test_damaged_addresses(content, server, tmp_path):
    (tmp_path / "dashboards.json").write_bytes(content)
    with pytest.raises(UserError, match=r"dashboards\.json: cannot be read \(.*\); mend it, or delete it"):
        dashboard.main(["entity=me", f"out={tmp_path}"])
    assert not server and (tmp_path / "dashboards.json").read_bytes() == content


def test_an_update_keeps_what_was_set_for_runs(server, tmp_path):
    command = ["entity=me", f"out={tmp_path}"]
    dashboard.main(command)
    (url,) = server
    server[url].runset_settings.run_settings["abc"] = ws.RunSettings(color="#123456")
    server[url].sections = []
    dashboard.main(command)
    assert server[url].runset_settings.run_settings["abc"].color == "#123456" and len(server[url].sections) > 3


def test_mistakes_are_told(server, monkeypatch, tmp_path):
    url = "https://server/me/twell?nw=gone"
    with pytest.raises(UserError, match=rf"{re.escape(f'url={url}')}: .*not found"):
        dashboard.main(["entity=me", f"url={url}", f"out={tmp_path}"])
    for argument in ("url=notaurl", "url=https://server/x?nw=y", "url=https://server/me/twell", "project=", "name="):
        with pytest.raises(ConfigError, match=rf"^{re.escape(argument)}: (must be a workspace's|name )"):
            dashboard.main(["entity=me", argument, f"out={tmp_path}"])
    with pytest.raises(UserError, match="expected KEY=VALUE"):
        dashboard.main(["panels=3"])

    def fail(self):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(ws.Workspace, "save", fail)
    with pytest.raises(UserError, match=r"^not uploaded: no route to host; the same command tries again$"):
        dashboard.main(["entity=me", f"out={tmp_path}"])
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[dashboard\]'"):
        dashboard.main(["entity=me"])
