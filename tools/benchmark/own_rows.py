"""Our own rows in a process of its own, for :mod:`.against`: reads a JSON of settings, prints a JSON of times.

The cases come from the checkout that compares, ``attn_plugins`` from the one that is measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from .measure import Settings, interleaved
from .operators import cases

MARK = "own rows: "


def times(settings: dict[str, Any]) -> dict[str, Any]:
    """Return, by row, the times of ours, or the first line of the error that it raised.

    Args:
        settings: ``names`` of benchmarks, ``k``, ``device``, ``threads``, ``rounds``, ``min_rounds`` and ``seconds``.
    """
    torch.set_num_threads(settings["threads"])
    found: dict[str, Any] = {}
    limits = Settings(settings["seconds"], settings["rounds"], settings["min_rounds"])
    for name in settings["names"]:
        try:
            chosen = cases(name, settings["device"])
        except (ImportError, AttributeError) as error:  # what the other checkout does not have yet
            found[name] = {"error": first_line(error)}
            continue
        for case in chosen:
            if settings["k"] not in case.name:
                continue
            torch.manual_seed(0)
            torch.set_num_threads(case.threads or settings["threads"])
            try:
                run = case.ours()
                run()
                measured = interleaved({"ours": run}, settings["device"], limits, case.calls)["ours"]
                found[f"{name}: {case.name}"] = {"times": measured}
            except (ImportError, AttributeError, TypeError, RuntimeError, ValueError) as error:
                found[f"{name}: {case.name}"] = {"error": first_line(error)}
            torch.set_num_threads(settings["threads"])
    return found


def first_line(error: Exception) -> str:
    """Return the error's kind and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def main() -> None:
    """Measure as the JSON in the first argument says."""
    import attn_plugins

    rows = times(json.loads(sys.argv[1]))
    package = str(Path(attn_plugins.__file__ or "").resolve().parent)
    print(MARK + json.dumps({"package": package, "rows": rows}))
