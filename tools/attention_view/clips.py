"""A model's view of a clip: its frames, and the attention from one frame to all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tools.clips import is_clip, open_clip, sampled
from tools.files import write
from tools.pictures import open_picture
from tools.show_sampling import save

from .space_time import Attended, ClipMaps, Place, capture_clip, clip_rollouts, layout, mosaic, step_layers
from .view import View, ViewError, chosen_layers, one_line
from .vit import CLS, has_cls

MOST_FRAMES = 16  # shown in a PNG


@dataclass(kw_only=True)
class ClipView(View):
    """A model's view of a clip, whose picture is the mosaic of its frames.

    Attributes:
        frames: (T, H, W, 3) uint8, as the model received them.
        frame_size: (H, W) of a frame of the file.
    """

    frames: np.ndarray
    frame_size: tuple[int, int]

    @property
    def page_picture(self) -> np.ndarray:
        """Return the mosaic with a white line between frames."""
        picture, (H, W) = self.picture.copy(), self.frames.shape[1:3]
        picture[H::H], picture[:, W::W] = 255, 255
        return picture

    def place(self, layer: ClipMaps, query: Place) -> Place:
        """Return the patch that contains a pixel (t, y, x) of the clip."""
        if isinstance(query, str):
            return query
        y, x = (min(n * cells // size, cells - 1) for n, cells, size in zip(query[1:], layer.clip[1:], self.frame_size))
        return query[0], y, x


def takes_clips(model: Any) -> bool:
    """Return whether a model is a TimeSformer."""
    return bool(step_layers(model))


def open_frames(model: Any, path: Path) -> list[Image.Image]:
    """Open as many frames of a clip as the model expects; a picture is a clip of one frame.

    Raises:
        BadPicture: the clip cannot be read.
    """
    if path.is_dir() or is_clip(path):
        return open_clip(path, model.num_frames)
    return [open_picture(path)]


def view_clip(
    model: Any, frames: Sequence[Image.Image], layers: Sequence[str], size: tuple[int, int], with_rollout: bool = False
) -> ClipView:
    """Run a TimeSformer on whole frames, resized to (H, W).

    Args:
        model: The model.
        frames: The pictures.
        layers: Name patterns; empty for the steps of the last block.
        size: (H, W).
        with_rollout: Whether to add the rollout.

    Raises:
        ValueError: a pattern matches no layer, or the model does not accept this size.
    """
    from timm.data import resolve_model_data_config

    config, (H, W) = resolve_model_data_config(model), size
    pictures = np.stack([np.array(frame.resize((W, H), Image.Resampling.BICUBIC)) for frame in frames])
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    x = ((torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255 - mean) / std).unsqueeze(0)

    known = list(step_layers(model))
    last = [name for name in known if name.startswith(known[-1].rpartition(".")[0] + ".")]
    named = chosen_layers(model, known, layers) if layers else last
    with torch.no_grad(), capture_clip(model) as captured:
        try:
            model(x)
        except AssertionError as error:  # raised by timm for a wrong size
            raise ViewError(
                f"{type(model).__name__} does not accept frames of {H}×{W} pixels: {one_line(error)} "
                "With --model-args dynamic_img_size=true it accepts any whole number of patches"
            ) from error
    shown = {name: captured[name] for name in named}
    if with_rollout:
        shown.update(clip_rollouts(model, captured))
    (down, across), (width, height) = layout(len(frames)), frames[0].size
    picture = mosaic(torch.from_numpy(pictures).permute(3, 0, 1, 2)).permute(1, 2, 0).numpy()
    scale, file_size = (H / height, W / width), (down * height, across * width)
    return ClipView(
        picture=picture, scale=scale, file_size=file_size, captured=shown, frames=pictures, frame_size=(height, width)
    )


def parse_places(texts: Sequence[str], frames: int, size: tuple[int, int], model: Any) -> list[Place]:
    """Parse ``'t,y,x'`` texts as pixels of a clip, and ``'cls'``.

    Args:
        texts: Texts; empty for the cls token, if any, and the middle of the clip.
        frames: T.
        size: (H, W) of a frame.
        model: The model, which may have a cls token.

    Raises:
        ViewError: a text is invalid, or there is no such pixel or token.
    """
    H, W = size
    if not texts:
        first: list[Place] = [CLS] if has_cls(model) else []
        return [*first, (frames // 2, H // 2, W // 2)]
    found: list[Place] = []
    for text in texts:
        if text == CLS:
            if not has_cls(model):
                raise ViewError("--pixels cls needs a model with a cls token: this one has none")
            found.append(CLS)
            continue
        match = re.fullmatch(r"(\d+),(\d+),(\d+)", text)
        if match is None:
            raise ViewError(f"--pixels must be FRAME,Y,X of a clip, frames counted from 0, or cls, got {text!r}")
        t, y, x = (int(n) for n in match.groups())
        if t >= frames or y >= H or x >= W:
            raise ViewError(f"--pixels must lie in the clip of {frames} frames of {H}×{W} pixels, got {text!r}")
        found.append((t, y, x))
    return found


def file_name(layer: ClipMaps, query: Place) -> str:
    """Return the file name of the PNG of a layer and a query."""
    return f"{layer.name}_{query if isinstance(query, str) else '-'.join(map(str, query))}.png"


def draw_clip(view: ClipView, layer: ClipMaps, query: Place, out: Path) -> None:
    """Save the frames in a row, and below them the attention of the query in each: the mean of heads and every head.

    Maps in a row share one scale. The title of a map is its frame's share of the weight. Patches that are not keys of
    the query stay without colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = layer.attended([view.place(layer, query)])
    T, (H, W) = len(view.frames), view.frames.shape[1:3]
    chosen = list(range(T)) if T <= MOST_FRAMES else sampled(T, MOST_FRAMES)
    if not isinstance(query, str):
        chosen = sorted({*chosen, query[0]})
    heads, width = len(found.names), 1.3 * max(1.0, W / H)
    size = width * len(chosen) + 1.2, (width * H / W + 0.2) * (heads + 1) + 0.4
    figure, axes = plt.subplots(heads + 1, 1, dpi=180, layout="constrained", figsize=size)
    step = W * 1.04  # horizontal distance of frames: one panel per frame would take matplotlib minutes
    for column, t in enumerate(chosen):
        left = column * step
        extent = (left, left + W, H, 0)
        axes[0].imshow(view.frames[t], extent=extent)
        axes[0].text(left + W / 2, -0.02 * H, f"frame {t}", fontsize=8, ha="center", va="bottom")
        _draw_maps(axes[1:], found, view.frames[t], t, extent)
        for panel in axes:
            if not isinstance(query, str) and query[0] == t:
                y, x = ((n + 0.5) * scale for n, scale in zip(query[1:], view.scale))
                panel.plot(left + x, y, "+", color="red", markersize=8)
    axes[0].set_ylabel("cls token" if isinstance(query, str) else f"({', '.join(map(str, query))})", fontsize=8)
    for row, panel in enumerate(axes[1:]):
        words = f"{found.names[row]}\nmax {found.maps[row].max():.2g}\nuniform {found.uniform[0]:.2g}"
        if found.elsewhere is not None:
            words += f"\n{found.elsewhere[row, 0]:.0%} on {layer.prefix_words}"
        panel.set_ylabel(words, fontsize=6)
    for panel in axes:
        panel.set(xticks=[], yticks=[], xlim=(0, len(chosen) * step), ylim=(H, 0), frame_on=False)
    shown = f"{len(chosen)} of {T}" if len(chosen) < T else str(T)
    grid = "×".join(map(str, layer.clip[1:]))
    figure.suptitle(f"{layer.title}: {shown} frames of {grid} patches", fontsize=9)
    write(out, lambda partial: save(figure, partial))
    plt.close(figure)


def _draw_maps(
    panels: Sequence[Any], found: Attended, frame: np.ndarray, t: int, extent: tuple[float, float, float, float]
) -> None:
    """Draw the first query's maps over a frame."""
    assert found.keys is not None
    keys, (left, right, bottom, _) = found.keys[0, t].numpy(), extent
    for panel, maps in zip(panels, found.maps[:, 0]):
        panel.imshow(frame.mean(-1), cmap="gray", vmin=0, vmax=255, extent=extent)
        words = f"{maps[t].sum():.0%}" if keys.any() else "no key"
        panel.text((left + right) / 2, -0.02 * bottom, words, fontsize=6, ha="center", va="bottom")
        shown, most = np.ma.array(maps[t].numpy(), mask=~keys), float(maps.max())
        panel.imshow(shown, "viridis", vmin=0, vmax=most, alpha=0.65, extent=extent, interpolation="nearest")
