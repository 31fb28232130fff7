"""Statistics of repeated timings: minimum, quartiles, noise, and the better peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NOISY = 1.3  # upper over lower quartile


def summarize(times: Sequence[float]) -> dict[str, Any]:
    """Return ``min``, ``q1``, ``median``, ``q3`` and the ``times`` themselves, to five digits.

    Raises:
        ValueError: there is no time.
    """
    if not times:
        raise ValueError("times must hold at least one timing, got none")
    times = [float(f"{t:.5g}") for t in times]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    q1, median, q3 = (float(f"{t:.5g}") for t in quartiles)
    return {"min": min(times), "q1": q1, "median": median, "q3": q3, "times": times}


def spread(found: Mapping[str, Any]) -> float:
    """Return the ratio of the upper to the lower quartile."""
    return found["q3"] / found["q1"]


def compared(case: str, ours: dict[str, Any], peers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a row: the better peer (None if none ran), and its ratios to ours, by minimum and by memory.

    It is noisy if ours or that peer varies more than :data:`NOISY`-fold between its quartiles.
    """
    ran = [name for name, found in peers.items() if "min" in found]
    best = min(ran, key=lambda name: peers[name]["min"], default=None)
    return {
        "case": case,
        "ours": ours,
        "peers": peers,
        "better_peer": best,
        "ratio": None if best is None else peers[best]["min"] / ours["min"],
        "memory_ratio": None if best is None else ours["memory"] / max(1, peers[best]["memory"]),
        "noisy": max(map(spread, (ours, *([peers[best]] if best else ())))) > NOISY,
        **more,
    }
