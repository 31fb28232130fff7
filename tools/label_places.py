"""Places for labels next to boxes, inside the frame and without overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def overlap(a: Rectangle, b: Rectangle) -> float:
    """Return the area of the intersection of two rectangles."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0)


def place(
    boxes: Sequence[Rectangle],
    sizes: Sequence[tuple[float, float]],
    frame: tuple[float, float],
    others: Sequence[Rectangle] = (),
) -> list[Rectangle]:
    """Find a place for the label of each box.

    A label stays inside the frame and does not cover earlier labels. Of the remaining places, the one that hides
    least of the boxes and is closest to its own box is chosen, above it rather than below.

    Args:
        boxes: Boxes to label, the most important first.
        sizes: Width and height of each label.
        frame: Width and height of the picture.
        others: Further boxes, without a label, that should stay visible.

    Returns:
        A rectangle for each label. Two overlap only if the frame has no room left.
    """
    shown = [*boxes, *others]
    taken: list[Rectangle] = []
    for box, size in zip(boxes, sizes):

        def cost(at: Rectangle, box: Rectangle = box, size: tuple[float, float] = size) -> tuple[float, float]:
            hidden = sum(overlap(at, one) for one in shown) / (size[0] * size[1])
            return sum(overlap(at, label) for label in taken), hidden + _distance(at, box) / size[1]

        best = min(_places(box, size, frame), key=cost)
        if cost(best)[0] > 0:  # no room beside the box: anywhere
            best = min([best, *_grid(size, frame)], key=cost)
        taken.append(best)
    return taken


def _places(box: Rectangle, size: tuple[float, float], frame: tuple[float, float]) -> list[Rectangle]:
    """Return places above, below, beside and inside the box, moved into the frame."""
    left, top, right, bottom = box
    width, height = size
    columns = [left, (left + right - width) / 2, right - width, left - width / 2, right - width / 2]
    rows = [top, (top + bottom - height) / 2, bottom - height]
    corners = [(x, y) for y in (top - height, bottom, top, bottom - height) for x in columns]
    corners += [(x, y) for x in (left - width, right) for y in rows]
    return [_inside(x, y, size, frame) for x, y in corners]


def _grid(size: tuple[float, float], frame: tuple[float, float]) -> list[Rectangle]:
    """Return places all over the frame, half a label apart."""
    xs = np.arange(0, max(frame[0] - size[0], 0) + 1, size[0] / 2)
    ys = np.arange(0, max(frame[1] - size[1], 0) + 1, size[1] / 2)
    return [_inside(float(x), float(y), size, frame) for y in ys for x in xs]


def _inside(x: float, y: float, size: tuple[float, float], frame: tuple[float, float]) -> Rectangle:
    x, y = (max(0.0, min(at, whole - part)) for at, part, whole in zip((x, y), size, frame))
    return x, y, x + size[0], y + size[1]


def _distance(label: Rectangle, box: Rectangle) -> float:
    """Return the distance of the label from the box, with a small penalty below the box."""
    across = max(box[0] - label[2], label[0] - box[2], 0)
    along = max(box[1] - label[3], label[1] - box[3], 0)
    below = 0.1 * (label[3] - label[1]) if label[1] >= box[1] else 0
    return across + along + below
