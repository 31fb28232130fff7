"""Where a detector with deformable convolutions looks: their sampling points, and key-saliency maps of the same block.

Left: for each query pixel the points that a deformable convolution reads for it, through several such layers on maps
of the same size. Right: what the key-content term (epsilon 3, "0010") of the same block attends to, one map per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from attn_plugins.modules import DeformableConv2d
from attn_plugins.modules.common.capture import Captured, remember_calls
from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d
from tools.files import write
from tools.picture_sheet import GAP, INK, MARGIN, PAPER, TITLE_HEIGHT, WIDTH, Place, sheet, title
from tools.pictures import open_picture

from .maps import ViewError
from .models import chosen_layers
from .objects import fine_mask

COLOURS = ("#ff3b3b", "#38a3ff", "#ffd60a", "#3ddc5b", "#ff6ad5", "#ff9f1a")  # for queries


def sampled(call: Captured, points: np.ndarray) -> np.ndarray:
    """Return the positions (N * taps, 2), y and x on the input grid, that a deformable layer reads.

    They are those for output ``points`` (N, 2), y and x on the output grid, rounded to whole positions.
    """
    layer = call.layer
    with torch.no_grad():
        offset, _ = layer.predict(call.arguments[0])
    height, width = offset.shape[2:]
    kernel = np.array(layer.kernel_size)
    nearest = np.clip(np.rint(points).astype(int), 0, [height - 1, width - 1])
    taps = np.stack(np.meshgrid(*map(np.arange, kernel), indexing="ij"), -1).reshape(-1, 2)
    moved = offset[0, :, nearest[:, 0], nearest[:, 1]].T.double().cpu().numpy()
    moved = moved.reshape(len(points), layer.offset_groups, len(taps), 2)[:, 0]  # the first offset group
    regular = nearest[:, None] * layer.stride - layer.padding + taps * layer.dilation
    return (regular + moved).reshape(-1, 2)


def follow(layers: Sequence[Captured], query: np.ndarray, image: tuple[int, int]) -> np.ndarray:
    """Return the image points (N, 2) that ``layers``, deepest last, read for the image point ``query``, y and x."""
    points = np.asarray(query, float)[None]
    for call in reversed(layers):
        grid = np.array(call.arguments[0].shape[2:])
        step = np.array(image) / grid  # image pixels per input cell; a cell's value is at its centre
        points = (points + 0.5) / (step * call.layer.stride) - 0.5
        points = (sampled(call, points) + 0.5) * step - 0.5
    return points


def distinct(detections: Any) -> list[int]:
    """Return the detections by falling score, without overlapping ones of any class (non-maximum suppression)."""
    boxes, kept = detections.bboxes.tolist(), list[int]()
    for n in detections.scores.argsort(descending=True).tolist():
        y, x = (boxes[n][1] + boxes[n][3]) / 2, (boxes[n][0] + boxes[n][2]) / 2
        if not any(boxes[k][0] <= x <= boxes[k][2] and boxes[k][1] <= y <= boxes[k][3] for k in kept):
            kept.append(n)
    return kept


def default_queries(detections: Any, image: tuple[int, int], count: int = 3) -> list[tuple[int, int]]:
    """Return the centres of the detections with the highest scores, padded with points spread over the picture."""
    height, width = image
    boxes = [detections.bboxes[n].tolist() for n in distinct(detections)]
    spread = [(height // 3, width // 4), (height // 2, width // 2), (2 * height // 3, 3 * width // 4)]
    centres = [(round((top + bottom) / 2), round((left + right) / 2)) for left, top, right, bottom in boxes]
    return (centres + spread)[:count]


def draw(
    picture: np.ndarray, queries: Sequence, points: list[np.ndarray], heads: np.ndarray | None, name: str, out: Path
) -> str:
    """Save ``picture`` (H, W, 3) with queries and points, then one map per head over it; return the caption."""
    heads = np.zeros((0, 1, 1)) if heads is None else heads
    places = _panels(picture.shape[1] / picture.shape[0], len(heads))
    caption = f"Left: each ring is a query, the dots of its colour are the {len(points[0])} points that it reads."
    if len(heads):
        caption += f" Right: where {len(heads)} heads attend, the same for every query; the brighter, the more."
    else:
        caption = caption.removeprefix("Left: ").capitalize()
    page = sheet(places, caption)
    panels = [_with_points(picture, queries, points, places[0][2:])]
    panels += [_with_heat(picture, head, place[2:]) for head, place in zip(heads, places[1:])]
    titles = [f"read by {name}", *(f"head {n}" for n in range(len(heads)))]
    for panel, text, (left, top, width, _) in zip(panels, titles, places):
        title(page, (MARGIN + left, MARGIN + top - TITLE_HEIGHT), text, width)
        page.paste(panel, (MARGIN + left, MARGIN + top))
    write(out, lambda partial: page.save(partial, optimize=True))
    return caption


def _panels(aspect: float, heads: int) -> list[Place]:
    """Return the places of a large panel and of two rows of head panels beside it, with the same total height."""
    if not heads:
        return [(0, TITLE_HEIGHT, WIDTH // 2, round(WIDTH / 2 / aspect))]
    columns = (heads + 1) // 2
    # The heads' width w: (WIDTH - columns (w + GAP)) / aspect = 2 w / aspect + GAP + TITLE_HEIGHT
    width = round((WIDTH - columns * GAP - aspect * (GAP + TITLE_HEIGHT)) / (columns + 2))
    height, left = round(width / aspect), WIDTH - columns * (width + GAP)
    across, down = width + GAP, height + GAP + TITLE_HEIGHT
    rest = [
        (left + GAP + n % columns * across, TITLE_HEIGHT + n // columns * down, width, height) for n in range(heads)
    ]
    return [(0, TITLE_HEIGHT, left, 2 * height + GAP + TITLE_HEIGHT), *rest]


def _with_points(
    picture: np.ndarray, queries: Sequence, points: list[np.ndarray], size: tuple[int, int]
) -> Image.Image:
    panel = Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(panel)
    scale = np.array(size) / (picture.shape[1], picture.shape[0])
    for colour, query, read in zip(cycle(COLOURS), queries, points):
        for at in read:
            _dot(pen, (at[::-1] + 0.5) * scale, 5, fill=colour, outline=INK)
        middle = (np.array(query[::-1]) + 0.5) * scale
        for radius, stroke, ink in ((20, 9, PAPER), (18, 5, colour)):
            _dot(pen, middle, radius, outline=ink, width=stroke)
    return panel


def _dot(pen: ImageDraw.ImageDraw, at: np.ndarray, radius: int, **style: Any) -> None:
    pen.ellipse((*(at - radius), *(at + radius)), **style)


def _with_heat(picture: np.ndarray, heat: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Return the picture in grey, with a map over it from its least value (dark) to its greatest (bright)."""
    from matplotlib import colormaps

    span = max(float(np.ptp(heat)), 1e-12)
    fine = Image.fromarray(((heat - heat.min()) / span).astype(np.float32)).resize(size, Image.Resampling.BILINEAR)
    colour = 255 * colormaps["inferno"](np.asarray(fine))[..., :3]
    grey = np.asarray(Image.fromarray(picture).convert("L").resize(size, Image.Resampling.BICUBIC))[..., None]
    return Image.fromarray((0.6 * colour + 0.4 * grey).round().astype(np.uint8))


