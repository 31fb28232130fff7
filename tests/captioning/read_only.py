"""A folder that cannot be written, also where the tests run as root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Let the process only read the folder. Root, whom permissions do not stop, is another user meanwhile."""
    root = os.geteuid() == 0
    for parent in folder.parents if root else ():  # pytest's are of their owner alone
        if parent.stat().st_mode & 0o5 != 0o5:
            parent.chmod(0o755)
    folder.chmod(0o555)
    try:
        if root:
            os.seteuid(NOBODY)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
