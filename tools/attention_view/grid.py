"""PNG grids after Bello et al. (2019), Fig. 9 and 10: heads in rows, query pixels in columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tools.files import write
from tools.show_sampling import save

from .view import PixelMaps, View, uniform_weights


def draw(view: View, layer: PixelMaps, pixels: Sequence[tuple[int, int]], out: Path) -> None:
    """Save the picture with its numbered query pixels, and below every head's map for each of them.

    Above a map stands its greatest weight and, to judge it by, the weight that uniform attention would give.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert layer.size is not None
    cells = [view.cell(layer.size, pixel) for pixel in pixels]
    maps = layer.maps(torch.tensor(cells))[0].float().cpu().numpy()  # (M, Q, Hk, Wk)
    uniform = uniform_weights(layer, torch.tensor(cells)).tolist()
    heads, queries = maps.shape[:2]
    (H, W), (h, w) = view.size, view.inside
    width = 1.5 * max(1.0, w / h)
    height = width * h / w
    figure, axes = plt.subplots(
        heads + 1,
        queries,
        squeeze=False,
        dpi=90,
        layout="constrained",
        figsize=(width * queries + 0.4, (height + 0.14) * (heads + 1) + 0.3),
    )
    for q, pixel in enumerate(pixels):
        y, x = (n * scale for n, scale in zip(pixel, view.scale))
        axes[0, q].imshow(view.picture, extent=(0, W, H, 0))
        axes[0, q].plot(x, y, "+", color="red", markersize=10, markeredgewidth=2)
        axes[0, q].set_title(f"{q + 1}: ({pixel[0]}, {pixel[1]})", fontsize=8, pad=3)
        for head in range(heads):
            panel = axes[head + 1, q]
            panel.imshow(maps[head, q], cmap="viridis", vmin=0, extent=(0, W, H, 0), interpolation="nearest")
            panel.plot(x, y, "+", color="red", markersize=6)
            panel.set_title(f"max {maps[head, q].max():.2g} (uniform {uniform[q]:.2g})", fontsize=6, pad=2)
            if q == 0:
                panel.set_ylabel(f"head {head + 1}", fontsize=8)
    for panel in axes.flat:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.set(xlim=(0, w), ylim=(h, 0))  # without the padding
    Hq, Wq = layer.size
    figure.suptitle(f"{layer.name}: {Hq}×{Wq} queries, {maps.shape[2]}×{maps.shape[3]} keys", fontsize=9)
    write(out, lambda partial: save(figure, partial))
    plt.close(figure)
