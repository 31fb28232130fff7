"""PNGs of attention: grids as in Bello et al. (2019), parts, clips, objects, sampling points, and words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.clips import sampled
from tools.plots import figure

from .clips import Steps
from .maps import CLS, EXPLAINED, WHOLE, Maps, head_names, with_mean
from .models import View
from .objects import KINDS, SMALL, Slots, fine_mask, kind_of_box
from .points import Points
from .sentences import ALIGNMENT, DECODER, ENCODER, Sentence, WordMaps
from .tokens import Tokens

LEVEL_COLOURS = ("#ff3b3b", "#ffd60a", "#3ddc5b", "#38a3ff", "#ff6ad5", "#ff9f1a")
LARGEST_POINT = 60.0  # area, in square points, of a sampling point with all the weight of a head
MOST_FRAMES, MOST_SLOTS = 16, 20  # shown in a PNG
CELL, LARGEST = 0.2, 12.0  # of a word, in inches, and of a sentence
TITLES = {
    ENCODER: "self-attention of the source",
    DECODER: "self-attention of the output (rows: queries, columns: keys)",
    ALIGNMENT: "from the output (rows) to the source (columns)",
}


@contextmanager
def figure_of(rows: int, columns: int, size: tuple[float, float], title: str, font: int, out: Path) -> Iterator[Any]:
    """Yield axes (rows, columns) of a figure of ``size`` in inches; save it afterwards."""
    saving = dict(bbox_inches="tight", pil_kwargs=dict(optimize=True))
    with figure(out, rows, columns, {}, saving, dpi=180, figsize=size) as (whole, axes):
        whole.suptitle(title, fontsize=font, parse_math=False, wrap=font == 8)
        yield axes


def _cells(view: View, layer: Maps, pixels: Sequence[Any]) -> list[Any]:
    return [pixel if pixel == CLS else view.cell(layer.size, pixel) for pixel in pixels]


def _heat(view: View, panel: Any, values: Any, alpha: float = 0.65, cmap: str = "viridis") -> None:
    """Draw a map, over the picture in grey if it is transparent."""
    extent = (0, view.size[1], view.size[0], 0)
    if alpha < 1:
        panel.imshow(view.picture.astype(np.float32).mean(-1), cmap="gray", extent=extent)
    panel.imshow(np.asarray(values), cmap=cmap, vmin=0, alpha=alpha, extent=extent, interpolation="nearest")


def _picture(view: View, panel: Any, alpha: float | None = None) -> None:
    panel.imshow(view.picture, extent=(0, view.size[1], view.size[0], 0), alpha=alpha)


def _cut(view: View, axes: Any) -> None:
    """Cut off the padding."""
    for panel in axes.flat:
        panel.set(xticks=[], yticks=[], xlim=(0, view.inside[1]), ylim=(view.inside[0], 0))


def _greatest(maps: Any, uniform: Any) -> str:
    return f"max {maps.max():.2g} (uniform {uniform:.2g})"


def _cross(view: View, panel: Any, pixel: Any, size: float, width: float | None = None) -> None:
    if pixel != CLS:
        panel.plot(*(n * s for n, s in zip(pixel[::-1], view.scale[::-1])), "+", color="red", ms=size, mew=width)


def draw_heads(view: View, layer: Maps, pixels: Sequence[Any], out: Path) -> None:
    """Save the picture with its numbered query pixels and, below, every head's map for each of them.

    The title of a map is its greatest weight, with the weight of uniform attention for comparison. A query may be the
    cls token; a rollout is drawn over the picture.
    """
    looked = layer.look(_cells(view, layer, pixels))
    maps, (h, w), heads, queries = looked.maps.cpu(), view.inside, *looked.maps.shape[:2]
    width = 1.5 * max(1.0, w / h)
    height = width * h / w + (0.14 if looked.elsewhere is None else 0.24)
    title = "{}: {}×{} queries, {}×{} keys".format(layer.name, *layer.size or (), *maps.shape[2:])
    size = width * queries + 0.4, height * (heads + 1) + 0.3
    with figure_of(heads + 1, queries, size, title, 9, out) as axes:
        for q, pixel in enumerate(pixels):
            _picture(view, axes[0, q])
            _cross(view, axes[0, q], pixel, 10, 2)
            where = "cls token" if pixel == CLS else f"({pixel[0]}, {pixel[1]})"
            axes[0, q].set_title(f"{q + 1}: {where}", fontsize=8, pad=3)
            for head, panel in enumerate(axes[1:, q]):
                _heat(view, panel, maps[head, q], 0.65 if layer.rolled else 1)
                _cross(view, panel, pixel, 6)
                words = _greatest(maps[head, q], looked.uniform[q])
                if looked.elsewhere is not None:
                    words += f"\n{looked.elsewhere[head, q]:.0%} on {layer.prefix_words}"
                panel.set_title(words, fontsize=6, pad=2)
                if q == 0:
                    panel.set_ylabel(looked.names[head], fontsize=8)
        _cut(view, axes)


def draw_parts(view: View, layer: Maps, parts: dict[str, Maps], pixels: Sequence[Any], cut: float, out: Path) -> None:
    """Save a row for every query: the picture with it, and the mean map of heads of every part and of all terms.

    Weights below ``cut`` are left out.
    """
    cells = _cells(view, layer, pixels)
    columns = {name: one.look(cells) for name, one in {**parts, WHOLE: layer}.items()}
    heads, (h, w) = len(next(iter(columns.values())).maps), view.inside
    width = 1.8 * max(1.0, w / h)
    size = width * (len(columns) + 1), (width * h / w + 0.2) * len(cells) + 0.5
    title = f"{layer.name}: {EXPLAINED}{'' if heads == 1 else '; mean of all heads'}"
    with figure_of(len(cells), len(columns) + 1, size, title, 8, out) as axes:
        for q, pixel in enumerate(pixels):
            _picture(view, axes[q, 0])
            axes[q, 0].set_title(f"{q + 1}: {'cls token' if pixel == CLS else tuple(pixel)}", fontsize=7, pad=2)
            for panel, (name, looked) in zip(axes[q, 1:], columns.items()):
                mean = (looked.maps[0] if looked.names[0] == "mean of heads" else looked.maps.mean(0))[q]
                _heat(view, panel, mean.where(mean >= cut, float("nan")).cpu())
                panel.set_title(f"{name}\n{_greatest(mean, looked.uniform[q])}", fontsize=6, pad=2)
            for panel in axes[q]:
                _cross(view, panel, pixel, 7, 1.5)
        _cut(view, axes)


def draw_clip(view: View, layer: Steps, query: Any, out: Path) -> None:
    """Save the frames in a row, and below them the attention of the query in each: the mean of heads and every head.

    The query is (t, y, x) in pixels of the file, or the cls token. Maps in a row share one scale. The title of a map is
    its frame's share of the weight. Patches that are not keys of the query stay without colour.
    """
    (down, across), (T, *grid) = view.frames, layer.clip
    H, W = view.size[0] // down, view.size[1] // across

    def frame(picture: Any, t: int, h: int, w: int) -> Any:
        return picture[..., t // across * h : (t // across + 1) * h, t % across * w : (t % across + 1) * w]

    looked = layer.look(_cells(view, layer, [in_mosaic(view, query)]))
    chosen = list(range(T)) if T <= MOST_FRAMES else sampled(T, MOST_FRAMES)
    if query != CLS:
        chosen = sorted({*chosen, query[0]})
    width = 1.3 * max(1.0, W / H)
    size = width * len(chosen) + 1.2, (width * H / W + 0.2) * (len(looked.names) + 1) + 0.4
    shown = f"{len(chosen)} of {T}" if len(chosen) < T else str(T)
    title = f"{layer.title}: {shown} frames of {'×'.join(map(str, grid))} patches"
    pictures = view.picture.transpose(2, 0, 1)
    step = W * 1.04  # horizontal distance of frames: one panel per frame would take matplotlib minutes
    with figure_of(len(looked.names) + 1, 1, size, title, 9, out) as axes:
        panels = axes[:, 0]
        for column, t in enumerate(chosen):
            picture, keys = frame(pictures, t, H, W).transpose(1, 2, 0), frame(looked.keys[0], t, *grid).numpy()
            left = column * step
            extent = (left, left + W, H, 0)
            panels[0].imshow(picture, extent=extent)
            titles = [f"frame {t}"]
            for panel, whole in zip(panels[1:], looked.maps[:, 0]):
                maps = frame(whole, t, *grid)
                titles.append(f"{maps.sum():.0%}" if keys.any() else "no key")
                panel.imshow(picture.mean(-1), cmap="gray", vmin=0, vmax=255, extent=extent)
                options: Any = dict(vmin=0, vmax=float(whole.max()), alpha=0.65, extent=extent)
                panel.imshow(np.ma.array(maps.numpy(), mask=~keys), "viridis", interpolation="nearest", **options)
            for row, (panel, words) in enumerate(zip(panels, titles)):
                at = left + W / 2, -0.02 * H
                panel.text(*at, words, fontsize=6 if row else 8, ha="center", va="bottom")
                if query != CLS and query[0] == t:
                    y, x = ((n + 0.5) * scale for n, scale in zip(query[1:], view.scale))
                    panel.plot(left + x, y, "+", color="red", markersize=8)
        panels[0].set_ylabel("cls token" if query == CLS else f"({', '.join(map(str, query))})", fontsize=8)
        for row, panel in enumerate(panels[1:]):
            words = f"{looked.names[row]}\nmax {looked.maps[row].max():.2g}\nuniform {looked.uniform[0]:.2g}"
            if looked.elsewhere is not None:
                words += f"\n{looked.elsewhere[row, 0]:.0%} on {layer.prefix_words}"
            panel.set_ylabel(words, fontsize=6)
        for panel in panels:
            panel.set(xticks=[], yticks=[], xlim=(0, len(chosen) * step), ylim=(H, 0), frame_on=False)


def in_mosaic(view: View, query: Any) -> Any:
    """Convert a pixel (t, y, x) of a clip to a pixel (y, x) of the mosaic of its frames."""
    if query == CLS:
        return CLS
    height, width = (n // frames for n, frames in zip(view.file_size, view.frames))
    t, y, x = query
    return t // view.frames[1] * height + y, t % view.frames[1] * width + x


@contextmanager
def _panels(view: View, rows: int, columns: int, title: str, out: Path) -> Iterator[Any]:
    """Yield axes (rows, columns) in units of the picture's pixels; save the figure afterwards."""
    h, w = view.inside
    width = 2.0 * max(1.0, (w / h) ** 0.5)
    size = width * columns + 0.3, (width * h / w + 0.2) * rows + 0.45
    with figure_of(rows, columns, size, title, 9, out) as axes:
        _cut(view, axes)
        for panel in axes.flat:
            panel.set_aspect("equal")
            panel.axis("off")
        yield axes


