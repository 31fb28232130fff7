"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Write a file beside ``path`` with ``save``, then rename it to ``path``.

    ``save`` gets a path of the same suffix. Where it raises, ``path`` stays as it was and nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial-{os.getpid()}{path.suffix}")
    try:
        save(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
