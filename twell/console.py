"""Lines that a run prints, from the values of its metrics."""

from typing import Any


def console_line(
    step: int, total_steps: int, values: dict[str, Any], eta_seconds: float, target_l0: float | None = None
) -> str:
    """The line that a logging interval prints; with `target_l0` also what the controller of L1 does."""
    mfu = values["perf/mfu"]
    parts = [
        f"step {step}/{total_steps}",
        f"loss {values['train/loss']:.4f}",
        f"lr {values['train/lr']:.2e}",
        f"norm {values['train/grad_norm']:.2f}",
        f"{values['perf/tokens_per_second']:,.0f} tok/s",
        f"MFU {'n/a' if mfu is None else f'{mfu:.1%}'}",
        f"{values['perf/memory_gb']:.1f} GB",
        f"ETA {format_seconds(eta_seconds)}",
    ]
    if values.get("sparsity/l0_mean") is not None:
        mean, density = values["sparsity/l0_mean"], values["sparsity/density"]
        firing = f"L0 {mean:.1f} ({density:.2%}, max {values['sparsity/l0_max']:.0f})"
        if target_l0 is not None:
            bound = " at its bound" if values["train/l1_at_bound"] else ""
            firing += f"  target {target_l0:g}, L1 {values['train/l1_coef']:.1e}{bound}"
        parts.insert(2, firing)
    return "  ".join(parts)


def validation_line(step: int, values: dict[str, Any]) -> str:
    """The lines that a validation prints: the model's losses beside what counting reaches, and the sample."""
    unigram, order3 = values["val/unigram_loss"], values["val/order3_bits_per_byte"]
    parts = [
        f"step {step}",
        f"validation loss {values['val/loss']:.4f}" + (f" (unigram {unigram:.4f})" if unigram is not None else ""),
        f"perplexity {values['val/perplexity']:.2f}",
        f"bits per byte {values['val/bits_per_byte']:.4f}"
        + (f" (order-3 byte table {order3:.4f})" if order3 is not None else ""),
    ]
    sample = f"\n  sample: {values['val/sample']!r}" if "val/sample" in values else ""
    return "  ".join(parts) + sample


def format_seconds(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
