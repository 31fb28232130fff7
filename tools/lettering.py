"""Text in pictures: measuring, wrapping and truncation.

Pillow's own font covers little more than ASCII. Text with other letters is set in DejaVu Sans if the system or
matplotlib provides it.
"""

from __future__ import annotations

import bisect
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from PIL import ImageFont

FALLBACK = "DejaVuSans.ttf"
MISSING = "\uffff"  # in no font


class Lettering:
    """One font at any size, of a file, or Pillow's own."""

    def __init__(self, file: str | None = None) -> None:
        self.file = file

    def font(self, size: int) -> Any:
        """Return the font for ``ImageDraw``."""
        return _font(self.file, size)

    def length(self, text: str, size: int) -> float:
        """Return the length of ``text`` in pixels."""
        return self.font(size).getlength(text)

    def wrapped(self, text: str, size: int, width: int, most: int | None = None) -> list[str]:
        """Wrap ``text`` into at most ``most`` lines of at most ``width`` pixels; longer words are divided."""
        lines, line = [], ""
        for word in text.split():
            longer = f"{line} {word}" if line else word
            if self.length(longer, size) <= width:
                line = longer
                continue
            lines += [line] if line else []
            while self.length(word, size) > width:
                number = max(1, self._fitting(word, size, width))
                lines.append(word[:number])
                word = word[number:]
            line = word
        lines += [line] if line else []
        if most is not None and len(lines) > most:
            lines = [*lines[: most - 1], self.shortened(f"{lines[most - 1]} {lines[most]}", size, width)]
        return lines

    def shortened(self, text: str, size: int, width: float) -> str:
        """Return ``text``, truncated with three dots if it is wider than ``width``."""
        if self.length(text, size) <= width:
            return text
        return text[: self._fitting(text, size, width - self.length("...", size))] + "..."

    def fitted(self, text: str, size: int, least: int, width: float) -> tuple[str, int]:
        """Return the text and the largest size from ``size`` down to ``least`` that fits, else the truncated text."""
        while size > least and self.length(text, size) > width:
            size -= 1
        return self.shortened(text, size, width), size

    def _fitting(self, text: str, size: int, width: float) -> int:
        """Return how many of the first characters fit."""
        ends = range(1, len(text) + 1)
        return bisect.bisect_right(ends, width, key=lambda end: self.length(text[:end], size))


def lettering_for(text: str) -> Lettering:
    """Return Pillow's own font if it has all letters of ``text``, else the fallback if there is one."""
    return Lettering(None if all(map(_has, set("".join(text.split())))) else _fallback())


@cache
def _font(file: str | None, size: int) -> Any:
    return ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)


@cache
def _has(letter: str) -> bool:
    """Return whether Pillow's own font has a letter."""
    font = _font(None, 20)
    return bytes(font.getmask(letter)) != bytes(font.getmask(MISSING))


@cache
def _fallback() -> str | None:
    """Return the file of the fallback font, or None."""
    names, matplotlib = [FALLBACK], importlib.util.find_spec("matplotlib")
    if matplotlib is not None and matplotlib.origin is not None:
        names.append(str(Path(matplotlib.origin).parent / "mpl-data/fonts/ttf" / FALLBACK))
    for name in names:
        try:
            _font(name, 20)
        except OSError:
            continue
        return name
    return None
