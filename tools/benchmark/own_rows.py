"""Our own rows in a separate process, for :mod:`.against`: reads settings as JSON, prints times as JSON.

The cases are those of the comparing checkout, ``attn_plugins`` that of the measured one.
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
    """Return our times by row, or the first line of the error that a row raised.

    Args:
        settings: ``names`` of benchmarks, ``k``, ``device``, ``threads``, ``rounds``, ``min_rounds`` and ``seconds``.
    """
    torch.set_num_threads(settings["threads"])
    found: dict[str, Any] = {}
    limits = Settings(settings["seconds"], settings["rounds"], settings["min_rounds"])
    for name in settings["names"]:
        try:
            chosen = cases(name, settings["device"])
        except (ImportError, AttributeError) as error:  # missing in the other checkout
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
    """Run the measurement that the first argument describes in JSON."""
    import attn_plugins

    rows = times(json.loads(sys.argv[1]))
    package = str(Path(attn_plugins.__file__ or "").resolve().parent)
    print(MARK + json.dumps({"package": package, "rows": rows}))
