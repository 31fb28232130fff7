"""Looking at the attention of any model that holds our modules, at no cost to it otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import reference


@dataclass
class Captured:
    """An attention layer and what the last forward pass gave it.

    Attributes:
        name: Of the layer in its model.
        layer: The layer.
        arguments: Positional arguments of its forward.
        keywords: Keyword arguments of its forward.
    """

    name: str
    layer: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def size(self) -> tuple[int, int]:
        """(Hq, Wq), the map of queries."""
        return self.layer.attention_size(self.arguments[0].shape[2:])

    @torch.no_grad()
    def maps(self, queries: Tensor | None = None) -> Tensor:
        """The attention weights, computed now.

        Args:
            queries: (Q, 2), rows and columns on the map of queries; None for all, which is O(N²).

        Returns:
            (B, M, Q, Hk, Wk), or (B, M, Hq, Wq, Hk, Wk) of all.
        """
        return self.layer.attention_maps(*self.arguments, **self.keywords, queries=queries)


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of ``model`` that show their attention, by name: those with a method ``attention_maps``."""
    return {
        name: module
        for name, module in model.named_modules()
        # An augmented convolution of no attention channel is a plain one.
        if callable(getattr(module, "attention_maps", None)) and getattr(module, "dv", None) != 0
    }


@contextmanager
def capture_attention(model: nn.Module, layers: str | Sequence[str] = "*") -> Iterator[dict[str, Captured]]:
    """Remember the inputs of attention layers during forward passes.

    >>> with capture_attention(model, "layer4.*") as captured:
    ...     model(image)
    >>> captured["layer4.2.conv2"].maps()  # (B, M, Hq, Wq, Hk, Wk)

    Nothing is computed before ``maps`` is called, and nothing stays in the model afterwards. A layer that a forward
    pass calls several times shows its last call.

    Args:
        model: Any model.
        layers: Patterns of names, with ``*`` and ``?``.

    Yields:
        What was captured, by name, in the order of the calls.

    Raises:
        ValueError: the model has no attention layer of ours, or none of a pattern's name.
    """
    known = attention_layers(model)
    if not known:
        raise ValueError(f"model must hold an attention module of attn_plugins, and {type(model).__name__} has none")
    chosen: dict[str, Any] = {}
    for pattern in [layers] if isinstance(layers, str) else layers:
        found = {name: layer for name, layer in known.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(f"layers must name attention layers, and none is called {pattern!r}: {', '.join(known)}")
        chosen.update(found)
    captured: dict[str, Captured] = {}

    def hook(name: str) -> Any:
        def remember(layer: nn.Module, arguments: tuple, keywords: dict) -> None:
            captured.pop(name, None)
            captured[name] = Captured(name, layer, arguments, keywords)

        return remember

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in chosen.items()]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def maps_of(
    terms: Sequence[Tensor | None], scale: float, size: tuple[int, int], queries: Tensor | None = None
) -> Tensor:
    """What a module's ``attention_maps`` returns: the reference's weights, for all queries or for some.

    Args:
        terms: The arguments of ``global_attention``: query, key, value, row, column and key logits.
        scale: Of the content term.
        size: (Hq, Wq).
        queries: (Q, 2), rows and columns.

    Returns:
        (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) of ``queries``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    query, key, value, row, column, key_logits = terms
    assert value is not None
    if queries is None:
        maps = reference.global_attention_probabilities(query, key, value, row, column, key_logits, scale)
        return maps.expand(*maps.shape[:2], *size, *maps.shape[4:])
    H, W = size
    if queries.dim() != 2 or queries.shape[1] != 2 or queries.is_floating_point():
        raise ValueError(f"queries must be whole numbers of shape (Q, 2), got {queries.dtype} {tuple(queries.shape)}")
    y, x = queries.to(value.device).unbind(1)
    if len(queries) and not (y.min() >= 0 and y.max() < H and x.min() >= 0 and x.max() < W):
        raise ValueError(f"queries must lie on the map of {H} rows and {W} columns, got {queries.tolist()}")

    def chosen(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor[:, :, y if tensor.shape[2] > 1 else 0 * y, x if tensor.shape[3] > 1 else 0 * x].unsqueeze(3)

    maps = reference.global_attention_probabilities(
        chosen(query), key, value, chosen(row), chosen(column), key_logits, scale
    )
    return maps.squeeze(3).expand(-1, -1, len(queries), -1, -1)
