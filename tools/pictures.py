"""Pictures from files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


class BadPicture(RuntimeError):
    """A file that is no picture."""


def open_picture(file: str | Path) -> Image.Image:
    """The picture in RGB.

    Raises:
        BadPicture: the file cannot be read as one.
    """
    try:
        with Image.open(file) as picture:
            return picture.convert("RGB")
    except Exception as error:
        raise BadPicture(f"{file} cannot be read as a picture: {error}") from error