@contextmanager
def _of_objects(view: View, title: str, out: Path) -> Iterator[Any]:
    """Yield a number and a panel for each object, with its title."""
    number = len(view.objects)
    columns = min(number, 4)
    with _panels(view, -(-number // columns), columns, title, out) as axes:
        panels = list(enumerate(axes.flat[:number]))
        for n, panel in panels:
            panel.set_title(view.objects.title(n), fontsize=7, pad=2)
        yield panels


def _box(panel: Any, box: Sequence[float], colour: str = "#38a3ff") -> None:
    left, top, right, bottom = (float(n) for n in box)
    for width, ink in ((2.4, "white"), (1.2, colour)):
        panel.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=ink, linewidth=width)


def draw_object_maps(view: View, layer: Tokens, out: Path) -> None:
    """Save one panel for each object: its query's attention, averaged over heads, and its box."""
    objects = view.objects
    looked = layer.look(objects.queries.tolist())
    maps = looked.maps.mean(0).cpu()  # (N, Hk, Wk)
    title = f"{layer.name}: where each object's query attends, mean of all heads, {maps.shape[1]}×{maps.shape[2]} keys"
    with _of_objects(view, title, out) as panels:
        for n, panel in panels:
            _heat(view, panel, maps[n], 0.7, "inferno")
            _box(panel, objects.boxes[n].tolist())
            panel.set_title(f"{objects.title(n)}\n{_greatest(maps[n], looked.uniform[n])}", fontsize=7, pad=2)


def draw_object_masks(view: View, out: Path) -> None:
    """Save one panel for each object: its mask, class and score."""
    h, w = view.inside
    with _of_objects(view, "Masks of the surest queries, their classes and scores", out) as panels:
        for n, panel in panels:
            mask = fine_mask(view.objects.masks[n], view.size, view.inside).sigmoid().numpy()
            grey = np.repeat(view.picture.astype(np.float32).mean(-1)[:h, :w, None], 3, -1) / 255 * 0.6
            share = 0.65 * mask[..., None]
            panel.imshow(grey * (1 - share) + np.array([0.24, 0.86, 0.36], np.float32) * share, extent=(0, w, h, 0))
            if mask.min() < 0.5 < mask.max():
                panel.contour(mask, [0.5], colors="white", linewidths=0.8, extent=(0, w, 0, h))


def draw_object_points(view: View, layer: Points, out: Path) -> None:
    """Save one panel for each object: the sampling points of its query, its reference and its box."""
    objects, references = view.objects, view.references(layer).tolist()
    places, weights = view.sampled(layer, objects.queries)
    with _of_objects(view, _sampled(layer, "each object's query"), out) as panels:
        for n, panel in panels:
            x, y, *size = references[n]
            _box(panel, objects.boxes[n].tolist())
            if size:
                _box(panel, (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2), "black")
            _points(view, panel, places[n], weights[n], (x, y))
        _legend(panels[0][1], layer)


def draw_pixel_points(view: View, layer: Points, pixels: Sequence[tuple[int, int]], out: Path) -> None:
    """Save the sampling points of pixels: levels of the query in rows, pixels in columns."""
    with _panels(view, len(layer.shapes), len(pixels), _sampled(layer, "each pixel"), out) as axes:
        for level, shape in enumerate(layer.shapes):
            cells = [view.cell(shape, pixel) for pixel in pixels]
            places, weights = view.sampled(layer, layer.number(level, cells))
            for q, panel in enumerate(axes[level]):
                y, x = ((n + 0.5) * scale for n, scale in zip(pixels[q], view.scale))
                height, width = (size / cells for size, cells in zip(view.size, shape))
                top, left = height * (y // height), width * (x // width)  # of the query's cell
                _box(panel, (left, top, left + width, top + height), "black")
                _points(view, panel, places[q], weights[q], (x, y))
                panel.set_title(f"{pixels[q]} on the map {shape[0]}×{shape[1]}", fontsize=7, pad=2)
        _legend(axes[0, 0], layer)


def _sampled(layer: Points, who: str) -> str:
    return f"{layer.name}: points that {who} reads on every level; the larger, the more weight"


def _points(view: View, panel: Any, places: Tensor, weights: Tensor, cross: tuple[float, float]) -> None:
    """Draw points (M, L, K, 2) in the colours of their levels, those of the least weight first, and their reference."""
    _picture(view, panel, 0.75)
    for level in range(places.shape[1]):
        xy, weight = places[:, level].reshape(-1, 2), weights[:, level].flatten()
        order = torch.argsort(weight)
        panel.scatter(
            *xy[order].T.numpy(), s=(LARGEST_POINT * weight[order] ** 0.75).numpy(), c=LEVEL_COLOURS[level % 6],
            edgecolors="black", linewidths=0.25, zorder=3, clip_on=True,
        )  # fmt: skip
    panel.plot(*cross, "+", color="black", markersize=9, markeredgewidth=2)


def _legend(panel: Any, layer: Points) -> None:
    for level, (H, W) in enumerate(layer.shapes):
        panel.scatter([], [], s=20, c=LEVEL_COLOURS[level % 6], edgecolors="black", linewidths=0.3, label=f"{H}×{W}")
    panel.figure.legend(loc="outside lower center", ncols=len(layer.shapes), fontsize=7, frameon=False)


def draw_slots(slots: Slots, out: Path) -> list[int]:
    """Save a panel for each of the queries with the best mean scores: the centres of its boxes in a unit square.

    Returns:
        The numbers of these queries.
    """
    mean = slots.scores.mean(0)
    chosen = np.sort(np.argsort(-mean, kind="stable")[:MOST_SLOTS])
    columns = min(len(chosen), 5)
    rows = -(-len(chosen) // columns)
    which = "all" if len(chosen) == slots.boxes.shape[1] else f"the {len(chosen)} surest of {slots.boxes.shape[1]}"
    title = f"Centres of the boxes in {len(slots.boxes)} pictures, {which} queries"
    with figure_of(rows, columns, (1.5 * columns, 1.62 * rows + 0.7), title, 9, out) as axes:
        for panel in axes.flat[len(chosen) :]:
            panel.axis("off")
        size = float(np.clip(400 / len(slots.boxes), 2, 12))
        for query, panel in zip(chosen, axes.flat):
            boxes = slots.boxes[:, query]
            boxes = boxes[boxes[:, 2] > 0]
            for n, (_, colour) in enumerate(KINDS):
                panel.scatter(*boxes[kind_of_box(boxes) == n, :2].T, s=size, c=colour, linewidths=0)
            panel.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", xticks=[], yticks=[])
            panel.set_title(f"query {query}: mean score {mean[query]:.2f}", fontsize=6.5, pad=2)
        labels = [f"{KINDS[0][0]} (under {SMALL:.0%} of the picture)", KINDS[1][0], KINDS[2][0]]
        marks = [axes[0, 0].plot([], [], marker="o", linestyle="", color=colour)[0] for _, colour in KINDS]
        legend: Any = dict(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
        axes[0, 0].figure.legend(marks, labels, **legend)
    return chosen.tolist()


def draw_words(sentence: Sentence, layer: WordMaps, out: Path, parts: bool = False) -> None:
    """Save the maps of all heads of a layer, their mean first, or of every part of the logits, averaged over heads."""
    if parts:
        panels = {name: weights.mean(0) for name, weights in {**layer.parts, WHOLE: layer.weights}.items()}
        title = EXPLAINED + ("" if len(layer.weights) == 1 else "; mean of all heads")
    else:
        panels = dict(zip(head_names(len(layer.weights)), with_mean(layer.weights)))
        title = TITLES[layer.kind]
    queries, keys = sentence.words[layer.kind]
    cell = min(CELL, LARGEST / max(len(queries), len(keys)))
    size = max(1.0, cell * len(keys)), max(1.0, cell * len(queries))
    longest = [0.09 * max(map(len, words)) * cell / CELL for words in (keys, queries)]
    columns = max(1, min(len(panels), round(LARGEST / (size[0] + longest[1] + 0.2))))
    rows = -(-len(panels) // columns)
    whole = (size[0] + longest[1] + 0.2) * columns, (size[1] + longest[0] + 0.3) * rows + 0.4
    with figure_of(rows, columns, whole, f"{layer.name}: {title}", 8, out) as axes:
        for panel, (name, weights) in zip(axes.flat, panels.items()):
            panel.imshow(weights.numpy(), cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
            panel.set_title(f"{name}, max {weights.max():.2g}", fontsize=7, pad=2)
            panel.set_xticks(range(len(keys)), keys, rotation=90, fontsize=40 * cell, parse_math=False)
            panel.set_yticks(range(len(queries)), queries, fontsize=40 * cell, parse_math=False)
            panel.tick_params(length=0, pad=1)
        for panel in axes.flat[len(panels) :]:
            panel.axis("off")
