"""Unique folders for pairs of a model and a picture or sentence."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.files import write_text

ROOT, RECORD = Path("work_dirs/attention"), "shown.json"


def own_folder(model: str, arguments: Sequence[str], checkpoint: Path | None, image: Path) -> Path:
    """Create the folder of a model with its ``KEY=VALUE`` arguments and a picture, with a record of both.

    The folder is ``work_dirs/attention/MODEL/PICTURE``; the checkpoint's folder and name follow the model's. A number
    is appended if it belongs to another pair with equal names from other folders.
    """
    made: dict[str, Any] = dict(model=model, model_args=list(arguments), image=str(image.resolve()))
    made["checkpoint"] = None if checkpoint is None else str(checkpoint.resolve())
    if model.endswith(".py") and "::" not in model:
        made["model"] = str(Path(model).resolve())
    name = Path(model.rpartition("::")[2]).stem if model.endswith(".py") else model.replace("/", "_")
    if checkpoint is not None:
        name = "-".join(filter(None, (name, checkpoint.resolve().parent.name, checkpoint.stem)))
    text = json.dumps(made, indent=1) + "\n"
    for number in itertools.count(1):
        folder = ROOT / name / (f"{image.stem}-{number}" if number > 1 else image.stem)
        record = folder / RECORD
        if not folder.exists() or (record.is_file() and record.read_text() == text):
            write_text(record, text)
            return folder
    raise AssertionError
