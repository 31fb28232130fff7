"""Drawing of a caption: for each word its regions, its attributes, and the gate's share of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from tools.lettering import Lettering, lettering_for

WIDTH, MARGIN, GAP, COLUMNS, ROWS = 1200, 24, 20, 5, 4  # ROWS: attributes in a word's panel
PANEL = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS
TEXT, FAINT, TRACK, BAR = "#1a202c", "#5a6577", "#e6e9ee", "#f3c6a5"
VISUAL, SEMANTIC, HEAT = "#2563a8", "#c2571a", "#ffd23f"
ASPECT = 4.0  # narrower pictures are stretched: regions are relative to the sides


@dataclass(frozen=True)
class Explanation:
    """Content of the drawing; T words, n regions, k attributes."""

    caption: str
    words: Sequence[str]  # T words of the caption
    boxes: np.ndarray | None = None  # (n, 4), x0, y0, x1, y1, relative to the picture
    regions: np.ndarray | None = None  # (T, n), weights that sum to 1; None if no model uses regions
    attribute_words: Sequence[str] = ()  # k words
    attributes: np.ndarray | None = None  # (T, k), weights likewise
    visual_share: np.ndarray | None = None  # (T,), visual share of the gate; None without a gate
    notes: Sequence[str] = ()  # small lines below the caption


def grid_of(boxes: np.ndarray) -> tuple[np.ndarray, tuple[int, int]] | None:
    """Return the cell of each box, and rows and columns, if the boxes are the cells of a grid; else None."""
    low = [np.unique(np.round(boxes[:, axis], 4), return_inverse=True) for axis in (1, 0)]
    rows, columns = (len(values) for values, _ in low)
    cells = low[0][1].ravel() * columns + low[1][1].ravel()
    whole = np.isclose(boxes[:, 2:] - boxes[:, :2], (1 / columns, 1 / rows), atol=1e-3).all()
    if not whole or len(boxes) != rows * columns or len(np.unique(cells)) != len(boxes):
        return None
    return cells, (rows, columns)


def attended(picture: Image.Image, boxes: np.ndarray, weights: np.ndarray) -> Image.Image:
    """Draw a word's weights (n,) of regions on a picture in RGB: a heat map for grid cells, outlines for other boxes.

    ``boxes`` (n, 4) are relative to the picture.
    """
    strength = weights / max(float(weights.max()), 1e-12)
    grid = grid_of(boxes)
    pixels = np.asarray(picture, np.float32)
    dim = 0.25 * (pixels + np.asarray(picture.convert("L").convert("RGB"), np.float32))
    (W, H), yellow = picture.size, ImageColor.getrgb(HEAT)
    if grid is not None:
        cells, (rows, columns) = grid
        heat = np.zeros(rows * columns, np.float32)
        heat[cells] = strength
        y, x = ((np.arange(size) * number) // size for size, number in ((H, rows), (W, columns)))
        lit = 0.66 * pixels + 0.34 * np.array(yellow, np.float32)
        mixed = dim + heat.reshape(rows, columns)[y][:, x][..., None] * (lit - dim)
        return Image.fromarray(mixed.round().clip(0, 255).astype(np.uint8))
    shown = Image.fromarray(dim.astype(np.uint8))
    order = np.argsort(-weights, kind="stable")[:6]
    corners = [_pixels(boxes[i], W, H) for i in order]
    shown.paste(picture.crop(corners[0]), corners[0][:2])
    layer = Image.new("RGBA", (W, H))
    draw = ImageDraw.Draw(layer)
    for i, (x0, y0, x1, y1) in reversed(list(zip(order, corners))):  # the strongest on top
        colour = (*yellow, round(255 * min(1.0, 0.15 + float(strength[i]))))
        draw.rectangle((x0, y0, x1 - 1, y1 - 1), outline=colour, width=1 + round(2 * strength[i]))
    return Image.alpha_composite(shown.convert("RGBA"), layer).convert("RGB")


def _pixels(box: np.ndarray, W: int, H: int) -> tuple[int, int, int, int]:
    """Convert a box to pixels within the picture, at least one pixel wide and high."""
    x0, y0 = min(int(box[0] * W), W - 1), min(int(box[1] * H), H - 1)
    return x0, y0, min(max(round(float(box[2] * W)), x0 + 1), W), min(max(round(float(box[3] * H)), y0 + 1), H)


def page(picture: Image.Image, shown: Explanation) -> Image.Image:
    """Draw the whole page of a caption, given the picture in RGB, of any size."""
    small = _scaled(picture, PANEL, PANEL) if shown.regions is not None else None
    height = 44 + (small.height + 24 if small else 0) + (40 if shown.visual_share is not None else 0)
    height += 22 * min(ROWS, len(shown.attribute_words)) if shown.attributes is not None else 0
    letters = lettering_for(" ".join([shown.caption, *shown.words, *shown.attribute_words, *shown.notes]))
    head = _head(picture, shown, letters)
    lines = -(-len(shown.words) // COLUMNS)
    canvas = Image.new("RGB", (WIDTH, head.height + lines * (height + GAP) + MARGIN - GAP), "white")
    canvas.paste(head)
    for t in range(len(shown.words)):
        x = MARGIN + (t % COLUMNS) * (PANEL + GAP)
        _panel(canvas, x, head.height + (t // COLUMNS) * (height + GAP), shown, t, small, letters)
    return canvas


def _scaled(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Scale a picture up or down to fit this size."""
    aspect = min(max(picture.width / picture.height, 1 / ASPECT), ASPECT)
    size = (width, width / aspect) if width / aspect <= height else (height * aspect, height)
    return picture.resize((max(1, round(size[0])), max(1, round(size[1]))), Image.Resampling.LANCZOS)


