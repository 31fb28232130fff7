"""PNG grids after Bello et al. (2019), Fig. 9 and 10: heads in rows, query pixels in columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.files import write
from tools.show_sampling import save

from .view import PixelMaps, View, query_maps
from .vit import CLS, Cell, PatchMaps


def draw(view: View, layer: PixelMaps, pixels: Sequence[Cell], out: Path) -> None:
    """Save the picture with its numbered query pixels and, below, every head's map for each of them.

    The title of a map is its greatest weight, with the weight of uniform attention for comparison. A query may be the
    cls token; a rollout is drawn over the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert layer.size is not None
    cells: list[Cell] = [CLS if isinstance(pixel, str) else view.cell(layer.size, pixel) for pixel in pixels]
    found = query_maps(layer, cells)
    maps, uniform = found.maps.cpu().numpy(), found.uniform.tolist()  # (M, Q, Hk, Wk), (Q,)
    over = isinstance(layer, PatchMaps) and layer.x is None
    heads, queries = maps.shape[:2]
    (H, W), (h, w) = view.size, view.inside
    width = 1.5 * max(1.0, w / h)
    height = width * h / w
    figure, axes = plt.subplots(
        heads + 1,
        queries,
        squeeze=False,
        dpi=180,
        layout="constrained",
        figsize=(width * queries + 0.4, (height + (0.14 if found.elsewhere is None else 0.24)) * (heads + 1) + 0.3),
    )
    for q, pixel in enumerate(pixels):
        axes[0, q].imshow(view.picture, extent=(0, W, H, 0))
        if isinstance(pixel, str):
            place: list[float] | None = None
            axes[0, q].set_title(f"{q + 1}: cls token", fontsize=8, pad=3)
        else:
            place = [n * scale for n, scale in zip(pixel, view.scale)]
            axes[0, q].plot(place[1], place[0], "+", color="red", markersize=10, markeredgewidth=2)
            axes[0, q].set_title(f"{q + 1}: ({pixel[0]}, {pixel[1]})", fontsize=8, pad=3)
        for head in range(heads):
            panel = axes[head + 1, q]
            if over:
                panel.imshow(view.picture.mean(-1), cmap="gray", extent=(0, W, H, 0))
            panel.imshow(
                maps[head, q],
                cmap="viridis",
                vmin=0,
                alpha=0.65 if over else 1,
                extent=(0, W, H, 0),
                interpolation="nearest",
            )
            if place is not None:
                panel.plot(place[1], place[0], "+", color="red", markersize=6)
            words = f"max {maps[head, q].max():.2g} (uniform {uniform[q]:.2g})"
            if found.elsewhere is not None and isinstance(layer, PatchMaps):
                words += f"\n{found.elsewhere[head, q]:.0%} on {layer.prefix_words}"
            panel.set_title(words, fontsize=6, pad=2)
            if q == 0:
                panel.set_ylabel(found.names[head], fontsize=8)
    for panel in axes.flat:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.set(xlim=(0, w), ylim=(h, 0))  # without the padding
    Hq, Wq = layer.size
    figure.suptitle(f"{layer.name}: {Hq}×{Wq} queries, {maps.shape[2]}×{maps.shape[3]} keys", fontsize=9)
    write(out, lambda partial: save(figure, partial))
    plt.close(figure)
