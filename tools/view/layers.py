"""Attention layers of a model, and what a call of one shows: maps of ours, sampling points of deformable encoders.

Shapes: M heads, Q queries, (Hk, Wk) the map of keys, L levels, K points of a level.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from attn_plugins.modules.common.capture import Captured, attention_layers, record_calls
from attn_plugins.modules.tokens.deformable_attention import SampledAttention
from attn_plugins.ops.deformable_attention.deformable_attention import shapes_on_host

# Titles of the four terms of Zhu et al. (2019), by the names of layers with all of them.
FOUR_TERMS = dict(
    content="ε1: query and key content",
    content_position="ε2: query content and position",
    saliency="ε3: key content",
    position="ε4: position",
)
WHOLE = "all terms"


class ViewError(ValueError):
    """A model, a picture or a query that cannot be shown."""


def is_deformable(module: Any) -> bool:
    """Return whether ``module`` is multi-scale deformable attention, mmcv's or ours."""
    return all(hasattr(module, name) for name in ("sampling_offsets", "attention_weights", "value_proj", "num_points"))


def known_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that can be shown by name: ours, and deformable attention whose queries are pixels."""
    ours = attention_layers(model)
    return {
        name: module
        for name, module in model.named_modules()
        if name in ours or (is_deformable(module) and "decoder.layers." not in name)
    }


def chosen_layers(known: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names among ``known`` that match a pattern; all names if there is no pattern."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ViewError(f"layers must name attention layers, and none is called {pattern!r}: {', '.join(known)}")
    return [name for name in known if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


@contextmanager
def capture(model: nn.Module, patterns: Sequence[str] = ()) -> Iterator[dict[str, Captured]]:
    """Record the last call of every chosen layer, by name, in the order of the calls."""
    known = known_layers(model)
    if not known:
        raise ViewError(f"model must hold an attention layer that can be shown, and {type(model).__name__} has none")
    captured: dict[str, Captured] = {}

    def keep(call: Captured) -> None:
        captured.pop(call.name, None)
        captured[call.name] = call

    with record_calls({name: known[name] for name in chosen_layers(list(known), patterns)}, keep):
        yield captured


@torch.no_grad()
def uniform(call: Captured, queries: Tensor) -> Tensor:
    """Return the weight of uniform attention (Q,), 1 / number of keys, of ``queries`` (Q, 2).

    Keys are counted on an input of zeros, where no weight underflows.
    """
    layer, x = call.layer, call.arguments[0]
    blank = tree_map_only(Tensor, torch.zeros_like, call.arguments)
    if getattr(layer, "places", None) is not None:
        layer.places.share_grid(x, blank[0])
    keys = (Captured(call.name, layer, blank, call.keywords).maps(queries)[0] != 0).any(0).flatten(1).sum(1)
    prefix = x.shape[1] - math.prod(call.size) if hasattr(layer, "map_size") else 0  # class tokens and registers
    return 1 / (keys + prefix).clamp(min=1)


def parts(call: Captured, queries: Tensor) -> dict[str, Tensor]:
    """Return the weights (M, Q, Hk, Wk) of every term of the logits alone, by title."""
    four = hasattr(getattr(call.layer, "terms", None), "_fields")
    return {FOUR_TERMS.get(name, name) if four else name: maps[0] for name, maps in call.parts(queries).items()}


def arguments_of(call: Captured) -> dict[str, Any]:
    """Return the arguments of a call of deformable attention by name."""
    return dict(inspect.signature(call.layer.forward).bind(*call.arguments, **call.keywords).arguments)


def levels_of(call: Captured) -> list[tuple[int, int]]:
    """Return (H, W) of every level of deformable attention."""
    return shapes_on_host(arguments_of(call)["spatial_shapes"])


@torch.no_grad()
def points(call: Captured, level: int, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return what deformable attention reads in the first picture for ``cells`` (Q, 2), row and column, of a level.

    Returns:
        Locations (Q, M, L, K, 2) as (x, y), 0 to 1 on the maps, and weights (Q, M, L, K).
    """
    given, levels = arguments_of(call), levels_of(call)
    query, value = given["query"], given.get("value")
    value = query if value is None else value
    if given.get("query_pos") is not None:
        query = query + given["query_pos"]
    if not call.layer.batch_first:
        query, value = query.transpose(0, 1), value.transpose(0, 1)
    chosen = sum(H * W for H, W in levels[:level]) + cells[:, 0] * levels[level][1] + cells[:, 1]
    query, references = query[:, chosen], given["reference_points"][:, chosen]
    padding = given.get("key_padding_mask")
    shapes = given["spatial_shapes"]
    locations, weights = SampledAttention.samples(call.layer, query, value, padding, references, shapes)
    return locations[0], weights[0]