def _head(picture: Image.Image, shown: Explanation, letters: Lettering) -> Image.Image:
    """Draw the picture, the caption next to it, and a legend of the colours."""
    preview = _scaled(picture, 400, 300)
    left = MARGIN + preview.width + MARGIN
    width = WIDTH - left - MARGIN
    size = 34 if len(shown.caption) <= 120 else 24
    caption = letters.wrapped(shown.caption, size, width)
    notes = [line for note in shown.notes for line in letters.wrapped(note, 15, width, 3)]
    legend = _legend(shown)
    bottom = MARGIN + len(caption) * (size + 8) + 14 + 26 * len(legend) + 8 + 21 * len(notes)
    canvas = Image.new("RGB", (WIDTH, max(MARGIN + preview.height, bottom) + MARGIN), "white")
    canvas.paste(preview, (MARGIN, MARGIN))
    draw, y = ImageDraw.Draw(canvas), MARGIN
    for line in caption:
        draw.text((left, y), line, TEXT, letters.font(size))
        y += size + 8
    y += 14
    for colour, text in legend:
        draw.rectangle((left, y + 2, left + 15, y + 17), colour, FAINT if colour == HEAT else colour)
        draw.text((left + 24, y), letters.shortened(text, 16, width - 24), TEXT, letters.font(16))
        y += 26
    y += 8
    for line in notes:
        draw.text((left, y), line, FAINT, letters.font(15))
        y += 21
    return canvas


def _legend(shown: Explanation) -> list[tuple[str, str]]:
    rows = []
    if shown.regions is not None:
        rows.append((HEAT, "regions that the word attends to, brighter for larger weights"))
    if shown.visual_share is not None:
        rows.append((VISUAL, "the gate's share of the regions"))
        rows.append((SEMANTIC, "the gate's share of the attributes; below: attributes and their weights"))
    elif shown.attributes is not None:
        rows.append((SEMANTIC, "attributes that the word attends to, and their weights"))
    return rows


def _panel(
    canvas: Image.Image, x: int, y: int, shown: Explanation, t: int, small: Image.Image | None, letters: Lettering
) -> None:
    """Draw the panel of word ``t``, from its upper left corner."""
    draw, font, right = ImageDraw.Draw(canvas), letters.font(14), x + PANEL - 1
    word, size = letters.fitted(shown.words[t], 22, 13, PANEL)
    draw.text((x, y + 27), word, TEXT, letters.font(size), anchor="ls")
    y += 36
    if small is not None and shown.regions is not None and shown.boxes is not None:
        canvas.paste(attended(small, shown.boxes, shown.regions[t]), (x, y))
        y += small.height + 4
        draw.text((x, y), f"strongest region: {shown.regions[t].max():.0%}", FAINT, font)
        y += 20
    if shown.visual_share is not None:
        share = float(shown.visual_share[t])
        split = x + round(share * (PANEL - 1))
        draw.rectangle((x, y, right, y + 11), SEMANTIC)
        if split > x:
            draw.rectangle((x, y, split, y + 11), VISUAL)
        draw.text((x, y + 15), f"visual {share:.0%}", VISUAL, font)
        draw.text((right, y + 15), f"semantic {1 - share:.0%}", SEMANTIC, font, anchor="ra")
        y += 40
    if shown.attributes is not None:
        room = PANEL - 48
        for k in np.argsort(-shown.attributes[t], kind="stable")[:ROWS]:
            weight = float(shown.attributes[t][k])
            draw.rectangle((x, y, x + room - 1, y + 18), TRACK)
            draw.rectangle((x, y, x + max(1, round(room * weight)) - 1, y + 18), BAR)
            draw.text((x + 5, y + 1), letters.shortened(shown.attribute_words[k], 14, room - 10), TEXT, font)
            draw.text((right, y + 1), f"{weight:.0%}", FAINT, font, anchor="ra")
            y += 22
