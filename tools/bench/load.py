"""CPU time of other processes during a measurement, from ``/proc/stat``.

The load average is unsuitable: it lags by a minute and counts the benchmark itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOADED = 0.15  # a row is marked if other processes use more CPUs than this
LOOK = 1.0  # seconds of a look at them
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
    """CPU use of other processes since creation."""

    def __init__(self) -> None:
        self._before = time.perf_counter(), busy_seconds(), own_seconds()

    def read(self) -> float | None:
        """Return the CPUs that other processes used on average; None if unknown."""
        wall, busy, own = self._before
        now = busy_seconds()
        if busy is None or now is None:
            return None
        return round(max(0.0, now - busy - own_seconds() + own) / (time.perf_counter() - wall), 3)


def sample() -> float | None:
    """Return the CPUs that other processes use while this one sleeps; None if unknown."""
    watch = Watch()
    time.sleep(LOOK)
    return watch.read()


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
