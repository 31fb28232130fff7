"""A single HTML file that shows the attention of words by layer and head, without network access."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.files import write_text

from .page import colours
from .page_objects import encoded
from .parts import WHOLE
from .sentence import ALIGNMENT, DECODER, ENCODER, Sentence, WordMaps
from .sentence_grid import head_names, with_mean

TEMPLATE = Path(__file__).with_name("sentence.html")
KINDS = {
    ALIGNMENT: "alignment: from the output to the source",
    ENCODER: "self-attention of the source",
    DECODER: "self-attention of the output",
}


def _maps(weights: Tensor) -> dict[str, str]:
    """Encode weights (M, T, S) in 65535ths of every row's maximum, and the maxima; the mean of the heads is first."""
    shown = with_mean(weights)
    peaks = shown.amax(2).clamp(min=1e-30)
    shares = (shown / peaks.unsqueeze(2) * 65535).round().numpy()
    return dict(maps=encoded(shares, "<u2"), peaks=encoded(peaks.numpy(), "<f4"))


def _layer(layer: WordMaps) -> dict[str, Any]:
    parts = {WHOLE: layer.weights, **layer.parts}
    return dict(
        name=layer.name,
        heads=head_names(len(layer.weights)),
        parts=[dict(name=name, **_maps(weights)) for name, weights in parts.items()],
    )


def write_sentence_page(sentence: Sentence, title: str, out: Path) -> None:
    """Write the page."""
    kinds = []
    for kind, words in KINDS.items():
        layers = [_layer(layer) for layer in sentence.maps if layer.kind == kind]
        if layers:
            queries, keys = sentence.words[kind]
            kinds.append(dict(title=words, queries=queries, keys=keys, layers=layers))
    text = TEMPLATE.read_text()
    data = json.dumps(dict(kinds=kinds, colours=colours())).replace("</", "<\\/")  # a "</script>" would end the script
    for key, value in dict(TITLE=html.escape(title), DATA=data).items():
        text = text.replace(f"@{key}@", value)
    write_text(out, text)
