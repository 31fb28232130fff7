"""CPU time of other processes during a measurement, from ``/proc/stat``.

The load average is unsuitable: it lags by a minute and counts the benchmark itself.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOADED = 0.15  # a row is marked if other processes use more CPUs than this
STAT = Path("/proc/stat")


def busy_seconds() -> float | None:
    """Return the CPU seconds that this machine's processes, and its host (steal), have used; None if unknown."""
    try:
        fields = STAT.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    if fields[:1] != ["cpu"] or len(fields) < 9:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the CPU seconds that this process and its finished children have used."""
    return sum(os.times()[:4])


class Watch:
    """CPU use of other processes, and involuntary context switches, since creation."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float | None, float, int]:
        switches = sum(resource.getrusage(who).ru_nivcsw for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return time.perf_counter(), busy_seconds(), own_seconds(), switches

    def read(self) -> dict[str, Any]:
        """Return ``others``, CPUs that other processes used on average (None: unknown), and ``switches``."""
        wall, busy, own, switches = (
            None if after is None or before is None else after - before
            for after, before in zip(self._now(), self._before)
        )
        others = None if busy is None or not wall else round(max(0.0, busy - own) / wall, 3)
        return {"others": others, "switches": switches}


def sample(seconds: float = 1.0) -> float | None:
    """Return the CPUs that other processes use while this one sleeps; None if unknown."""
    watch = Watch()
    time.sleep(seconds)
    return watch.read()["others"]


def wait_until_quiet(limit: float, look: Callable[[], float | None] = sample) -> float | None:
    """Wait up to ``limit`` seconds for other processes to leave the CPUs; return their last use."""
    end = time.perf_counter() + limit
    while True:
        others = look()
        if others is None or others <= LOADED or time.perf_counter() >= end:
            return others


def words(others: float | None) -> str:
    """Return the CPU use of other processes as text for a page."""
    return "unknown" if others is None else f"{others:.2f} CPUs"
