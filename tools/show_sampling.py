"""Draws where an attended detector looks: sampling points of deformable convolutions and key-saliency maps.

For any mm config with our layers, its checkpoint and an image::

    python -m tools.show_sampling CONFIG CHECKPOINT IMAGE OUT.png
    python -m tools.show_sampling CONFIG CHECKPOINT IMAGE OUT.png --query 60,80 --query 100,40 --layers 2

Left: for each query pixel (a ring) the points that the last ``--layers`` deformable convolutions of the
last stage read for it; a point's own points are followed one layer down. Right: what the key-content term
(epsilon 3, "0010") attends to, one map per head, of the last attention layer that has that term alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attn_plugins.modules import DeformableConv2d
from attn_plugins.modules.generalized_attention import GeneralizedAttention2d


@dataclass
class Seen:
    """A layer and the input it had in a forward pass."""

    name: str
    layer: Any
    input: Tensor  # (1, C, H, W)


def record(model: nn.Module, kinds: tuple[type[nn.Module], ...], run: Callable[[], object]) -> list[Seen]:
    """The layers of ``kinds`` with their inputs, in the order in which ``run()`` calls them."""
    seen: list[Seen] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: seen.append(Seen(name, layer, inputs[0])))
        for name, layer in model.named_modules()
        if isinstance(layer, kinds)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def sampled(seen: Seen, points: np.ndarray) -> np.ndarray:
    """Where a deformable layer reads, for output ``points``.

    Args:
        seen: The layer and its input.
        points: (N, 2), y and x in units of the layer's output grid; rounded to its positions.

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
    """The image points (N, 2) that ``layers``, deepest last, read for the image point ``query``, y and x."""
    points = np.asarray(query, float)[None]
    for seen in reversed(layers):
        grid = np.array(seen.input.shape[2:])
        step = np.array(image) / grid  # image pixels per input cell; a cell's value sits at its centre
        points = (points + 0.5) / (step * seen.layer.stride) - 0.5
        points = (sampled(seen, points) + 0.5) * step - 0.5
    return points


def last_stage(layers: list[Seen], count: int) -> list[Seen]:
    """The last ``count`` layers that read a map of the size that the last one reads."""
    size = layers[-1].input.shape[2:]
    return [seen for seen in layers if seen.input.shape[2:] == size][-count:]


def saliency(seen: Seen) -> np.ndarray:
    """The attention of a '0010' layer, the same for every query: (heads, H, W)."""
    with torch.no_grad():
        _, attention = seen.layer(seen.input, return_attention=True)
    return attention[0, :, 0, 0].float().cpu().numpy()


def default_queries(image: tuple[int, int]) -> list[tuple[int, int]]:
    height, width = image
    return [(height // 3, width // 4), (height // 2, width // 2), (2 * height // 3, 3 * width // 4)]


def draw(
    picture: np.ndarray, queries: list, points: list[np.ndarray], heads: np.ndarray | None, title: str, out: Path
) -> None:
    """Save the panels: ``picture`` (H, W, 3) with queries and points, then one map per head over it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height, width = picture.shape[:2]
    heads = np.zeros((0, 1, 1)) if heads is None else heads
    count = len(heads)
    columns = 2 + (count + 1) // 2
    figure = plt.figure(figsize=(2.2 * columns * width / height, 4.6), dpi=90)
    grid = figure.add_gridspec(2, columns, wspace=0.05, hspace=0.15)
    axes = figure.add_subplot(grid[:, :2])
    axes.imshow(picture)
    for number, (query, read) in enumerate(zip(queries, points)):
        colour = plt.cm.Set1(number % 9)
        axes.scatter(read[:, 1], read[:, 0], s=7, color=colour, linewidths=0)
        axes.scatter(query[1], query[0], s=90, facecolors="none", edgecolors="white", linewidths=3.5)
        axes.scatter(query[1], query[0], s=90, facecolors="none", edgecolors=colour, linewidths=2)
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), title=title)
    axes.axis("off")
    for head in range(count):
        axes = figure.add_subplot(grid[head % 2, 2 + head // 2])
        axes.imshow(picture.mean(2), cmap="gray", alpha=0.6)
        axes.imshow(
            heads[head],
            cmap="inferno",
            alpha=0.6,
            extent=(-0.5, width - 0.5, height - 0.5, -0.5),
            interpolation="bilinear",
        )
        axes.set_title(f"saliency, head {head}", fontsize=8)
        axes.axis("off")
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)


def show(
    config: str | Path,
    checkpoint: str | Path,
    image: str | Path,
    out: Path,
    queries: list[tuple[int, int]] | None = None,
    layers: int = 2,
    device: str = "cpu",
) -> None:
    """Run the detector on ``image`` and save the drawing.

    Raises:
        ValueError: the model has neither a deformable convolution nor a '0010' attention of ours.
    """
    from mmdet.apis import inference_detector, init_detector
    from PIL import Image

    model = init_detector(str(config), str(checkpoint), device=device)
    picture = np.asarray(Image.open(image).convert("RGB"))
    kinds = (DeformableConv2d, GeneralizedAttention2d)
    result = []
    seen = record(model, kinds, lambda: result.append(inference_detector(model, str(image))))
    deformable = [s for s in seen if isinstance(s.layer, DeformableConv2d)]
    salient = [s for s in seen if getattr(s.layer, "attention_type", None) == "0010"]
    if not deformable and not salient:
        raise ValueError(f"{config} has neither a DeformableConv2d nor a GeneralizedAttention2d of type '0010'")

    # The network saw a resized picture, padded below and to the right: work there, draw in the file's pixels.
    scale = np.array(result[0].metainfo["scale_factor"])[::-1]
    padded = tuple(result[0].metainfo["batch_input_shape"])
    if queries is None:
        queries = default_queries((picture.shape[0], picture.shape[1]))
    points = []
    if deformable:
        deformable = last_stage(deformable, layers)
        points = [follow(deformable, np.array(q) * scale, padded) / scale for q in queries]
    heads = None
    if salient:
        maps = saliency(salient[-1])
        heads = np.stack([_unpad(m, np.array(picture.shape[:2]) * scale, padded) for m in maps])
    title = ", ".join(s.name.removeprefix("backbone.") for s in deformable[::-1])
    draw(picture, queries if points else [], points, heads, f"read by {title}" if title else "", out)


def _unpad(heat: np.ndarray, inside: np.ndarray, padded: tuple[int, int]) -> np.ndarray:
    """Cut a map over the padded picture to the picture itself, on a fine grid so that the edge is sharp."""
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
    parser.add_argument("--layers", type=int, default=2, help="how many deformable layers to follow")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    show(options.config, options.checkpoint, options.image, options.out, options.query, options.layers, options.device)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
