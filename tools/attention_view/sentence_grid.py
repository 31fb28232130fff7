"""PNG grids of attention between words: every head of a layer, queries in rows and keys in columns."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tools.files import write
from tools.show_sampling import save

from .parts import EXPLAINED, WHOLE
from .sentence import ALIGNMENT, DECODER, ENCODER, Sentence, WordMaps

TITLES = {
    ENCODER: "self-attention of the source",
    DECODER: "self-attention of the output (rows: queries, columns: keys)",
    ALIGNMENT: "from the output (rows) to the source (columns)",
}
CELL, LARGEST = 0.2, 12.0  # inches


def head_names(heads: int) -> list[str]:
    """Return the names of the maps of :func:`with_mean`."""
    names = [f"head {n + 1}" for n in range(heads)]
    return names if heads == 1 else ["mean of heads", *names]


def with_mean(weights: Tensor) -> Tensor:
    """Prepend the mean of several heads to weights (M, T, S)."""
    import torch

    return weights if len(weights) == 1 else torch.cat((weights.mean(0, keepdim=True), weights))


def draw_heads(sentence: Sentence, layer: WordMaps, out: Path) -> None:
    """Save the maps of all heads, their mean first."""
    panels = dict(zip(head_names(len(layer.weights)), with_mean(layer.weights)))
    _draw(sentence, layer, panels, TITLES[layer.kind], out)


def draw_terms(sentence: Sentence, layer: WordMaps, out: Path) -> None:
    """Save the maps of every part of the logits and of all together, averaged over heads."""
    panels = {name: weights.mean(0) for name, weights in {**layer.parts, WHOLE: layer.weights}.items()}
    mean_of = "" if len(layer.weights) == 1 else "; mean of all heads"
    _draw(sentence, layer, panels, EXPLAINED + mean_of, out)


def _draw(sentence: Sentence, layer: WordMaps, panels: dict[str, Tensor], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    queries, keys = sentence.words[layer.kind]
    cell = min(CELL, LARGEST / max(len(queries), len(keys)))
    size = max(1.0, cell * len(keys)), max(1.0, cell * len(queries))
    longest = [0.09 * max(map(len, words)) * cell / CELL for words in (keys, queries)]
    columns = max(1, min(len(panels), round(LARGEST / (size[0] + longest[1] + 0.2))))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        squeeze=False,
        dpi=180,
        layout="constrained",
        figsize=((size[0] + longest[1] + 0.2) * columns, (size[1] + longest[0] + 0.3) * rows + 0.4),
    )
    for panel, (name, weights) in zip(axes.flat, panels.items()):
        panel.imshow(weights.numpy(), cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
        panel.set_title(f"{name}, max {weights.max():.2g}", fontsize=7, pad=2)
        panel.set_xticks(range(len(keys)), keys, rotation=90, fontsize=40 * cell, parse_math=False)
        panel.set_yticks(range(len(queries)), queries, fontsize=40 * cell, parse_math=False)
        panel.tick_params(length=0, pad=1)
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    figure.suptitle(f"{layer.name}: {title}", fontsize=8, parse_math=False, wrap=True)
    write(out, lambda partial_file: save(figure, partial_file))
    plt.close(figure)
