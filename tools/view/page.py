"""A single HTML file that shows attention, by keyboard and mouse, without network access."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from tools.files import write_text

from .clips import Steps
from .figures import LEVEL_COLOURS
from .maps import CLS, WHOLE, Looked, Maps, head_names, with_mean
from .models import View
from .objects import fine_mask
from .points import Points
from .sentences import ALIGNMENT, DECODER, ENCODER, Sentence, WordMaps
from .tokens import Tokens

# Maximum rows or columns of a map in the page: of queries and keys of pixels, of queries and keys of objects, of masks.
MOST_QUERIES, MOST_KEYS, MOST_POINT_QUERIES, MOST_OBJECT_KEYS, MOST_MASK = 16, 28, 12, 48, 96
MOST_CLIP_QUERIES, MOST_CLIP_KEYS = 128, 2048  # of all frames together
WIDEST = 640  # of the picture, in pixels
REACH = 1.0  # points farther outside the picture, relative to its size, are drawn at this distance
KINDS = {
    ALIGNMENT: "alignment: from the output to the source",
    ENCODER: "self-attention of the source",
    DECODER: "self-attention of the output",
}
HERE = Path(__file__).parent / "web"


def page_of(title: str, data: dict[str, Any], picture: str = "") -> str:
    """Return the page of ``data`` on a ``picture``, a data URL, or if that is empty of a sentence."""
    body = "picture" if picture else "words"
    text = (HERE / "page.html").read_text().replace("@BODY@", (HERE / f"{body}.html").read_text().rstrip())
    text = re.sub(r"@(\w+\.js)@", lambda match: (HERE / match[1]).read_text().rstrip(), text)
    # A "</script>" in a layer's name would end the script: JSON may escape the slash.
    values = dict(TITLE=html.escape(title), PICTURE=picture, DATA=json.dumps(data).replace("</", "<\\/"))
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def encoded(array: Any, kind: str) -> str:
    """Encode an array in Base64, as little-endian numbers of a kind."""
    return base64.b64encode(np.ascontiguousarray(array).astype(kind).tobytes()).decode()


def shares(maps: Tensor, axes: int = 2, kind: str = "u1") -> dict[str, str]:
    """Encode maps relative to their own maxima over the last ``axes`` axes, and the maxima."""
    maps = maps.cpu()
    peaks = maps.flatten(-axes).amax(-1)
    scaled = maps / peaks.clamp(min=1e-30).view(*peaks.shape, *[1] * axes)
    scaled = (scaled * np.iinfo(kind).max).round()
    return dict(maps=encoded(scaled.numpy(), kind), peaks=encoded(peaks.numpy(), "<f4"))


def colours() -> str:
    """Return matplotlib's viridis as 256 times three bytes."""
    import matplotlib

    return encoded((matplotlib.colormaps["viridis"](np.arange(256))[:, :3] * 255).round(), "u1")


def centres(size: int, most: int) -> Tensor:
    """Return at most ``most`` cells, in the middle of equal parts of ``size`` cells."""
    parts = torch.arange(min(size, most))
    return ((2 * parts + 1) * size) // (2 * len(parts))


