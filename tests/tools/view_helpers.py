"""Helpers of the tests of ``tools.view``: its command line, and the contents of the page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import torch

from tools.view.__main__ import main


def run(*arguments: object) -> int:
    """Run the command line on models with the same random weights each time; return its exit status."""
    torch.manual_seed(0)
    return main([str(n) for n in arguments])


def names_in(folder: Path) -> set[str]:
    """Return the names of the files in a folder."""
    return {file.name for file in folder.iterdir()}


def page_data(file: Path) -> dict:
    """Return the data embedded in the page, after checking that it loads nothing from elsewhere."""
    text = file.read_text()
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", text)
    match = re.search(r"const data = (\{.*\});", text)
    assert match is not None
    return json.loads(match[1])


def numbers(text: str, kind: str = "u1") -> np.ndarray:
    """Decode the page's numbers."""
    return np.frombuffer(base64.b64decode(text), kind)


def weights_of(layer: dict) -> np.ndarray:
    """Return a layer's maps (M, Hq, Wq, Hk, Wk)."""
    maps = numbers(layer["maps"]).reshape(layer["heads"], *layer["queries"], *layer["keys"])
    return maps / 255 * numbers(layer["peaks"], "<f4").reshape(maps.shape[:3])[..., None, None]


def click(browser, element: str, x: float, y: float) -> None:
    """Click a place relative to the element's size."""
    browser.run(f"{element}.scrollIntoView({{ block: 'center' }})")
    box = f"(() => {{ const b = {element}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()"
    left, top, width, height = browser.run(box)
    browser.click(left + x * width, top + y * height)
