"""Create or update a wandb workspace that compares dense and sparse runs.

    python -m twell.dashboard project=twell group=124m-corpus
    python -m twell.dashboard tag=l1-sweep               # runs that were started with wandb.tags=[l1-sweep]

Keys are the fields of `DashboardConfig`. The same command again updates the workspace that it created: its panels, not
what you set for its runs. Building needs no network; without a key or a server the upload is refused, which is said.
Runs that were logged offline appear once `wandb sync` has uploaded them. Needs wandb-workspaces:
pip install -e '.[dashboard]'.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from twell.arguments import check_values, parse_arguments, run_command
from twell.errors import UserError, first_line
from twell.wandb_run import has_wandb_key

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

MOST_RUNS = 20  # lines in one panel


@dataclass
class DashboardConfig:
    project: str = "twell"
    entity: str | None = None  # null = the key's default entity
    group: str | None = None  # show only the runs of this wandb group, by default MODEL-DATA
    tag: str | None = None  # show only the runs with this tag
    name: str = "dense and sparse"  # of the workspace
    url: str | None = None  # update this workspace; null = the one created before under these names, else a new one
    out: str = "runs"  # where the addresses of the workspaces created are kept, in dashboards.json


# (title, key over tokens); a key with {i} stands for all numbers.
OVER_TOKENS = {
    "Loss": (
        ("Validation loss", "val/loss"),
        ("Bits per byte of text", "val/bits_per_byte"),
        ("Training loss", "train/loss"),
    ),
    "Speed and memory": (
        ("Tokens per second", "perf/tokens_per_second"),
        ("Model FLOPs utilisation", "perf/mfu"),
        ("FLOPs executed over those of the dense model", "perf/executed_flops"),
        ("Peak memory, GB", "perf/memory_gb"),
        ("Share of time waiting for data", "perf/data_wait_share"),
    ),
    "Sparsity": (
        ("Active neurons per token", "sparsity/l0_mean"),
        ("Density", "sparsity/density"),
        ("Share of dead neurons", "sparsity/dead_share"),
        ("Neurons revived", "sparsity/revived"),
        ("Share of firings that the hottest 1 % of neurons have", "sparsity/hottest_1pct"),
        ("Active neurons per token, by eighth of the sequence", "sparsity/l0_part/part_{i}"),
        ("L1 coefficient", "train/l1_coef"),
    ),
    "Layers": (
        ("Active neurons per token, by layer", "sparsity/l0/layer_{i}"),
        ("Active neurons that 99 % of tokens do not exceed, by layer", "sparsity/l0_p99/layer_{i}"),
        ("Most active neurons of any token, by layer", "sparsity/l0_max/layer_{i}"),
        ("Share of dead neurons, by layer", "sparsity/dead_share/layer_{i}"),
        ("L1 coefficient, by layer", "train/l1_coef/layer_{i}"),
        ("1 where a layer computes only the non-zeros", "sparsity/route/layer_{i}"),
    ),
    "Health": (
        ("Gradient norm", "train/grad_norm"),
        ("Learning rate", "train/lr"),
        ("Skipped steps", "train/skipped_steps"),
        ("Repeated steps", "train/repeated_steps"),
    ),
}
LOGARITHMIC = ("sparsity/l0", "sparsity/density")  # what the keys start with


def build(cfg: DashboardConfig, entity: str) -> "Workspace":
    """The workspace as an object; touches no network."""
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
        from wandb_workspaces import expr
    except ImportError as error:
        raise UserError("a dashboard needs wandb-workspaces: pip install -e '.[dashboard]'") from error

    def panel(title: str, key: str) -> wr.LinePlot:
        layers = {"metric_regex": key.replace("{i}", r"\d+")} if "{i}" in key else {"y": [key]}
        return wr.LinePlot(title=title, x="tokens", log_y=key.startswith(LOGARITHMIC) or None, **layers)

    sections = [
        ws.Section(name=name, panels=[panel(*entry) for entry in entries], is_open=name != "Health")
        for name, entries in OVER_TOKENS.items()
    ]
    sections[0].panels += [
        # A record of a validation has no perf/train_seconds; wandb gives each record the time since the run's start.
        wr.LinePlot(title="Validation loss over wall-clock time", x="RelativeTime(Process)", y=["val/loss"]),
        wr.LinePlot(
            title="Training loss over seconds of training",
            x="perf/train_seconds",
            y=["train/loss"],
            smoothing_type="gaussian",
            smoothing_factor=2,
        ),
        wr.ScatterPlot(
            title="What sparsity costs: validation loss over active neurons",
            x=wr.SummaryMetric("sparsity/l0_mean"),
            y=wr.SummaryMetric("val/loss"),
            log_x=True,
        ),
        wr.RunComparer(diff_only=True),
    ]
    chosen = [expr.Metric("Group") == cfg.group] if cfg.group else []
    chosen += [expr.Tags("tags").isin([cfg.tag])] if cfg.tag else []
    return ws.Workspace(
        entity=entity,
        project=cfg.project,
        name=cfg.name,
        sections=sections,
        auto_generate_panels=True,  # below ours: what wandb itself makes of the histograms and tables
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(filters=expr.And(*chosen) if chosen else ""),
    )


def upload(built: "Workspace", url: str | None) -> str:
    """Save a workspace on the server: that of `url` gets its panels and filters, None makes a new one. Returns its URL.

    Raises LookupError when there is none at `url`.
    """
    if url is not None:
        try:
            existing = type(built).from_url(url)
        except ValueError as error:
            raise LookupError(first_line(error)) from error
        existing.name, existing.sections, existing.settings = built.name, built.sections, built.settings
        existing.runset_settings.filters = built.runset_settings.filters
        built = existing
    return built.save().url


def main(arguments: Sequence[str]) -> None:
    cfg = parse_arguments(arguments, DashboardConfig, __doc__)
    _check(cfg)
    built = build(cfg, cfg.entity or "")
    n_panels = sum(len(section.panels) for section in built.sections)
    print(f"built {cfg.name!r} for project {cfg.project}: {n_panels} panels in {len(built.sections)} sections")
    if not has_wandb_key():
        raise UserError("not uploaded: no wandb key is configured; run `wandb login`, then the same command again")
    addresses = Path(cfg.out) / "dashboards.json"
    known = _read_addresses(addresses)
    try:
        if not built.entity:
            import wandb

            built.entity = wandb.Api().default_entity
        key = f"{built.entity}/{cfg.project}/{cfg.name}"
        try:
            url = upload(built, cfg.url or known.get(key))
        except LookupError as error:
            if cfg.url:
                raise UserError(f"url={cfg.url}: {error}") from error
            url = upload(built, None)  # somebody has deleted it
    except UserError:
        raise
    except Exception as error:  # whatever wandb or the network raises
        raise UserError(f"not uploaded: {first_line(error)}; the same command tries again") from error
    addresses.parent.mkdir(parents=True, exist_ok=True)
    addresses.write_text(json.dumps(known | {key: url}, indent=1) + "\n")
    print(f"uploaded: {url}")


def _check(cfg: DashboardConfig) -> None:
    """Raise ConfigError for the first value that cannot be."""
    address = urlparse(cfg.url or "")
    is_workspace = address.scheme in ("http", "https") and len(address.path.split("/")) == 3 and "nw=" in address.query
    rules = (
        (cfg.project != "", "project", "name a wandb project"),
        (cfg.name != "", "name", "name the workspace"),
        (cfg.url is None or is_workspace, "url", "must be a workspace's, https://HOST/ENTITY/PROJECT?nw=ID"),
    )
    check_values(cfg, rules)


def _read_addresses(path: Path) -> dict[str, str]:
    """The URLs of the workspaces created so far, by name; UserError if the file that keeps them is damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not isinstance(known, dict) or not all(isinstance(url, str) for url in known.values()):
            raise ValueError("not an object of addresses")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); mend it, or delete it and give url=... of your workspace"
        ) from error
    return known


if __name__ == "__main__":
    run_command(main)
