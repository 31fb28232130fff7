"""One HTML file in which a picture's pixels show their attention: no network, keyboard and mouse."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from attn_plugins.modules.capture import Captured
from tools.files import write_text

from .view import View, uniform_weights

MOST_QUERIES, MOST_KEYS = 16, 28  # rows or columns of a map that the page holds
WIDEST = 640  # of the picture, in pixels
TEMPLATE = Path(__file__).with_name("page.html")


def thinned(layer: Captured) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """A layer's maps (M, Hq', Wq', Hk', Wk') of bounded size, the uniform weights (Hq', Wq') of the queries, and in
    words what was left out."""
    H, W = layer.size
    rows, columns = (torch.arange(min(n, MOST_QUERIES)) for n in (H, W))
    # The centre of each part, where there are fewer parts than cells.
    y = ((2 * rows + 1) * H) // (2 * len(rows))
    x = ((2 * columns + 1) * W) // (2 * len(columns))
    queries = torch.cartesian_prod(y, x)
    maps, uniform = layer.maps(queries)[0].float(), uniform_weights(layer, queries)  # (M, Q, Hk, Wk), (Q,)
    notes = []
    if (len(rows), len(columns)) != (H, W):
        notes.append(f"{len(rows)}×{len(columns)} of {H}×{W} queries")
    Hk, Wk = maps.shape[2:]
    size = min(Hk, MOST_KEYS), min(Wk, MOST_KEYS)
    if size != (Hk, Wk):
        notes.append(f"{Hk}×{Wk} keys averaged to {size[0]}×{size[1]}")
        maps = F.adaptive_avg_pool2d(maps, size)
    grid = len(rows), len(columns)
    return maps.unflatten(1, grid).cpu().numpy(), uniform.unflatten(0, grid).cpu().numpy(), notes


def quantised(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each map in 0..255 of its own maximum, and the maxima (M, Hq, Wq)."""
    peaks = maps.max((-2, -1))
    scaled = maps / np.maximum(peaks, 1e-30)[..., None, None]
    return np.rint(scaled * 255).astype(np.uint8), peaks.astype(np.float32)


def layer_data(layer: Captured) -> dict[str, Any]:
    """What the page knows of a layer."""
    maps, uniform, notes = thinned(layer)
    bytes_, peaks = quantised(maps)
    return dict(
        name=layer.name,
        note="; ".join(notes),
        heads=maps.shape[0],
        queries=maps.shape[1:3],
        keys=maps.shape[3:],
        maps=base64.b64encode(bytes_.tobytes()).decode(),
        peaks=base64.b64encode(peaks.astype("<f4").tobytes()).decode(),
        uniform=base64.b64encode(uniform.astype("<f4").tobytes()).decode(),
    )


def colours() -> str:
    """matplotlib's viridis as 256 times three bytes."""
    import matplotlib

    table = matplotlib.colormaps["viridis"](np.arange(256))[:, :3]
    return base64.b64encode((table * 255).round().astype(np.uint8).tobytes()).decode()


def picture_data(picture: np.ndarray) -> tuple[str, int, int]:
    """The picture as a data URL, and its size on the page."""
    image = Image.fromarray(picture)
    image.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode(), image.height, image.width


def write_page(view: View, layers: Sequence[Captured], title: str, out: Path) -> list[str]:
    """Write the page; in words, what it does not hold."""
    url, height, width = picture_data(view.picture)
    data = dict(
        height=height,
        width=width,
        # Pixels of the file per pixel on the page: what is read out is what the user's own picture viewer shows.
        pixel=[view.picture.shape[n] / view.scale[n] / (height, width)[n] for n in range(2)],
        file=view.file_size,
        colours=colours(),
        layers=[layer_data(layer) for layer in layers],
    )
    text = TEMPLATE.read_text()
    # A "</script>" in a layer's name would end the script: JSON may escape the slash.
    for key, value in {
        "TITLE": html.escape(title),
        "PICTURE": url,
        "DATA": json.dumps(data).replace("</", "<\\/"),
    }.items():
        text = text.replace(f"@{key}@", value)
    write_text(out, text)
    return [f"{layer['name']}: {layer['note']}" for layer in data["layers"] if layer["note"]]  # type: ignore[index]
