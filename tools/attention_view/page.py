"""A single HTML file that shows the attention of a picture's pixels, by keyboard and mouse, without network access."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tools.files import write_text

from .clips import ClipView
from .page_objects import centres, encoded, objects_data, points_data
from .parts import parts_of
from .space_time import ClipMaps, layout
from .view import PixelMaps, View, query_maps
from .vit import CLS, PatchMaps, QueryMaps

MOST_QUERIES, MOST_KEYS = 16, 28  # maximum rows or columns of a map in the page
MOST_CLIP_QUERIES, MOST_CLIP_KEYS = 128, 2048  # of all frames together, likewise
WIDEST = 640  # of the picture, in pixels
TEMPLATE = Path(__file__).with_name("page.html")
PARTS = dict(CLIP="clip.js", CLS="cls.js", PARTS="parts.js", POINTS="points.js", OBJECTS="objects.js")


def thinned(layer: PixelMaps) -> tuple[QueryMaps, list[str]]:
    """Reduce a layer's maps to a bounded size, and describe what was left out.

    Returns:
        Maps (M, Hq', Wq', Hk', Wk') with uniform weights (Hq', Wq') and weights elsewhere (M, Hq', Wq'); and
        notes on what was left out.
    """
    assert layer.size is not None
    H, W = layer.size
    y, x = _queries(layer)
    found = query_maps(layer, torch.cartesian_prod(y, x).tolist())
    notes = []
    if (len(y), len(x)) != (H, W):
        notes.append(f"{len(y)}×{len(x)} of {H}×{W} queries")
    Hk, Wk = found.maps.shape[2:]
    maps = _averaged(found.maps, layer)
    if maps.shape[2:] != (Hk, Wk):
        notes.append(f"{Hk}×{Wk} keys averaged to {maps.shape[2]}×{maps.shape[3]}")
    grid = len(y), len(x)
    elsewhere = None if found.elsewhere is None else found.elsewhere.unflatten(1, grid)
    return QueryMaps(found.names, maps.unflatten(1, grid), found.uniform.unflatten(0, grid), elsewhere), notes


def _queries(layer: PixelMaps) -> list[Tensor]:
    """Return rows and columns of the queries in the page; for a clip, as many of every frame."""
    if not isinstance(layer, ClipMaps):
        return [centres(n, MOST_QUERIES) for n in layer.size or ()]
    found = []
    for n, parts, frames in zip(layer.clip[1:], layer.of_mosaic(MOST_CLIP_QUERIES), layout(layer.clip[0])):
        found.append(torch.cat([frame * n + centres(n, parts // frames) for frame in range(frames)]))
    return found


def _averaged(maps: Tensor, layer: PixelMaps) -> Tensor:
    """Average maps (M, Q, Hk, Wk) to at most MOST_KEYS rows and columns, or for a clip to MOST_CLIP_KEYS cells."""
    size = min(maps.shape[2], MOST_KEYS), min(maps.shape[3], MOST_KEYS)
    if isinstance(layer, ClipMaps):
        size = layer.of_mosaic(MOST_CLIP_KEYS)
    return maps if size == maps.shape[2:] else F.adaptive_avg_pool2d(maps, size)


def quantised(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each map in 0..255 of its own maximum, and the maxima (M, Hq, Wq)."""
    peaks = maps.max((-2, -1))
    scaled = maps / np.maximum(peaks, 1e-30)[..., None, None]
    return np.rint(scaled * 255).astype(np.uint8), peaks.astype(np.float32)


def layer_data(layer: PixelMaps, with_parts: bool = False) -> dict[str, Any]:
    """Return the page's data of a layer, and of every term of its logits alone."""
    found, notes = thinned(layer)
    data = dict(
        name=layer.name,
        note="; ".join(notes),
        names=found.names,
        heads=len(found.names),
        queries=found.maps.shape[1:3],
        keys=found.maps.shape[3:],
        without=layer.prefix_words if isinstance(layer, PatchMaps) else "",
        cls=None,
        **maps_data(found),
    )
    if isinstance(layer, PatchMaps) and layer.cls:
        cls = layer.look([CLS])
        data["cls"] = maps_data(QueryMaps(cls.names, _averaged(cls.maps, layer), cls.uniform, cls.elsewhere))
    if with_parts:
        data["parts"] = {name: layer_data(part) for name, part in parts_of(layer).items()}
    return data


def maps_data(found: QueryMaps) -> dict[str, Any]:
    """Return maps as bytes relative to their own maxima, and the maxima."""
    bytes_, peaks = quantised(found.maps.cpu().numpy())
    return dict(
        maps=encoded(bytes_, "u1"),
        peaks=encoded(peaks, "<f4"),
        uniform=encoded(found.uniform.cpu().numpy(), "<f4"),
        elsewhere=None if found.elsewhere is None else encoded(found.elsewhere.cpu().numpy(), "<f4"),
    )


def colours() -> str:
    """Return matplotlib's viridis as 256 times three bytes."""
    import matplotlib

    table = matplotlib.colormaps["viridis"](np.arange(256))[:, :3]
    return base64.b64encode((table * 255).round().astype(np.uint8).tobytes()).decode()


def picture_data(picture: np.ndarray) -> tuple[str, int, int]:
    """Return the picture as a data URL, and its size on the page."""
    image = Image.fromarray(picture)
    image.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode(), image.height, image.width


def page_of(title: str, picture: str, data: dict[str, Any]) -> str:
    """Return the page.

    Args:
        title: Of the page.
        picture: Its picture, a data URL.
        data: What its scripts show.
    """
    text = TEMPLATE.read_text()
    # A "</script>" in a layer's name would end the script: JSON may escape the slash.
    for key, value in {
        "TITLE": html.escape(title),
        **{part: TEMPLATE.with_name(name).read_text().rstrip() for part, name in PARTS.items()},
        "PICTURE": picture,
        "DATA": json.dumps(data).replace("</", "<\\/"),
    }.items():
        text = text.replace(f"@{key}@", value)
    return text


def write_page(view: View, title: str, out: Path, with_parts: bool = False) -> list[str]:
    """Write the page, with or without the parts of the logits; return notes on what it leaves out."""
    h, w = view.inside
    url, height, width = picture_data(view.page_picture if isinstance(view, ClipView) else view.picture[:h, :w])
    data = dict(
        height=height,
        width=width,
        # Pixels of the file per pixel on the page: coordinates are those of the user's own picture viewer.
        pixel=[view.inside[n] / view.scale[n] / (height, width)[n] for n in range(2)],
        file=view.file_size,
        frames=layout(len(view.frames)) if isinstance(view, ClipView) else None,
        share=[h / view.size[0], w / view.size[1]],  # of the maps, which include the padding
        colours=colours(),
        layers=[layer_data(layer, with_parts) for layer in view.maps],
        points=[points_data(view, layer) for layer in view.samples(objects=False)],
        objects=objects_data(view),
    )
    write_text(out, page_of(title, url, data))
    layers: list[Any] = [*data["layers"], *data["points"]]  # type: ignore[misc]
    return [f"{layer['name']}: {layer['note']}" for layer in layers if layer["note"]]
