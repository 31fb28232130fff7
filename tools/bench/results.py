"""Files of measured rows: format, command, reading and writing.

A file holds ``format``, ``benchmark``, ``device``, ``command`` (as run, with all its options), ``machine`` (CPU,
versions, date), ``load`` (of other processes before and after) and ``rows`` from :mod:`.measure`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

from tools.files import write_text

FORMAT = 2
FOLDER = Path(__file__).parents[2] / "benchmarks"
UNSHOWN = ("help", "names", "resume", "minutes", "row_seconds", "warm")  # of a page's command


def command_line(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Return the command that was run, with all options that change what is measured, including defaults.

    Options without a value (None, empty, False) are left out, and so is the default folder of results.
    """
    words = [*parser.prog.split(), *options.names]
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.dest in UNSHOWN or value is None or value is False or value in ("", FOLDER):
            continue
        words.append(action.option_strings[0])
        if value is not True:
            values = value if isinstance(value, list) else [value]
            words += [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return shlex.join(words)


def write(folder: Path, name: str, data: dict[str, Any], text: str) -> Path:
    """Write ``name.json`` and the page ``name.md`` made from it; return the page's path."""
    write_text(folder / f"{name}.json", dump(data))
    write_text(folder / f"{name}.md", text)
    return folder / f"{name}.md"


def dump(data: dict[str, Any]) -> str:
    """Return JSON with lists of numbers on one line each."""
    text = json.dumps({"format": FORMAT, **data}, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+(-?\d[-+.\deE,\s]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def read(path: Path) -> dict[str, Any] | None:
    """Return a file's content; None if it is missing or of another format."""
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if data.get("format") == FORMAT else None
