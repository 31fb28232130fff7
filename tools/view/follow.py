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

from attn_plugins.modules import DeformableConv2d
from attn_plugins.modules.common.capture import Captured, record_calls
from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d
from tools.pictures import open_picture

from .figures import figure
from .layers import ViewError, chosen_layers

COLORS = ("#ff3b3b", "#38a3ff", "#ffd60a", "#3ddc5b", "#ff6ad5", "#ff9f1a")  # for queries


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


def draw(
    picture: np.ndarray,
    queries: Sequence,
    points: list[np.ndarray],
    heads: np.ndarray,
    covered: Any,
    name: str,
    out: Path,
) -> str:
    """Save ``picture`` (H, W, 3) with queries and points, then one map per head over it; return the caption.

    The maps (M, Hk, Wk) cover (height, width) pixels from the upper left corner, the picture and its padding.
    """
    (H, W), columns = picture.shape[:2], (len(heads) + 1) // 2
    caption = f"Left: each ring is a query, the dots of its color are the {len(points[0])} points that it reads."
    if columns:
        caption += f" Right: where {len(heads)} heads attend, the same for every query; the brighter, the more."
    width = 10 / (columns + 2)  # inches of a head's panel
    with figure(out, (width * (columns + 2), 2 * width * H / W + 0.9), f"read by {name}") as made:
        grid = made.add_gridspec(2, columns + 2)
        panels = [made.add_subplot(grid[:, :2])]
        panels += [made.add_subplot(grid[n // columns, 2 + n % columns]) for n in range(len(heads))]
        panels[0].imshow(picture, extent=(0, W, H, 0))
        for color, query, read in zip(cycle(COLORS), queries, points):
            panels[0].scatter(*(read[:, ::-1] + 0.5).T, s=12, c=color, edgecolors="black", linewidths=0.4)
            for stroke, ink in ((4, "white"), (2.4, color)):
                panels[0].plot(query[1] + 0.5, query[0] + 0.5, "o", ms=11, mfc="none", mec=ink, mew=stroke)
        for n, (panel, heat) in enumerate(zip(panels[1:], heads)):
            panel.imshow(picture.mean(-1), cmap="gray", extent=(0, W, H, 0))
            over: Any = dict(cmap="inferno", alpha=0.6, interpolation="bilinear")
            panel.imshow(heat, extent=(0, covered[1], covered[0], 0), **over)
            panel.set_title(f"head {n + 1}", fontsize=8, pad=3)
        for panel in panels:
            panel.set(xticks=[], yticks=[], xlim=(0, W), ylim=(H, 0))
        made.supxlabel(caption, fontsize=8)
    return caption


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
        ViewError: The model has no ``DeformableConv2d`` of ours, or none of this name.
    """
    from mmdet.apis import inference_detector

    picture = np.asarray(open_picture(image))
    kinds, calls = (DeformableConv2d, GeneralizedAttention2d), list[Captured]()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    with record_calls(layers, calls.append):
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
    if not queries:
        boxes = [result.pred_instances.bboxes[n].tolist() for n in distinct(result.pred_instances)[:3]]
        centres = [(round((top + bottom) / 2), round((left + right) / 2)) for left, top, right, bottom in boxes]
        queries = centres or [(picture.shape[0] // 2, picture.shape[1] // 2)]
    points = [follow(followed, np.array(query) * scale, padded) / scale for query in queries]

    heads = np.zeros((0, 1, 1))
    for call in calls:
        own = call.name.startswith(f"{last.rpartition('.')[0]}.")
        if own and getattr(call.layer, "attention_type", None) == "0010":
            heads = call.maps(torch.zeros(1, 2, dtype=torch.long))[0, :, 0].float().cpu().numpy()
    name = " through ".join(call.name.removeprefix("backbone.") for call in followed[::-1])
    return draw(picture, queries, points, heads, padded / scale, name, out)
