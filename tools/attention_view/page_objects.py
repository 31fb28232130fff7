"""The page's data of object queries and of sampling points."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .object_grid import LEVEL_COLOURS
from .objects import fine_mask
from .sampling import Samples
from .tokens import TokenMaps
from .view import View

MOST_POINT_QUERIES = 12  # maximum rows or columns of queries of a level in the page
MOST_OBJECT_KEYS, MOST_MASK = 48, 96  # maximum rows or columns of an object's map, and of its mask
REACH = 1.0  # points farther outside the picture, relative to its size, are drawn at this distance


def centres(size: int, most: int) -> Tensor:
    """Return at most ``most`` cells, in the middle of equal parts of ``size`` cells."""
    parts = torch.arange(min(size, most))
    return ((2 * parts + 1) * size) // (2 * len(parts))


def encoded(array: np.ndarray, kind: str) -> str:
    """Encode an array in Base64, as little-endian numbers of a kind."""
    return base64.b64encode(np.ascontiguousarray(array).astype(kind).tobytes()).decode()


def _places(view: View, layer: Samples, chosen: Tensor) -> dict[str, str]:
    """Encode the queries' points, (Q, M, L, K, 2), relative to the picture, and weights relative to the greatest."""
    locations, weights = layer.points(chosen)
    h, w = view.inside
    shares = layer.in_pixels(locations[0], view.size, view.inside).numpy() / np.array([w, h])
    span = np.clip((shares + REACH) / (1 + 2 * REACH), 0, 1)
    peaks = weights[0].flatten(1).amax(1)
    return dict(
        places=encoded(np.rint(span * 65535), "<u2"),
        weights=encoded((weights[0] / peaks.view(-1, 1, 1, 1) * 255).round().numpy(), "u1"),
        peaks=encoded(peaks.numpy(), "<f4"),
    )


def _common(layer: Samples) -> dict[str, Any]:
    heads, points = layer.attention.num_heads, layer.attention.num_points
    colours = [LEVEL_COLOURS[n % len(LEVEL_COLOURS)] for n in range(len(layer.shapes))]
    return dict(name=layer.name, heads=heads, samples=points, shapes=layer.shapes, colours=colours, reach=REACH)


def points_data(view: View, layer: Samples) -> dict[str, Any]:
    """Return the data of a layer whose queries are pixels: the points of a grid of pixels of every level."""
    levels, notes = [], []
    for n, shape in enumerate(layer.shapes):
        y, x = (centres(cells, MOST_POINT_QUERIES) for cells in shape)
        chosen = layer.number(n, torch.cartesian_prod(y, x).tolist())
        held = _places(view, layer, chosen)
        levels.append(dict(queries=(len(y), len(x)), rows=y.tolist(), columns=x.tolist(), **held))
        if (len(y), len(x)) != tuple(shape):
            notes.append(f"{len(y)}×{len(x)} of {shape[0]}×{shape[1]} queries")
    return dict(_common(layer), levels=levels, note="; ".join(notes))


def _maps(layer: TokenMaps, chosen: Tensor) -> dict[str, Any]:
    """Return maps of objects: the mean of all heads, then every head, each relative to its greatest weight."""
    maps = layer.of_objects(chosen)[0].float()  # (M, N, Hk, Wk)
    maps = torch.cat((maps.mean(0, keepdim=True), maps))
    size = min(layer.keys[0], MOST_OBJECT_KEYS), min(layer.keys[1], MOST_OBJECT_KEYS)
    if size != layer.keys:
        maps = F.adaptive_avg_pool2d(maps, size)
    peaks = maps.amax((2, 3))
    return dict(
        name=layer.name,
        heads=maps.shape[0] - 1,
        keys=size,
        note="" if size == layer.keys else f"{layer.keys[0]}×{layer.keys[1]} averaged",
        maps=encoded((maps / peaks.clamp(min=1e-30)[..., None, None] * 255).round().numpy(), "u1"),
        peaks=encoded(peaks.numpy(), "<f4"),
        uniform=encoded(layer.uniform(chosen).numpy(), "<f4"),
    )


def _masks(view: View) -> dict[str, Any] | None:
    """Return masks of objects, 0..255, over the picture without its padding."""
    assert view.objects is not None
    if view.objects.masks is None:
        return None
    step = max(1.0, max(view.inside) / MOST_MASK)
    size = max(1, round(view.inside[0] / step)), max(1, round(view.inside[1] / step))
    fine = [fine_mask(mask, view.size, view.inside).sigmoid()[None, None] for mask in view.objects.masks]
    small = torch.cat([F.adaptive_avg_pool2d(mask, size) for mask in fine])
    return dict(size=size, maps=encoded((small * 255).round().numpy(), "u1"))


def objects_data(view: View) -> dict[str, Any] | None:
    """Return the objects with their boxes, relative to the picture, and the attention of each."""
    objects = view.objects
    if objects is None or not len(objects):
        return None
    h, w = view.inside
    scale = torch.tensor([w, h, w, h])
    listed = [
        dict(title=objects.title(n), box=(objects.boxes[n] / scale).tolist(), name=objects.names[n])
        for n in range(len(objects))
    ]
    samples = []
    for layer in view.samples(objects=True):
        references = layer.in_pixels(layer.references[0, objects.queries].float(), view.size, view.inside)[:, 0]
        places = (references / scale[: references.shape[1]]).tolist()
        samples.append(dict(_common(layer), references=places, note="", **_places(view, layer, objects.queries)))
    maps = [_maps(layer, objects.queries) for layer in view.object_maps]
    return dict(list=listed, maps=maps, points=samples, masks=_masks(view))
