"""Sheets of panels with titles and one caption line, at twice their display resolution."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw

from tools.lettering import lettering_for

Place = tuple[int, int, int, int]  # left, top, width, height, relative to the margin
MARGIN, GAP = 16, 16
WIDTH = 1800 - 2 * MARGIN  # total width of the panels; the sheet is displayed 900 pixels wide
TITLE, CAPTION = 24, 26  # font sizes
TITLE_HEIGHT, CAPTION_HEIGHT = 38, 52
INK, PAPER = "#1a202c", "#ffffff"


def justified(sizes: Sequence[tuple[int, int]], columns: int, width: int = WIDTH, gap: int = GAP) -> list[Place]:
    """Place pictures in rows that all fill the width.

    Args:
        sizes: Width and height of each picture.
        columns: Pictures in a row.
        width: Width of the sheet.
        gap: Space between two pictures.

    Returns:
        The place of each picture. An incomplete row is as high as the row before it.
    """
    places: list[Place] = []
    top = height = 0
    for first in range(0, len(sizes), columns):
        row = sizes[first : first + columns]
        if len(row) == columns or not first:
            height = round((width - (len(row) - 1) * gap) / sum(w / h for w, h in row))
        left = 0
        for n, (w, h) in enumerate(row):
            last = n == len(row) - 1 == columns - 1
            across = width - left if last else round(height * w / h)
            places.append((left, top, across, height))
            left += across + gap
        top += height + gap
    return places


def sheet(places: Sequence[Place], caption: str) -> Image.Image:
    """Return a white sheet for panels at ``places``, with a margin and a line of ``caption`` below."""
    right, bottom = (max(place[side] + place[side + 2] for place in places) for side in (0, 1))
    picture = Image.new("RGB", (right + 2 * MARGIN, bottom + MARGIN + CAPTION_HEIGHT), PAPER)
    _write(picture, (MARGIN, bottom + MARGIN + CAPTION_HEIGHT / 2), caption, CAPTION, right)
    return picture


def title(picture: Image.Image, at: tuple[int, int], text: str, width: int) -> None:
    """Draw a title in the ``TITLE_HEIGHT`` pixels below ``at``, its upper left corner; long titles are cut off."""
    _write(picture, (at[0], at[1] + TITLE_HEIGHT / 2), text, TITLE, width)


def _write(picture: Image.Image, at: tuple[float, float], text: str, size: int, width: int) -> None:
    lettering = lettering_for(text)
    text, size = lettering.fitted(text, size, 12, width)
    ImageDraw.Draw(picture).text(at, text, INK, lettering.font(size), anchor="lm")
