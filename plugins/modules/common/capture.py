"""Inspection of attention in any model that contains this package's modules, at no cost when unused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import reference

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]  # kernel size, stride, padding, dilation


@dataclass
class Captured:
    """An attention layer and the inputs of its last forward pass.

    Attributes:
        name: Name of the layer in its model.
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
        """Size (Hq, Wq) of the map of queries."""
        axes = getattr(self.layer, "map_axes", slice(2, None))
        return self.layer.attention_size(self.arguments[0].shape[axes])

    @torch.no_grad()
    def maps(self, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights.

        Args:
            queries: (Q, 2), rows and columns on the map of queries; None for all, which needs O(N²) memory.

        Returns:
            (B, M, Q, Hk, Wk), or (B, M, Hq, Wq, Hk, Wk) without ``queries``.
        """
        return self.layer.attention_maps(*self.arguments, **self.keywords, queries=queries)

    @torch.no_grad()
    def parts(self, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the weights of each term of the logits alone.

        Each is the softmax of the term's own logits, as in Thesis, Fig. 3.4. They do not add up to the attention
        weights, which are the softmax of the logits' sum.

        Args:
            queries: As in :meth:`maps`.

        Returns:
            Weights as returned by :meth:`maps`, by the terms' names in the layer's ``attention_logits``; empty for a
            layer with a single term.
        """
        if callable(getattr(self.layer, "attention_parts", None)):  # some keys are outside the map
            parts: dict[str, Tensor] = self.layer.attention_parts(*self.arguments, **self.keywords, queries=queries)
            return parts
        if not callable(getattr(self.layer, "attention_logits", None)):
            return {}
        logits = self.layer.attention_logits(*self.arguments, **self.keywords, queries=queries)
        return {name: softmax_over_keys(part) for name, part in logits.items()} if len(logits) > 1 else {}


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """Return the modules of ``model`` that have a method ``attention_maps``, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        # An augmented convolution without attention channels is a plain convolution.
        if callable(getattr(module, "attention_maps", None)) and getattr(module, "dv", None) != 0
    }


@contextmanager
def capture_attention(model: nn.Module, layers: str | Sequence[str] = "*") -> Iterator[dict[str, Captured]]:
    """Record the inputs of attention layers during forward passes.

    >>> with capture_attention(model, "layer4.*") as captured:
    ...     model(image)
    >>> captured["layer4.2.conv2"].maps()  # (B, M, Hq, Wq, Hk, Wk)

    Nothing is computed before ``maps`` is called, and the hooks are removed afterwards. If a forward pass calls a layer
    several times, only its last call is kept.

    Args:
        model: Any model.
        layers: Patterns of names, with ``*`` and ``?``.

    Yields:
        Captured layers by name, in the order of their calls.

    Raises:
        ValueError: the model has no attention layer of this package, or no name matches a pattern.
    """
    known = attention_layers(model)
    if not known:
        raise ValueError(f"model must have an attention module of attn_plugins, got {type(model).__name__} without any")
    chosen: dict[str, Any] = {}
    for pattern in [layers] if isinstance(layers, str) else layers:
        found = {name: layer for name, layer in known.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(f"layers must name attention layers, and none is called {pattern!r}: {', '.join(known)}")
        chosen.update(found)
    captured: dict[str, Captured] = {}

    def keep(call: Captured) -> None:
        captured.pop(call.name, None)  # order by the last call
        captured[call.name] = call

    with remember_calls(chosen, keep):
        yield captured


@contextmanager
def remember_calls(layers: Mapping[str, nn.Module], keep: Callable[[Captured], None]) -> Iterator[None]:
    """Pass every call of ``layers`` to ``keep`` before it runs."""

    def hook(name: str) -> Any:
        return lambda layer, arguments, keywords: keep(Captured(name, layer, arguments, keywords))

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def softmax_over_keys(logits: Tensor) -> Tensor:
    """Apply softmax over the keys: the last axis of sequences, (B, M, T, S), else the last two axes."""
    if logits.dim() == 4:
        return reference.masked_softmax(logits)
    return reference.masked_softmax(logits.flatten(-2)).unflatten(-1, logits.shape[-2:])


def maps_of(
    terms: Sequence[Tensor | None], scale: float, size: tuple[int, int], queries: Tensor | None = None
) -> Tensor:
    """Compute the weights that a module's ``attention_maps`` returns, for all queries or for some.

    Args:
        terms: The arguments of ``global_attention``: query, key, value, row, column and key logits.
        scale: Factor of the content term.
        size: (Hq, Wq).
        queries: (Q, 2), rows and columns; None for all.

    Returns:
        (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) with ``queries``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    return softmax_over_keys(logits_of(terms, scale, size, queries))


def logits_of(
    terms: Sequence[Tensor | None], scale: float, size: tuple[int, int], queries: Tensor | None = None
) -> Tensor:
    """Compute the sum of logits for all queries or for some; arguments, shapes and errors as :func:`maps_of`."""
    query, key, value, row, column, key_logits = terms
    assert value is not None
    if queries is None:
        logits = reference.global_attention_logits(query, key, value, row, column, key_logits, scale)
        return logits.expand(*logits.shape[:2], *size, *logits.shape[4:])
    y, x = checked_queries(queries, size, value.device)

    def chosen(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor[:, :, y if tensor.shape[2] > 1 else 0 * y, x if tensor.shape[3] > 1 else 0 * x].unsqueeze(3)

    logits = reference.global_attention_logits(
        chosen(query), key, value, chosen(row), chosen(column), key_logits, scale
    )
    return logits.squeeze(3).expand(-1, -1, len(queries), -1, -1)


def window_maps_of(
    query: Tensor | None,
    key: Tensor | None,
    position_logits: Tensor | None,
    keys: Sequence[int],
    geometry: Geometry,
    queries: Tensor | None = None,
    zero_border: bool = False,
) -> Tensor:
    """Compute a window module's ``attention_maps``: weights on the whole map, 0 outside the windows.

    Args:
        query: See ``window_attention``.
        key: See ``window_attention``.
        position_logits: See ``window_attention``.
        keys: (Hk, Wk).
        geometry: Kernel size, stride, padding and dilation.
        queries: (Q, 2), rows and columns; None for all.
        zero_border: Whether positions outside the map take part in the softmax; their weights are dropped.

    Returns:
        (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) with ``queries``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    windows = _windows(query, position_logits, keys, geometry)
    weights = reference.window_attention_probabilities(query, key, position_logits, windows, zero_border, 1.0)
    return _on_map(weights, windows, keys, 0.0, queries)


def window_logits_of(
    query: Tensor | None,
    key: Tensor | None,
    position_logits: Tensor | None,
    keys: Sequence[int],
    geometry: Geometry,
    queries: Tensor | None = None,
) -> Tensor:
    """Compute the sum of logits on the whole map, -inf outside the windows; otherwise like :func:`window_maps_of`."""
    windows = _windows(query, position_logits, keys, geometry)
    logits = reference.window_attention_logits(query, key, position_logits, windows, False, 1.0)
    return _on_map(logits, windows, keys, -math.inf, queries)


def _windows(
    query: Tensor | None, position_logits: Tensor | None, keys: Sequence[int], geometry: Geometry
) -> reference.Windows:
    leader = position_logits if query is None else query
    assert leader is not None
    return reference.Windows(leader.shape[2:4], keys, *geometry, leader.device)


def _on_map(
    taps: Tensor, windows: reference.Windows, keys: Sequence[int], beyond: float, queries: Tensor | None
) -> Tensor:
    """Lay out values of window taps (B, M, Hq, Wq, taps) on the map, with ``beyond`` elsewhere."""
    Hq, Wq = taps.shape[2:4]
    number = keys[0] * keys[1]
    index = windows.rows[:, None, :, None] * keys[1] + windows.columns[:, None, :]
    index = torch.where(windows.inside, index, number).flatten(2).flatten(0, 1)  # outside taps: one extra entry
    taps = taps.flatten(2, 3)
    if queries is not None:
        y, x = checked_queries(queries, (Hq, Wq), taps.device)
        taps, index = taps[:, :, y * Wq + x], index[y * Wq + x]
    maps = taps.new_full((*taps.shape[:3], number + 1), beyond).scatter(3, index.expand_as(taps), taps)
    maps = maps[..., :number].unflatten(3, (keys[0], keys[1]))
    return maps.unflatten(2, (Hq, Wq)) if queries is None else maps


def checked_queries(queries: Tensor, size: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of ``queries``, (Q, 2), on a map of ``size``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    H, W = size
    if queries.dim() != 2 or queries.shape[1] != 2 or queries.is_floating_point():
        raise ValueError(f"queries must be whole numbers of shape (Q, 2), got {queries.dtype} {tuple(queries.shape)}")
    y, x = queries.to(device).unbind(1)
    if len(queries) and (min(y.min(), x.min()) < 0 or y.max() >= H or x.max() >= W):
        raise ValueError(f"queries must lie on the map of {H} rows and {W} columns, got {queries.tolist()}")
    return y, x