def follow_picture(
    model: Any,
    image: Path,
    out: Path,
    queries: Sequence[tuple[int, int]] | None = None,
    patterns: Sequence[str] = (),
    depth: int = 2,
) -> str:
    """Run a detector of mmdet on ``image``, save the drawing as ``out``, and return its caption.

    Args:
        queries: (y, x) of pixels; None for the centres of the detections with the highest scores.
        patterns: Names of the deformable convolution to start from; empty for the last.
        depth: How many deformable convolutions to follow, on maps of the same size.

    Raises:
        ViewError: the model has no ``DeformableConv2d`` of ours, or none of this name.
    """
    from mmdet.apis import inference_detector

    picture = np.asarray(open_picture(image))
    size = picture.shape[0], picture.shape[1]
    kinds, calls = (DeformableConv2d, GeneralizedAttention2d), list[Captured]()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    with remember_calls(layers, calls.append):
        result = inference_detector(model, str(image))
    deformable = [call for call in calls if isinstance(call.layer, DeformableConv2d)]
    if not deformable:
        raise ViewError(f"--follow needs a DeformableConv2d of attn_plugins, and {type(model).__name__} has none")
    names = [call.name for call in deformable]
    last = chosen_layers(names, patterns)[-1]
    before = deformable[: names.index(last) + 1]
    grid = before[-1].arguments[0].shape[2:]
    followed = [call for call in before if call.arguments[0].shape[2:] == grid][-depth:]

    # The network's input is resized and padded below and to the right: compute there, draw in the file's pixels.
    scale = np.array(result.metainfo["scale_factor"])[::-1]
    padded = tuple(result.metainfo["batch_input_shape"])
    queries = queries or default_queries(result.pred_instances.cpu(), size)
    points = [follow(followed, np.array(query) * scale, padded) / scale for query in queries]

    heads = None
    for call in calls:
        own = call.name.startswith(f"{last.rpartition('.')[0]}.")
        if own and getattr(call.layer, "attention_type", None) == "0010":
            maps = call.maps(torch.zeros(1, 2, dtype=torch.long))[0, :, 0].float().cpu().numpy()
            inside = [round(n) for n in np.array(size) * scale]
            heads = np.stack([fine_mask(torch.as_tensor(m), padded, inside).numpy() for m in maps])
    name = " through ".join(call.name.removeprefix("backbone.") for call in followed[::-1])
    return draw(picture, queries, points, heads, name, out)
