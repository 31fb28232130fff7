"""Inspection of attention in any model that contains this package's modules, at no cost when unused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ...core.axes import unflatten
from ...ops import reference


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
        x = self.arguments[0]
        if callable(getattr(self.layer, "map_size", None)):  # tokens, whose shape is not that of a map
            size: tuple[int, int] = self.layer.map_size(x)
            return size
        return self.layer.attention_size(x.shape[getattr(self.layer, "map_axes", slice(2, None))])

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
        ValueError: The model has no attention layer of this package, or no name matches a pattern.
    """
    known = attention_layers(model)
    if not known:
        raise ValueError(f"model must have an attention module of attn_plugins, got {type(model).__name__} without any")
    chosen: dict[str, Any] = {}
    for pattern in [layers] if isinstance(layers, str) else layers:
        matching = {name: layer for name, layer in known.items() if fnmatchcase(name, pattern)}
        if not matching:
            raise ValueError(f"layers must name attention layers, and none is called {pattern!r}: {', '.join(known)}")
        chosen.update(matching)
    captured: dict[str, Captured] = {}

    def keep(call: Captured) -> None:
        captured.pop(call.name, None)  # order by the last call
        captured[call.name] = call

    with record_calls(chosen, keep):
        yield captured


@contextmanager
def record_calls(layers: Mapping[str, nn.Module], keep: Callable[[Captured], None]) -> Iterator[None]:
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
    return unflatten(reference.masked_softmax(logits.flatten(-2)), -1, logits.shape[-2:])
