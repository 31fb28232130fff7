"""A line that tells how far a run over pictures is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta


class Progress:
    """Rewrites its line on a terminal, else prints one every twentieth part.

    Args:
        total: How many pictures there are.
        count: How many of them are done, and how many were skipped; asked for at most every ``seconds``.
        seconds: Between two questions.
    """

    def __init__(self, total: int, count: Callable[[], tuple[int, int]], seconds: float = 0) -> None:
        self.total, self.count, self.seconds = total, count, seconds
        self.first, self.began, self.asked = sum(count()), time.monotonic(), time.monotonic()
        self.terminal, self.shown, self.line = sys.stdout.isatty(), -1, ""

    def show(self, last: bool = False) -> None:
        """Print the line where there is something new; the ``last`` one in any case."""
        now = time.monotonic()
        if not last and now - self.asked < self.seconds:
            return
        self.asked = now
        done, skipped = self.count()
        gone = done + skipped
        part = 20 * gone // self.total
        if not self.terminal and part <= self.shown and not last:
            return
        rate = (gone - self.first) / max(now - self.began, 1e-9)
        left = timedelta(seconds=round((self.total - gone) / rate)) if rate else "unknown"
        line = f"{gone}/{self.total} images, {rate:.1f} a second, left {left}"
        line += f", {skipped} skipped" if skipped else ""
        if self.terminal or part > self.shown or gone != self.total:
            print(f"{line}   ", end="\r" if self.terminal and not last else "\n", flush=True)
        self.shown = part
