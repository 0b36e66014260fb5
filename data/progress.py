"""How far a preparation is: a bar that redraws itself on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Callable
from time import monotonic

_BAR = 30
_REDRAW_SECONDS, _LINE_SECONDS = 0.2, 15.0


class Progress:
    """total: the source's size, None if unknown; log: takes the lines written when stderr is not a terminal."""

    def __init__(self, label: str, total: int | None, log: Callable[[str], None]):
        self._label, self._total, self._log = label, total, log
        self._terminal = sys.stderr.isatty()
        self._start = self._last = monotonic()
        self._skipped = 0

    def skip(self, done: int) -> None:
        """`done` of the total was there before; it does not count for the speed."""
        self._skipped = done

    def update(self, done: int, text_bytes: int, tokens: int) -> None:
        """done: how much of the total has been read; text_bytes: text encoded by this process; tokens: in all."""
        now = monotonic()
        if now - self._last < (_REDRAW_SECONDS if self._terminal else _LINE_SECONDS):
            return
        self._last = now
        elapsed = now - self._start
        line = f"{tokens / 1e6:.1f}M tokens, {text_bytes / 1e6 / elapsed:.1f} MB/s"
        if self._total:
            share = min(done / self._total, 1.0)
            fresh = max(done - self._skipped, 1)
            left = max(self._total - done, 0) * elapsed / fresh
            line = f"{share:4.0%} {line}, {left:.0f} s left"
            if self._terminal:
                line = f"[{'=' * round(share * _BAR):{_BAR}}] {line}"
        if self._terminal:
            print(f"\r{self._label} {line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            self._log(f"{self._label} {line}")

    def close(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
