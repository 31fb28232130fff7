"""Folders of data sets, written completely or not at all."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Show = Callable[[str], None]  # prints progress


def show_progress(line: str) -> None:
    """Print a line that the next one replaces; without a terminal, one line in a hundred."""
    terminal = sys.stdout.isatty()
    if terminal or line.split("/")[0].endswith("00"):
        print(f"{line}   ", end="\r" if terminal else "\n", flush=True)


def check_free(folder: Path) -> None:
    """Raise a ValueError if ``folder`` is a file or holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; remove it or name another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to ``folder``; then rename it to ``folder``, or remove it after an error.

    Raises:
        ValueError: ``folder`` is a file or holds something.
    """
    check_free(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
