"""PNG grids of object queries and of sampling points: one panel for each object, or for each pixel and level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.files import write
from tools.show_sampling import save

from .objects import fine_mask
from .sampling import Samples
from .tokens import TokenMaps
from .view import View

LEVEL_COLOURS = ("#ff3b3b", "#ffd60a", "#3ddc5b", "#38a3ff", "#ff6ad5", "#ff9f1a")
LARGEST = 60.0  # area, in square points, of a sampling point with all the weight of a head


@contextmanager
def panels(view: View, rows: int, columns: int, title: str, out: Path) -> Iterator[Any]:
    """Yield axes (rows, columns) in units of the picture's pixels; save the figure afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    h, w = view.inside
    width = 2.0 * max(1.0, (w / h) ** 0.5)
    size = width * columns + 0.3, (width * h / w + 0.2) * rows + 0.45
    figure, axes = plt.subplots(rows, columns, squeeze=False, dpi=180, layout="constrained", figsize=size)
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[], xlim=(0, w), ylim=(h, 0), aspect="equal")
        panel.axis("off")
    figure.suptitle(title, fontsize=9)
    try:
        yield axes
        write(out, lambda partial: save(figure, partial))
    finally:
        plt.close(figure)


def _object_panels(view: View) -> tuple[int, int]:
    assert view.objects is not None
    columns = min(len(view.objects), 4)
    return -(-len(view.objects) // columns), columns


def _grey(view: View) -> np.ndarray:
    return view.picture.astype(np.float32).mean(-1)


def _box(panel: Any, box: Sequence[float], colour: str = "#38a3ff") -> None:
    left, top, right, bottom = (float(n) for n in box)
    panel.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color="white", linewidth=2.4)
    panel.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=colour, linewidth=1.2)


def draw_object_maps(view: View, layer: TokenMaps, out: Path) -> None:
    """Save one panel for each object: its query's attention, averaged over heads, and its box."""
    objects, (H, W) = view.objects, view.size
    assert objects is not None
    maps = layer.of_objects(objects.queries)[0].float().mean(0).cpu().numpy()  # (N, Hk, Wk)
    uniform = layer.uniform(objects.queries).tolist()
    title = f"{layer.name}: where each object's query attends, mean of all heads, {maps.shape[1]}×{maps.shape[2]} keys"
    with panels(view, *_object_panels(view), title, out) as axes:
        for n, panel in zip(range(len(objects)), axes.flat):
            panel.imshow(_grey(view), cmap="gray", extent=(0, W, H, 0))
            panel.imshow(maps[n], cmap="inferno", vmin=0, alpha=0.7, extent=(0, W, H, 0), interpolation="nearest")
            _box(panel, objects.boxes[n].tolist())
            panel.set_title(
                f"{objects.title(n)}\nmax {maps[n].max():.2g} (uniform {uniform[n]:.2g})", fontsize=7, pad=2
            )


def draw_object_masks(view: View, out: Path) -> None:
    """Save one panel for each object: its mask, class and score."""
    objects = view.objects
    assert objects is not None
    assert objects.masks is not None
    h, w = view.inside
    with panels(view, *_object_panels(view), "Masks of the surest queries, their classes and scores", out) as axes:
        for n, panel in zip(range(len(objects)), axes.flat):
            mask = fine_mask(objects.masks[n], view.size, view.inside).sigmoid().numpy()
            grey = np.repeat(_grey(view)[:h, :w, None], 3, -1) / 255 * 0.6
            colour = np.array([0.24, 0.86, 0.36], np.float32)
            share = 0.65 * mask[..., None]
            panel.imshow(grey * (1 - share) + colour * share, extent=(0, w, h, 0))
            if mask.min() < 0.5 < mask.max():
                panel.contour(mask, [0.5], colors="white", linewidths=0.8, extent=(0, w, 0, h))
            panel.set_title(objects.title(n), fontsize=7, pad=2)


def draw_object_samples(view: View, layer: Samples, out: Path) -> None:
    """Save one panel for each object: the sampling points of its query, its reference and its box."""
    objects = view.objects
    assert objects is not None
    locations, weights = layer.points(objects.queries)
    references = layer.in_pixels(layer.references[0, objects.queries].float(), view.size, view.inside)[:, 0].tolist()
    places = layer.in_pixels(locations[0], view.size, view.inside)
    with panels(view, *_object_panels(view), _sampled(layer, "each object's query"), out) as axes:
        for n, panel in zip(range(len(objects)), axes.flat):
            panel.imshow(view.picture, extent=(0, view.size[1], view.size[0], 0), alpha=0.75)
            _points(panel, places[n], weights[0, n])
            _box(panel, objects.boxes[n].tolist())
            x, y, *size = references[n]
            if size:
                _box(panel, (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2), "black")
            panel.plot(x, y, "+", color="black", markersize=9, markeredgewidth=2)
            panel.set_title(objects.title(n), fontsize=7, pad=2)
        _legend(axes[0, 0], layer)


def draw_pixel_samples(view: View, layer: Samples, pixels: Sequence[tuple[int, int]], out: Path) -> None:
    """Save the sampling points of pixels: levels of the query in rows, pixels in columns."""
    with panels(view, len(layer.shapes), len(pixels), _sampled(layer, "each pixel"), out) as axes:
        for level, shape in enumerate(layer.shapes):
            chosen = layer.number(level, [view.cell(shape, pixel) for pixel in pixels])
            locations, weights = layer.points(chosen)
            places = layer.in_pixels(locations[0], view.size, view.inside)
            for q, panel in enumerate(axes[level]):
                y, x = ((n + 0.5) * scale for n, scale in zip(pixels[q], view.scale))
                height, width = (size / cells for size, cells in zip(view.size, shape))
                top, left = height * (y // height), width * (x // width)  # of the query's cell
                panel.imshow(view.picture, extent=(0, view.size[1], view.size[0], 0), alpha=0.75)
                _box(panel, (left, top, left + width, top + height), "black")
                _points(panel, places[q], weights[0, q])
                panel.plot(x, y, "+", color="black", markersize=9, markeredgewidth=2)
                panel.set_title(f"{pixels[q]} on the map {shape[0]}×{shape[1]}", fontsize=7, pad=2)
        _legend(axes[0, 0], layer)


def _sampled(layer: Samples, who: str) -> str:
    return f"{layer.name}: points that {who} reads on every level; the larger, the more weight"


def _points(panel: Any, places: Tensor, weights: Tensor) -> None:
    """Draw points (M, L, K, 2) in the colours of their levels, those of the least weight first."""
    for level in range(places.shape[1]):
        xy, weight = places[:, level].reshape(-1, 2), weights[:, level].flatten()
        order = torch.argsort(weight)
        panel.scatter(
            *xy[order].T.numpy(), s=(LARGEST * weight[order] ** 0.75).numpy(), c=LEVEL_COLOURS[level % 6],
            edgecolors="black", linewidths=0.25, zorder=3, clip_on=True,
        )  # fmt: skip


def _legend(panel: Any, layer: Samples) -> None:
    for level, (H, W) in enumerate(layer.shapes):
        panel.scatter([], [], s=20, c=LEVEL_COLOURS[level % 6], edgecolors="black", linewidths=0.3, label=f"{H}×{W}")
    panel.figure.legend(loc="outside lower center", ncols=len(layer.shapes), fontsize=7, frameon=False)
