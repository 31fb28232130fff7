"""PNGs of attention: heads by query pixels as in Bello et al. (2019), terms alone, and sampling points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_plugins.modules.common.capture import Captured
from tools.files import write

from .layers import WHOLE, levels_of, parts, points, uniform
from .models import View

LEVEL_COLORS = ("#ff3b3b", "#ffd60a", "#3ddc5b", "#38a3ff", "#ff6ad5", "#ff9f1a")
LARGEST_POINT = 60.0  # area, in square points, of a sampling point with all the weight of a head
Pixels = Sequence[tuple[int, int]]  # (y, x) of the file


@contextmanager
def figure(out: Path, size: tuple[float, float], title: str) -> Iterator[Any]:
    """Yield a figure of ``size`` in inches, and save it as PNG afterwards."""
    from matplotlib.figure import Figure

    made = Figure(size, layout="constrained")
    made.suptitle(title, fontsize=9, parse_math=False, wrap=True)
    yield made
    saving: Any = dict(format="png", dpi=180, bbox_inches="tight", pil_kwargs=dict(optimize=True))
    write(out, lambda partial: made.savefig(partial, **saving))


@contextmanager
def _panels(view: View, rows: int, columns: int, title: str, out: Path) -> Iterator[Any]:
    """Yield axes (rows, columns) in pixels of the view's picture, whose padding is cut off."""
    h, w = view.inside
    width = 1.7 * max(1.0, (w / h) ** 0.5)
    with figure(out, (width * columns + 0.4, (width * h / w + 0.2) * rows + 0.4), title) as made:
        axes = made.subplots(rows, columns, squeeze=False)
        yield axes
        for panel in axes.flat:
            panel.set(xticks=[], yticks=[], xlim=(0, w), ylim=(h, 0), aspect="equal")


def _draw(view: View, panel: Any, values: Any, title: str, pixel: tuple[int, int], **options: Any) -> None:
    """Draw a picture or a map over the whole input, with a cross at a pixel of the file."""
    panel.imshow(values, extent=(0, view.size[1], view.size[0], 0), interpolation="nearest", **options)
    ((y, x),) = view.places([pixel]).tolist()
    panel.plot(x, y, "+", color="red", markersize=8)
    panel.set_title(title, fontsize=7, pad=2)


def _greatest(values: Tensor, least: Tensor) -> str:
    return f"max {values.max():.2g} (uniform {least:.2g})"


def draw_heads(view: View, call: Captured, pixels: Pixels, out: Path) -> None:
    """Save the picture with its query pixels and, below, every head's map for each of them.

    A map's title is its greatest weight beside that of uniform attention.
    """
    cells = view.cells(call.size, pixels)
    maps, least = call.maps(cells)[0].float().cpu(), uniform(call, cells)
    title = "{}: {}×{} queries, {}×{} keys".format(call.name, *call.size, *maps.shape[2:])
    with _panels(view, len(maps) + 1, len(pixels), title, out) as axes:
        for q, pixel in enumerate(pixels):
            _draw(view, axes[0, q], view.picture, f"{q + 1}: {pixel}", pixel)
            for head, values in enumerate(maps[:, q]):
                _draw(view, axes[head + 1, q], values, _greatest(values, least[q]), pixel, vmin=0)
                axes[head + 1, 0].set_ylabel(f"head {head + 1}", fontsize=8)


def draw_parts(view: View, call: Captured, pixels: Pixels, out: Path) -> bool:
    """Save a row for every query: the picture, and the mean map of heads of every term alone and of all terms.

    Returns:
        Whether there is a picture: logits of a single term have no parts.
    """
    cells = view.cells(call.size, pixels)
    shown = parts(call, cells)
    if not shown:
        return False
    shown[WHOLE], least = call.maps(cells)[0], uniform(call, cells)
    title = f"{call.name}: each term's maps are the softmax of its own logits, the mean of all heads"
    with _panels(view, len(pixels), len(shown) + 1, title, out) as axes:
        for q, pixel in enumerate(pixels):
            _draw(view, axes[q, 0], view.picture, f"{q + 1}: {pixel}", pixel)
            for panel, (name, maps) in zip(axes[q, 1:], shown.items()):
                mean = maps[:, q].float().mean(0).cpu()
                _draw(view, panel, mean, f"{name}\n{_greatest(mean, least[q])}", pixel, vmin=0)
    return True


def draw_points(view: View, call: Captured, pixels: Pixels, out: Path) -> None:
    """Save the sampling points of deformable attention: levels of the query in rows, pixels in columns."""
    levels = levels_of(call)
    title = f"{call.name}: points that each pixel reads on every level; the larger, the more weight"
    with _panels(view, len(levels), len(pixels), title, out) as axes:
        for level, shape in enumerate(levels):
            locations, weights = points(call, level, view.cells(shape, pixels))
            places = (locations * torch.tensor(view.size[::-1])).cpu()
            for q, panel in enumerate(axes[level]):
                _draw(view, panel, view.picture, f"{pixels[q]} on the map {shape[0]}×{shape[1]}", pixels[q], alpha=0.75)
                for n, (H, W) in enumerate(levels):
                    size = LARGEST_POINT * weights[q, :, n].flatten().cpu().numpy() ** 0.75
                    style: Any = dict(c=LEVEL_COLORS[n % 6], edgecolors="black", linewidths=0.25, label=f"{H}×{W}")
                    panel.scatter(*places[q, :, n].reshape(-1, 2).T.numpy(), s=np.maximum(size, 1), **style)
        axes[-1, 0].legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=len(levels), fontsize=6, frameon=False)
