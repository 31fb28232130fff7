"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write(path: Path, save: Callable[[Path], object], folder: Path | None = None) -> None:
    """Write a file beside ``path`` with ``save``, then rename it to ``path``.

    ``save`` gets a path of the same suffix. Where it raises, ``path`` stays as it was and nothing is left behind. A
    process that is killed leaves a file ``.*.partial-*`` beside ``path``, or in ``folder``, on the same file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes on two machines may have the same id.
    partial = (folder or path.parent) / f".{path.stem}.partial-{os.getpid()}-{secrets.token_hex(3)}{path.suffix}"
    try:
        save(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def complete_lines(path: Path) -> list[bytes]:
    """Lines of a file that is appended to, without a last one that is cut off; a missing file has none."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [line for line in lines if line.endswith(b"\n")]
