"""Folders created from a recipe, completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_made(folder: Path, recipe: dict) -> bool:
    """Return whether ``folder`` holds a set made from ``recipe``; False if it is empty or missing.

    Raises:
        ValueError: ``folder`` holds something else, or a set of another recipe.
    """
    stamp = folder / "recipe.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == recipe:
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = f"a set of another recipe ({stamp.read_text()})" if stamp.is_file() else "other files"
        raise ValueError(f"{folder} holds {what}; remove it or name another folder")
    return False


@contextmanager
def new_folder(folder: Path, recipe: dict) -> Iterator[Path]:
    """Yield a new folder next to ``folder``; afterwards write ``recipe.json`` to it and rename it to ``folder``."""
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    yield partial
    (partial / "recipe.json").write_text(json.dumps(recipe, indent=1))
    if folder.is_dir():
        folder.rmdir()
    partial.rename(folder)
