"""Draw where a detector with attention looks: sampling points of deformable convolutions, and key-saliency maps.

For any mmdet config with our layers, its checkpoint and an image::

    python -m tools.show_sampling CONFIG CHECKPOINT IMAGE OUT.png
    python -m tools.show_sampling CONFIG CHECKPOINT IMAGE OUT.png --layer layer3.5.conv2 --query 60,80 --depth 3

Left: for each query pixel (a ring; by default the centres of the detections with the highest scores) the points that a
deformable convolution reads for it, through ``--depth`` deformable layers on maps of the same size. Right: what the
key-content term (epsilon 3, "0010") of the same block attends to, one map per head.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from attn_plugins.modules import DeformableConv2d
from attn_plugins.modules.capture import Captured, remember_calls
from attn_plugins.modules.generalized_attention import GeneralizedAttention2d
from tools import need, picture_sheet
from tools.picture_sheet import GAP, INK, MARGIN, PAPER, TITLE_HEIGHT, WIDTH, Place, sheet, title

COLOURS = ("#ff3b3b", "#38a3ff", "#ffd60a", "#3ddc5b", "#ff6ad5", "#ff9f1a")  # for queries


@dataclass
class Seen:
    """A layer and its input in a forward pass."""

    name: str
    layer: Any
    input: Tensor  # (1, C, H, W)


def record(model: nn.Module, kinds: tuple[type[nn.Module], ...], run: Callable[[], object]) -> list[Seen]:
    """Return the layers of ``kinds`` with their inputs, in the order in which ``run()`` calls them."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    calls: list[Captured] = []
    with remember_calls(layers, calls.append):
        run()
    return [Seen(call.name, call.layer, call.arguments[0]) for call in calls]


def sampled(seen: Seen, points: np.ndarray) -> np.ndarray:
    """Return the positions that a deformable layer reads for output ``points``.

    Args:
        seen: The layer and its input.
        points: (N, 2), y and x in units of the layer's output grid; rounded to whole positions.

    Returns:
        (N * taps, 2), y and x in units of the layer's input grid.
    """
    layer = seen.layer
    with torch.no_grad():
        offset, _ = layer.predict(seen.input)
    height, width = offset.shape[2:]
    kernel = np.array(layer.kernel_size)
    nearest = np.clip(np.rint(points).astype(int), 0, [height - 1, width - 1])
    taps = np.stack(np.meshgrid(*map(np.arange, kernel), indexing="ij"), -1).reshape(-1, 2)
    moved = offset[0, :, nearest[:, 0], nearest[:, 1]].T.double().cpu().numpy()
    moved = moved.reshape(len(points), layer.offset_groups, len(taps), 2)[:, 0]  # the first offset group
    regular = nearest[:, None] * layer.stride - layer.padding + taps * layer.dilation
    return (regular + moved).reshape(-1, 2)


def follow(layers: list[Seen], query: np.ndarray, image: tuple[int, int]) -> np.ndarray:
    """Return the image points (N, 2) that ``layers``, deepest last, read for the image point ``query``, y and x."""
    points = np.asarray(query, float)[None]
    for seen in reversed(layers):
        grid = np.array(seen.input.shape[2:])
        step = np.array(image) / grid  # image pixels per input cell; a cell's value is at its centre
        points = (points + 0.5) / (step * seen.layer.stride) - 0.5
        points = (sampled(seen, points) + 0.5) * step - 0.5
    return points


def pick(layers: list[Seen], name: str | None, kind: str) -> int:
    """Return the index of the layer whose name ends with ``name``, or of the last layer if ``name`` is None.

    Raises:
        ValueError: no layer has this name.
    """
    found = [n for n, seen in enumerate(layers) if name is None or seen.name.endswith(name)]
    if not found:
        raise ValueError(f"no {kind} is called {name!r}; there are: {', '.join(seen.name for seen in layers)}")
    return found[-1]


def chain(layers: list[Seen], last: int, depth: int) -> list[Seen]:
    """Return up to ``depth`` layers, the last of which has index ``last``, that read maps of the same size."""
    size = layers[last].input.shape[2:]
    return [seen for seen in layers[: last + 1] if seen.input.shape[2:] == size][-depth:]


def saliency(seen: Seen) -> np.ndarray:
    """Return the attention of a '0010' layer, the same for every query: (heads, H, W)."""
    with torch.no_grad():
        attention = seen.layer.attention_maps(seen.input)
    return attention[0, :, 0, 0].float().cpu().numpy()


def distinct(found: Any) -> list[int]:
    """Return the detections by falling score, without overlapping ones of any class (non-maximum suppression)."""
    boxes, kept = found.bboxes.tolist(), list[int]()
    for n in found.scores.argsort(descending=True).tolist():
        y, x = (boxes[n][1] + boxes[n][3]) / 2, (boxes[n][0] + boxes[n][2]) / 2
        if not any(boxes[k][0] <= x <= boxes[k][2] and boxes[k][1] <= y <= boxes[k][3] for k in kept):
            kept.append(n)
    return kept


