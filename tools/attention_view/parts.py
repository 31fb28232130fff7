"""Attention of every term of a layer's logits alone, compared with all terms together (Thesis, Fig. 3.4).

A part is the softmax of its own logits. Parts do not add up to the whole, the softmax of the sum of all logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_plugins.modules.capture import Captured, softmax_over_keys
from tools.files import write
from tools.show_sampling import save

from .tokens import TokenMaps
from .view import PixelMaps, View, query_maps
from .vit import CLS, Cell, PatchMaps

# Titles of the four terms of Zhu et al. (2019) and of terms added to them; other terms keep their names.
FOUR_TERMS = dict(
    content="ε1: query and key content",
    content_position="ε2: query content and position",
    saliency="ε3: key content",
    position="ε4: position",
    predicted="predicted position",
    table="position table",
    positions="positions",
)
WHOLE = "all terms"
EXPLAINED = "each part is the softmax of its own logits; all terms: of their sum"


def title_of(module: Any, name: str) -> str:
    """Return the title of a term, given its name in a layer's ``attention_logits``."""
    return FOUR_TERMS[name] if hasattr(getattr(module, "terms", None), "_fields") else name


@dataclass
class CapturedPart(Captured):
    """One term of a captured layer.

    Attributes:
        part: Name of the term in the layer's ``attention_logits``.
    """

    part: str = ""

    def maps(self, queries: Tensor | None = None) -> Tensor:
        """Return the term's maps, in the layout of the layer's."""
        return self.parts(queries)[self.part]


@torch.no_grad()
def parts_of(layer: PixelMaps) -> dict[str, PixelMaps]:
    """Return a layer's terms by title, each as a layer of its own; empty for fewer than two terms."""
    found: dict[str, PixelMaps] = {}
    if isinstance(layer, TokenMaps):
        if callable(getattr(layer.attention, "token_logits", None)):
            for name in _token_logits(layer.attention, layer.query, layer.key, layer.masks):
                weigh = partial(_token_weights, name)
                found[title_of(layer.attention, name)] = replace(layer, weigh=weigh)
    elif isinstance(layer, PatchMaps):
        if layer.logits is not None and layer.x is not None:
            for name in layer.logits(layer.x):
                found[FOUR_TERMS[name]] = replace(layer, weigh=partial(_patch_weights, layer.logits, name), logits=None)
    elif type(layer) is Captured:
        given = {field.name: getattr(layer, field.name) for field in fields(layer)}
        for name in layer.parts(torch.zeros(1, 2, dtype=torch.long)):
            found[title_of(layer.layer, name)] = CapturedPart(**given, part=name)
    return found if len(found) > 1 else {}


def _token_logits(attention: Any, query: Tensor, key: Tensor, masks: dict[str, Any]) -> dict[str, Tensor]:
    return attention.token_logits(query, key, masks.get("key_padding_mask"), masks.get("attn_mask"))


def _token_weights(
    name: str, attention: Any, query: Tensor, key: Tensor, masks: dict[str, Any], chosen: Tensor | None = None
) -> Tensor:
    weights = softmax_over_keys(_token_logits(attention, query, key, masks)[name])
    return weights if chosen is None else weights.index_select(2, chosen)


def _patch_weights(logits: Any, name: str, x: Tensor) -> Tensor:
    return softmax_over_keys(logits(x)[name])


def draw_parts(view: View, layer: PixelMaps, parts: dict[str, PixelMaps], pixels: Sequence[Cell], out: Path) -> None:
    """Save a row for every query: the picture with it, the map of every part and that of all terms.

    Maps of several heads are averaged.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert layer.size is not None
    cells: list[Cell] = [CLS if isinstance(pixel, str) else view.cell(layer.size, pixel) for pixel in pixels]
    columns = {name: query_maps(one, cells) for name, one in {**parts, WHOLE: layer}.items()}
    heads = len(next(iter(columns.values())).maps)
    (H, W), (h, w) = view.size, view.inside
    width = 1.8 * max(1.0, w / h)
    size = (width * (len(columns) + 1), (width * h / w + 0.2) * len(cells) + 0.5)
    figure, axes = plt.subplots(
        len(cells), len(columns) + 1, squeeze=False, dpi=180, layout="constrained", figsize=size
    )
    for q, pixel in enumerate(pixels):
        axes[q, 0].imshow(view.picture, extent=(0, W, H, 0))
        axes[q, 0].set_title(f"{q + 1}: {'cls token' if isinstance(pixel, str) else tuple(pixel)}", fontsize=7, pad=2)
        for panel, (name, found) in zip(axes[q, 1:], columns.items()):
            several = found.names[0] == "mean of heads"  # then the first map is already their mean
            mean = (found.maps[0] if several else found.maps.mean(0))[q]
            panel.imshow(view.picture.mean(-1), cmap="gray", extent=(0, W, H, 0))
            panel.imshow(
                mean.cpu().numpy(), cmap="viridis", vmin=0, alpha=0.65, extent=(0, W, H, 0), interpolation="nearest"
            )
            panel.set_title(f"{name}\nmax {mean.max():.2g} (uniform {found.uniform[q]:.2g})", fontsize=6, pad=2)
        if not isinstance(pixel, str):
            y, x = (n * scale for n, scale in zip(pixel, view.scale))
            for panel in axes[q]:
                panel.plot(x, y, "+", color="red", markersize=7, markeredgewidth=1.5)
    for panel in axes.flat:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.set(xlim=(0, w), ylim=(h, 0))  # without the padding
    mean_of = "" if heads == 1 else "; mean of all heads"
    figure.suptitle(f"{layer.name}: {EXPLAINED}{mean_of}", fontsize=8, wrap=True)
    write(out, lambda partial_file: save(figure, partial_file))
    plt.close(figure)
