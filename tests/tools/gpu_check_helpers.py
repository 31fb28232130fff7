"""A measured row, as a worker records it."""

from __future__ import annotations

from typing import Any


def entry(name: str, ours: float, operator: str = "f", **times: float) -> dict[str, Any]:
    every = {"ours": ours, **{key.replace("by_", "ours, by "): time for key, time in times.items()}}
    entries = {
        key: dict(min=time, q1=time, median=time, q3=time, how="graph", memory=1 << 20) for key, time in every.items()
    }
    row = dict(
        goal=None, entries=entries, work=dict(operations=10**9, moved=10**6), kind="bfloat16", errors={},
        refusals={"cuda": "ValueError: too wide"}, differences={}, served_by={operator: ["torch"]},
    )  # fmt: skip
    return {"end": name, "part": name.split(":")[0], "seconds": 1.0, "row": row}
