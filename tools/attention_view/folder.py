"""Unique folders for pairs of a model and a picture."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORD = "shown.json"


def own_folder(
    root: Path, model: str, arguments: Sequence[str], checkpoint: Path | None, image: Path
) -> tuple[Path, str]:
    """Return the folder of a model and a picture, which no other pair shares.

    The folder is ``root/MODEL/PICTURE``; the checkpoint's folder and name follow the model's. A number is appended if
    the folder belongs to another pair with equal names from other folders.

    Args:
        root: Parent of all such folders.
        model: timm's name, or a config.
        arguments: Arguments of the model, ``KEY=VALUE``.
        checkpoint: Its weights, if any.
        image: The picture's file.

    Returns:
        The folder, which need not exist, and the text for its file :data:`RECORD`.
    """
    made: dict[str, Any] = dict(model=model, model_args=list(arguments), image=str(image.resolve()))
    made["checkpoint"] = None if checkpoint is None else str(checkpoint.resolve())
    if model.endswith(".py") and "::" not in model:
        made["model"] = str(Path(model).resolve())
    name = Path(model.rpartition("::")[2]).stem if model.endswith(".py") else model.replace("/", "_")
    if checkpoint is not None:
        name = "-".join(filter(None, (name, checkpoint.resolve().parent.name, checkpoint.stem)))
    text = json.dumps(made, indent=1) + "\n"
    numbered = (f"{image.stem}-{n}" if n > 1 else image.stem for n in itertools.count(1))
    folders = (root / name / picture for picture in numbered)
    return next(folder for folder in folders if not folder.exists() or _record(folder) == text), text


def _record(folder: Path) -> str | None:
    record = folder / RECORD
    return record.read_text() if record.is_file() else None
