"""The entry of a run in wandb: online with a key, else offline, and never a reason for the run to wait or to end."""

import netrc
import os
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from twell.config import Config
from twell.errors import first_line

WANDB_TIMEOUT = 30  # seconds to wait for the server before logging offline


def start_wandb(
    cfg: Config, run: Path, wandb_id: str | None, tags: Sequence[str] | None, log: Callable[[str], None]
) -> Any:
    """A wandb run, or None; says once, in one line, what it decided. Never prompts, never stops the run.

    tags: replace those of an entry that exists; None leaves them.
    """
    mode = cfg.wandb.mode
    if mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        log("wandb: not installed, so metrics go to metrics.jsonl only (pip install wandb)")
        return None
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or "online"
    if mode == "disabled":
        return None
    if mode == "online" and not has_wandb_key():  # wandb would ask for one
        mode = "offline"
    options = {
        "id": wandb_id,
        "resume": "allow" if wandb_id else None,
        "name": run.name,
        "dir": str(run),
        "project": cfg.wandb.project,
        "entity": cfg.wandb.entity,
        "group": cfg.wandb.group or f"{cfg.model.name}-{cfg.data.name}",
        "tags": tags,
        "config": OmegaConf.to_container(cfg, resolve=True),
    }
    for attempt in dict.fromkeys([mode, "offline"]):
        try:
            settings = wandb.Settings(silent=True, console="off", init_timeout=WANDB_TIMEOUT)
            handle = wandb.init(mode=attempt, settings=settings, reinit="finish_previous", **options)
            handle.define_metric("tokens")
            handle.define_metric("*", step_metric="tokens")
        except Exception as error:  # whatever wandb raises, a dashboard must not cost the run
            log(f"wandb: {attempt} failed: {first_line(error)}")
        else:
            hint = f"; `wandb sync {Path(handle.dir).parent}` uploads it" if attempt == "offline" else ""
            log(f"wandb: {attempt}{hint}")
            return handle
    return None


def has_wandb_key() -> bool:
    """Whether a key is configured, without asking wandb, which might prompt."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    # The default address has changed over time; wandb still accepts a key that was stored under the first one.
    addresses = (os.environ.get("WANDB_BASE_URL", wandb.Settings().base_url), "https://api.wandb.ai")
    try:
        stored = netrc.netrc()
    except (OSError, netrc.NetrcParseError):
        return False
    return any(stored.authenticators(urllib.parse.urlparse(address).hostname) for address in addresses)
