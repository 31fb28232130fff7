"""Reading of picture files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps


class BadPicture(RuntimeError):
    """A file that cannot be read as a picture."""


def open_picture(file: str | Path) -> Image.Image:
    """Open a picture in RGB, rotated by its EXIF tag, with transparent parts in white.

    Raises:
        BadPicture: The file cannot be read as a picture.
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
    except Exception:  # the picture is usable even if its tag is broken
        return picture


def _opaque(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
