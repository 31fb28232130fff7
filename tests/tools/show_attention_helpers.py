"""Helpers of the tests of ``tools.show_attention``: small models, and the contents of the page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np

VIT = "vit_tiny_patch16_224"
SMALL_VIT = dict(img_size=(48, 64), embed_dim=32, depth=3, num_heads=2)


def page_data(file: Path) -> dict:
    """Return the data embedded in the page."""
    found = re.search(r"const data = (\{.*\});", file.read_text())
    assert found is not None
    return json.loads(found[1])


def maps_in(file: Path) -> list[np.ndarray]:
    """Decode the page's bytes: (M, Hq, Wq, Hk, Wk) for each layer."""
    return [
        np.frombuffer(base64.b64decode(layer["maps"]), np.uint8).reshape(
            layer["heads"], *layer["queries"], *layer["keys"]
        )
        for layer in page_data(file)["layers"]
    ]


def painted(browser, panel: int) -> list[int]:
    """Return the colours in the middle of every key's cell of a panel, without the picture."""
    return browser.run(
        f"""(() => {{
            const {{ layer, canvas }} = panels[{panel}], [Hk, Wk] = layer.keys, found = [];
            const context = canvas.getContext('2d');
            for (let y = 0; y < Hk; y++) for (let x = 0; x < Wk; x++) {{
                const at = [(x + 0.5) * canvas.width / Wk, (y + 0.5) * canvas.height / Hk].map(Math.floor);
                found.push(...context.getImageData(...at, 1, 1).data.slice(0, 3));
            }}
            return found;
        }})()"""
    )


def same_picture(browser, file: Path, panel: int, head: int, layer: int, cell: tuple[int, int]) -> None:
    """Check that a panel shows the head's map for the query's cell in the page's colours."""
    colours = np.frombuffer(base64.b64decode(page_data(file)["colours"]), np.uint8).reshape(256, 3).astype(int)
    expected = colours[maps_in(file)[layer][head][cell]]
    found = np.array(painted(browser, panel)).reshape(expected.shape)
    frame = np.zeros(expected.shape[:2], bool)
    frame[cell] = True  # the frame of the query may cover its own cell
    assert np.abs(found - expected)[~frame].max() <= 2
