"""Progress line of a run over pictures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta


class Progress:
    """Progress that rewrites its line on a terminal, and otherwise prints a line for every twentieth of the run.

    Args:
        total: Number of pictures.
        count: Returns how many are done and how many were skipped; called at most every ``seconds``.
        seconds: Minimum time between two calls of ``count``.
    """

    def __init__(self, total: int, count: Callable[[], tuple[int, int]], seconds: float = 0) -> None:
        self.total, self.count, self.seconds = total, count, seconds
        self.first, self.began, self.asked = sum(count()), time.monotonic(), time.monotonic()
        self.terminal, self.shown, self.line = sys.stdout.isatty(), -1, ""

    def show(self, last: bool = False) -> None:
        """Print the line if it has changed, or if it is the ``last``."""
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
