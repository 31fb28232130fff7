"""A single HTML file that shows attention, by keyboard and mouse, without network access."""

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

from attn_plugins.modules.common.capture import Captured
from tools.files import write_text

from .figures import LEVEL_COLORS
from .layers import is_deformable, levels_of, points, uniform
from .models import View

# Maximum rows or columns of a map in the page: of queries, of keys, and of queries with sampling points.
MOST_QUERIES, MOST_KEYS, MOST_POINT_QUERIES = 16, 28, 12
WIDEST = 640  # of the picture, in pixels


def page_of(title: str, picture: str, data: dict[str, Any]) -> str:
    """Return the page of ``data`` on a ``picture``, a data URL."""
    # A "</script>" in a layer's name would end the script: JSON may escape the slash.
    values = dict(TITLE=html.escape(title), PICTURE=picture, DATA=json.dumps(data).replace("</", "<\\/"))
    text = (Path(__file__).parent / "page.html").read_text()
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def encoded(array: Any, kind: str) -> str:
    """Encode an array in Base64, as little-endian numbers of a kind."""
    return base64.b64encode(np.ascontiguousarray(array).astype(kind).tobytes()).decode()


def shares(maps: Tensor, axes: int) -> dict[str, str]:
    """Encode maps in bytes relative to their own maxima over the last ``axes`` axes, and the maxima."""
    maps = maps.float().cpu()
    peaks = maps.flatten(-axes).amax(-1)
    scaled = maps / peaks.clamp(min=1e-30).view(*peaks.shape, *[1] * axes)
    return dict(maps=encoded((255 * scaled).round().numpy(), "u1"), peaks=encoded(peaks.numpy(), "<f4"))


def centres(size: int, most: int) -> Tensor:
    """Return at most ``most`` cells, in the middle of equal parts of ``size`` cells."""
    count = min(size, most)
    return (2 * torch.arange(count) + 1) * size // (2 * count)


def layer_data(call: Captured) -> dict[str, Any]:
    """Return the data of a layer: bounded maps (M, Hq', Wq', Hk', Wk')."""
    y, x = (centres(n, MOST_QUERIES) for n in call.size)
    queries = torch.cartesian_prod(y, x)
    maps, notes = call.maps(queries)[0].float(), []
    size = tuple(min(n, MOST_KEYS) for n in maps.shape[2:])
    if (len(y), len(x)) != tuple(call.size):
        notes.append("{}×{} of {}×{} queries".format(len(y), len(x), *call.size))
    if size != maps.shape[2:]:
        notes.append("{}×{} keys averaged to {}×{}".format(*maps.shape[2:], *size))
    data = dict(name=call.name, note="; ".join(notes), heads=len(maps), queries=(len(y), len(x)), keys=size)
    least = encoded(uniform(call, queries).cpu(), "<f4")
    return dict(data, uniform=least, **shares(F.adaptive_avg_pool2d(maps, size), 2))


def points_data(view: View, call: Captured) -> dict[str, Any]:
    """Return the data of deformable attention: for every level a grid of pixels, with the points that they read."""
    levels, shapes = [], levels_of(call)
    for n, shape in enumerate(shapes):
        y, x = (centres(cells, MOST_POINT_QUERIES) for cells in shape)
        locations, weights = points(call, n, torch.cartesian_prod(y, x))
        places = locations.cpu().numpy() * view.size[::-1] / view.inside[::-1]  # relative to the picture
        held = dict(queries=(len(y), len(x)), places=encoded(places, "<f4"), **shares(weights, 3))
        levels.append(dict(held, rows=y.tolist(), columns=x.tolist()))
    ink = [LEVEL_COLORS[n % 6] for n in range(len(shapes))]
    samples = dict(count=weights[0].numel(), samples=weights.shape[-1])
    return dict(name=call.name, **samples, shapes=shapes, colors=ink, levels=levels)


def write_page(view: View, title: str, out: Path) -> list[str]:
    """Write the page; return notes on what it leaves out."""
    import matplotlib

    image, file = Image.fromarray(view.picture[: view.inside[0], : view.inside[1]]), io.BytesIO()
    image.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    image.save(file, "JPEG", quality=85)
    layers = [layer_data(call) for call in view.layers if not is_deformable(call.layer)]
    data = dict(
        height=image.height,
        width=image.width,
        file=view.file_size,
        share=[view.inside[n] / view.size[n] for n in range(2)],  # of the maps, which include the padding
        colors=encoded((matplotlib.colormaps["viridis"](np.arange(256))[:, :3] * 255).round(), "u1"),
        layers=layers,
        points=[points_data(view, call) for call in view.layers if is_deformable(call.layer)],
    )
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    write_text(out, page_of(title, url, data))
    return [f"{layer['name']}: {layer['note']}" for layer in layers if layer["note"]]