def thinned(layer: Maps) -> tuple[Looked, tuple[int, int], list[str]]:
    """Return bounded maps (N, Hq' * Wq', Hk', Wk') of a layer, their (Hq', Wq'), and notes on what was left out."""
    if isinstance(layer, Steps):  # as many queries of every frame
        sizes = zip(layer.clip[1:], layer.thinned(MOST_CLIP_QUERIES), layer.frames)
        y, x = (torch.cat([f * n + centres(n, most // frames) for f in range(frames)]) for n, most, frames in sizes)
    else:
        y, x = (centres(n, MOST_QUERIES) for n in layer.size)
    looked = layer.look(torch.cartesian_prod(y, x).tolist())
    notes, size = [], (len(y), len(x))
    if size != tuple(layer.size):
        notes.append("{}×{} of {}×{} queries".format(*size, *layer.size))
    keys = looked.maps.shape[2:]
    looked.maps = _averaged(layer, looked.maps)
    if looked.maps.shape[2:] != keys:
        notes.append("{}×{} keys averaged to {}×{}".format(*keys, *looked.maps.shape[2:]))
    return looked, size, notes


def _averaged(layer: Maps, maps: Tensor) -> Tensor:
    """Average maps (N, Q, Hk, Wk) to at most MOST_KEYS rows and columns, or for a clip to MOST_CLIP_KEYS cells."""
    if isinstance(layer, Steps):
        return _pooled(maps, layer.thinned(MOST_CLIP_KEYS))
    return _pooled(maps, [min(n, MOST_KEYS) for n in maps.shape[2:]])


def _pooled(maps: Tensor, size: Any) -> Tensor:
    return maps if tuple(size) == maps.shape[2:] else F.adaptive_avg_pool2d(maps, tuple(size))


def layer_data(layer: Maps, with_parts: bool = False) -> dict[str, Any]:
    """Return the page's data of a layer, and of every term of its logits alone."""
    looked, size, notes = thinned(layer)
    note, names, keys = "; ".join(notes), looked.names, looked.maps.shape[2:]
    data = dict(name=layer.name, note=note, names=names, heads=len(names), queries=size, keys=keys)
    data |= dict(without=layer.prefix_words, cls=None, **_looked(looked))
    if layer.cls:
        cls = layer.look([CLS])
        cls.maps = _averaged(layer, cls.maps)
        data["cls"] = _looked(cls)
    if with_parts:
        data["parts"] = {name: layer_data(part) for name, part in layer.parts().items()}
    return data


def _looked(looked: Looked) -> dict[str, Any]:
    elsewhere = None if looked.elsewhere is None else encoded(looked.elsewhere.cpu(), "<f4")
    return dict(shares(looked.maps), uniform=encoded(looked.uniform.cpu(), "<f4"), elsewhere=elsewhere)


def points_data(view: View, layer: Points) -> dict[str, Any]:
    """Return the data of a layer whose queries are pixels: the points of a grid of pixels of every level."""
    levels, notes = [], []
    for n, shape in enumerate(layer.shapes):
        y, x = (centres(cells, MOST_POINT_QUERIES) for cells in shape)
        places = _places(view, layer, layer.number(n, torch.cartesian_prod(y, x).tolist()))
        levels.append(dict(queries=(len(y), len(x)), rows=y.tolist(), columns=x.tolist(), **places))
        if (len(y), len(x)) != tuple(shape):
            notes.append(f"{len(y)}×{len(x)} of {shape[0]}×{shape[1]} queries")
    return dict(_common(layer), levels=levels, note="; ".join(notes))


def _common(layer: Points) -> dict[str, Any]:
    heads, points = layer.attention.num_heads, layer.attention.num_points
    ink = [LEVEL_COLOURS[n % len(LEVEL_COLOURS)] for n in range(len(layer.shapes))]
    return dict(name=layer.name, heads=heads, samples=points, shapes=layer.shapes, colours=ink, reach=REACH)


def _places(view: View, layer: Points, chosen: Tensor) -> dict[str, str]:
    """Encode the queries' points, (Q, M, L, K, 2), relative to the picture, and weights relative to the greatest."""
    places, weights = view.sampled(layer, chosen)
    span = np.clip((places.numpy() / np.array(view.inside[::-1]) + REACH) / (1 + 2 * REACH), 0, 1)
    data = shares(weights, 3)
    return dict(places=encoded(np.rint(span * 65535), "<u2"), weights=data["maps"], peaks=data["peaks"])


def objects_data(view: View) -> dict[str, Any] | None:
    """Return the objects with their boxes, relative to the picture, and the attention of each."""
    objects = view.objects
    if objects is None or not len(objects):
        return None
    scale = torch.tensor(view.inside[::-1]).repeat(2)
    listed = [
        dict(title=objects.title(n), box=(objects.boxes[n] / scale).tolist(), name=objects.names[n])
        for n in range(len(objects))
    ]
    points = []
    for layer in view.points(objects=True):
        references = view.references(layer)
        places = (references / scale[: references.shape[1]]).tolist()
        points.append(dict(_common(layer), references=places, note="", **_places(view, layer, objects.queries)))
    maps = [_object_maps(layer, objects.queries.tolist()) for layer in view.object_maps]
    return dict(list=listed, maps=maps, points=points, masks=_masks(view))


def _object_maps(layer: Tokens, queries: list[int]) -> dict[str, Any]:
    looked = layer.look(queries)
    maps = torch.cat((looked.maps.mean(0, keepdim=True), looked.maps))  # also of a single head
    size = min(layer.keys[0], MOST_OBJECT_KEYS), min(layer.keys[1], MOST_OBJECT_KEYS)
    note = "" if size == layer.keys else f"{layer.keys[0]}×{layer.keys[1]} averaged"
    data = dict(name=layer.name, heads=len(maps) - 1, keys=size, note=note, uniform=encoded(looked.uniform, "<f4"))
    return data | shares(_pooled(maps, size))


def _masks(view: View) -> dict[str, Any] | None:
    """Return masks of objects, 0..255, over the picture without its padding."""
    if view.objects.masks is None:
        return None
    step = max(1.0, max(view.inside) / MOST_MASK)
    size = max(1, round(view.inside[0] / step)), max(1, round(view.inside[1] / step))
    fine = [fine_mask(mask, view.size, view.inside).sigmoid()[None, None] for mask in view.objects.masks]
    small = torch.cat([F.adaptive_avg_pool2d(mask, size) for mask in fine])
    return dict(size=size, maps=encoded((small * 255).round().numpy(), "u1"))


def picture_data(view: View) -> tuple[str, int, int]:
    """Return the picture without padding as a data URL, with a white line between frames, and its size on the page."""
    picture = view.picture[: view.inside[0], : view.inside[1]].copy()
    if view.frames is not None:
        H, W = (n // frames for n, frames in zip(view.size, view.frames))
        picture[H::H], picture[:, W::W] = 255, 255
    image = Image.fromarray(picture)
    image.thumbnail((WIDEST, WIDEST), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode(), image.height, image.width


def write_page(view: View, title: str, out: Path, with_parts: bool = False) -> list[str]:
    """Write the page, with or without the parts of the logits; return notes on what it leaves out."""
    url, height, width = picture_data(view)
    layers: list[Any] = [layer_data(layer, with_parts) for layer in view.maps]
    points = [points_data(view, layer) for layer in view.points(objects=False)]
    data = dict(
        height=height,
        width=width,
        # Pixels of the file per pixel on the page: coordinates are those of the user's own picture viewer.
        pixel=[view.inside[n] / view.scale[n] / (height, width)[n] for n in range(2)],
        file=view.file_size,
        frames=view.frames,
        share=[view.inside[n] / view.size[n] for n in range(2)],  # of the maps, which include the padding
        colours=colours(),
        layers=layers,
        points=points,
        objects=objects_data(view),
    )
    write_text(out, page_of(title, data, url))
    return [f"{layer['name']}: {layer['note']}" for layer in [*layers, *points] if layer["note"]]


def write_sentence_page(sentence: Sentence, title: str, out: Path) -> None:
    """Write the page of a sentence."""

    def layer_of(layer: WordMaps) -> dict[str, Any]:
        parts = {WHOLE: layer.weights, **layer.parts}
        held = [dict(name=name, **shares(with_mean(weights), 1, "<u2")) for name, weights in parts.items()]
        return dict(name=layer.name, heads=head_names(len(layer.weights)), parts=held)

    kinds = []
    for kind, words in KINDS.items():
        layers = [layer_of(layer) for layer in sentence.maps if layer.kind == kind]
        if layers:
            queries, keys = sentence.words[kind]
            kinds.append(dict(title=words, queries=queries, keys=keys, layers=layers))
    write_text(out, page_of(title, dict(kinds=kinds, colours=colours())))
