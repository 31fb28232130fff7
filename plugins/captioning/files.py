"""Atomic writes, and files of complete lines."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write(path: Path, save: Callable[[Path], object], folder: Path | None = None) -> None:
    """Write a temporary file next to ``path`` with ``save``, then rename it to ``path``.

    ``save`` receives a path with the same suffix. If it raises an error, ``path`` is unchanged and the temporary file
    is removed. A killed process leaves a file ``.*.partial-*`` next to ``path``, or in ``folder`` if given, which must
    be on the same file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The token is needed because processes on two machines may have the same id.
    partial = (folder or path.parent) / f".{path.stem}.partial-{os.getpid()}-{secrets.token_hex(3)}{path.suffix}"
    try:
        save(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def complete_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file that is being appended to; a missing file has none."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [line for line in lines if line.endswith(b"\n")]