def default_queries(found: Any, image: tuple[int, int], count: int = 3) -> list[tuple[int, int]]:
    """Return the centres of the detections with the highest scores, padded with points spread over the picture."""
    height, width = image
    boxes = [found.bboxes[n].tolist() for n in distinct(found)]
    spread = [(height // 3, width // 4), (height // 2, width // 2), (2 * height // 3, 3 * width // 4)]
    centres = [(round((top + bottom) / 2), round((left + right) / 2)) for left, top, right, bottom in boxes]
    return (centres + spread)[:count]


def save(figure: Any, out: Path) -> None:
    """Save a figure as a PNG."""
    figure.savefig(out, bbox_inches="tight", format="png", pil_kwargs=dict(optimize=True))


def draw(
    picture: np.ndarray, queries: list, points: list[np.ndarray], heads: np.ndarray | None, name: str, out: Path
) -> str:
    """Save the panels: ``picture`` (H, W, 3) with queries and points, then one map per head over it, in order.

    Returns:
        The caption of the picture.
    """
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
    picture_sheet.save(page, out)
    return caption


def _panels(aspect: float, heads: int) -> list[Place]:
    """Return the places of a large panel and of two rows of head panels beside it, with the same total height."""
    if not heads:
        return [(0, TITLE_HEIGHT, WIDTH // 2, round(WIDTH / 2 / aspect))]
    columns = (heads + 1) // 2
    # The heads' width w: (WIDTH - columns (w + GAP)) / aspect = 2 w / aspect + GAP + TITLE_HEIGHT
    width = round((WIDTH - columns * GAP - aspect * (GAP + TITLE_HEIGHT)) / (columns + 2))
    height, left = round(width / aspect), WIDTH - columns * (width + GAP)
    rest = [
        (
            left + GAP + n % columns * (width + GAP),
            TITLE_HEIGHT + n // columns * (height + GAP + TITLE_HEIGHT),
            width,
            height,
        )
        for n in range(heads)
    ]
    return [(0, TITLE_HEIGHT, left, 2 * height + GAP + TITLE_HEIGHT), *rest]


def _with_points(picture: np.ndarray, queries: list, points: list[np.ndarray], size: tuple[int, int]) -> Image.Image:
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


def show(
    config: str | Path,
    checkpoint: str | Path,
    image: str | Path,
    out: Path,
    queries: list[tuple[int, int]] | None = None,
    layer: str | None = None,
    depth: int = 2,
    device: str = "cpu",
) -> str:
    """Run the detector on ``image`` and save the drawing.

    Returns:
        The caption of the picture.

    Raises:
        ValueError: the model has no ``DeformableConv2d`` of ours, or none called ``layer``.
    """
    from mmdet.apis import inference_detector, init_detector

    model = init_detector(str(config), str(checkpoint), device=device)
    picture = np.asarray(Image.open(image).convert("RGB"))
    size = picture.shape[0], picture.shape[1]
    results: list[Any] = []
    kinds = (DeformableConv2d, GeneralizedAttention2d)
    seen = record(model, kinds, lambda: results.append(inference_detector(model, str(image))))
    deformable = [s for s in seen if isinstance(s.layer, DeformableConv2d)]
    if not deformable:
        raise ValueError(f"{config} has no DeformableConv2d of attn_plugins")
    last = pick(deformable, layer, "deformable convolution")

    # The network's input is resized and padded below and to the right: compute there, draw in the file's pixels.
    scale = np.array(results[0].metainfo["scale_factor"])[::-1]
    padded = tuple(results[0].metainfo["batch_input_shape"])
    queries = queries or default_queries(results[0].pred_instances.cpu(), size)
    followed = chain(deformable, last, depth)
    points = [follow(followed, np.array(q) * scale, padded) / scale for q in queries]

    heads = None
    block = deformable[last].name.rpartition(".")[0]
    for s in seen:
        if s.name.startswith(f"{block}.") and getattr(s.layer, "attention_type", None) == "0010":
            heads = np.stack([_unpad(m, np.array(size) * scale, padded) for m in saliency(s)])
    name = " through ".join(s.name.removeprefix("backbone.") for s in followed[::-1])
    return draw(picture, queries, points, heads, name, out)


def _unpad(heat: np.ndarray, inside: np.ndarray, padded: tuple[int, int]) -> np.ndarray:
    """Crop a map over the padded picture to the picture itself, on a fine grid for a sharp edge."""
    fine = nn.functional.interpolate(torch.as_tensor(heat)[None, None], padded, mode="bilinear")[0, 0].numpy()
    return fine[: round(inside[0]), : round(inside[1])]


def _query(text: str) -> tuple[int, int]:
    try:
        y, x = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected y,x in pixels, got {text!r}") from None
    return y, x


def main(arguments: list[str] | None = None) -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("config")
    parser.add_argument("checkpoint")
    parser.add_argument("image")
    parser.add_argument("out", type=Path)
    parser.add_argument("--query", type=_query, action="append", help="y,x of a query pixel; may be repeated")
    parser.add_argument("--layer", help="the deformable convolution to start from, by the end of its name")
    parser.add_argument("--depth", type=int, default=2, help="how many deformable layers to follow, default 2")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    need("mmdet", "mmcv", "mmengine", "matplotlib")
    line = show(
        options.config,
        options.checkpoint,
        options.image,
        options.out,
        options.query,
        options.layer,
        options.depth,
        options.device,
    )
    print(f"written: {options.out}\n  {line}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
