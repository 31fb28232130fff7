"""Sheets of panels with one caption line, at twice their display resolution."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

Place = tuple[int, int, int, int]  # left, top, width, height, relative to the margin
MARGIN, GAP = 16, 16
WIDTH = 1800 - 2 * MARGIN  # total width of the panels; the sheet is displayed 900 pixels wide
CAPTION, CAPTION_HEIGHT = 26, 52  # size of the font, and of its line
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
    fonts = (ImageFont.load_default(size) for size in range(CAPTION, 11, -1))
    font = next((font for font in fonts if font.getlength(caption) <= right), ImageFont.load_default(12))
    while font.getlength(caption) > right:
        caption = caption[:-1]
    ImageDraw.Draw(picture).text((MARGIN, bottom + MARGIN + CAPTION_HEIGHT / 2), caption, INK, font, anchor="lm")
    return picture
