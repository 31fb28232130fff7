"""Pictures from files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps


class BadPicture(RuntimeError):
    """A file that is no picture."""


def open_picture(file: str | Path) -> Image.Image:
    """The picture in RGB, upright as its EXIF tag says, on white where it is transparent.

    Raises:
        BadPicture: the file cannot be read as one.
    """
    try:
        with Image.open(file) as picture:
            return _opaque(_upright(picture)).convert("RGB")
    except Exception as error:
        raise BadPicture(f"{file} cannot be read as a picture: {error}") from error


def _upright(picture: Image.Image) -> Image.Image:
    picture.load()
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # a broken tag does not make a broken picture
        return picture


def _opaque(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
