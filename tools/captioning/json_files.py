"""Reading of JSON files for the captioning tools, with errors that name the file and the item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ImageId = int | str


class BadFile(ValueError):
    """An invalid file; the message names it and the item."""


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadFile(f"{path} is not JSON: {error}") from error


def items(path: Path, rows: Any, where: str, keys: dict[str, type | tuple[type, ...]]) -> list[dict]:
    """Return ``rows``, which must be a list of objects that have ``keys`` of these types."""
    if not isinstance(rows, list):
        raise BadFile(f"{path}: {where} must be a list, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        for key, kind in keys.items():
            value = row.get(key) if isinstance(row, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool):
                name = kind.__name__ if isinstance(kind, type) else "/".join(k.__name__ for k in kind)
                raise BadFile(f"{path}: item {number} of {where} must have {key!r} of type {name}, got {row!r:.120}")
    return rows


def some(images: list[ImageId]) -> str:
    """Return ``image 3``, or ``4 images (3, 5, 8, ...)``."""
    if len(images) == 1:
        return f"image {images[0]}"
    return f"{len(images)} images ({', '.join(map(str, images[:3]))}{', ...' if len(images) > 3 else ''})"
