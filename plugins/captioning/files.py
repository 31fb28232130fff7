"""Atomic writes of files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Write a temporary file next to ``path`` with ``save``, then rename it to ``path``.

    ``save`` receives a path with the same suffix. If it raises an error, ``path`` is unchanged and the temporary file
    is removed. A killed process leaves a file ``.*.partial-*`` next to ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The token is needed because processes on two machines may have the same id.
    partial = path.parent / f".{path.stem}.partial-{os.getpid()}-{secrets.token_hex(3)}{path.suffix}"
    try:
        save(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
