"""Attention over tokens in mmdet's and mmseg's transformers: of torch's layers, of mmdet's, and of ours.

Shapes: B batch, M heads, Q queries, S keys, C channels, d width per head.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules import SpatialSelfAttention
from attn_plugins.modules.common.capture import softmax_over_keys

from .maps import Handle, Keep, Maps, Query, Weights
from .points import Points

PIXELS, OBJECTS = "pixels to pixels", "objects to pixels"
SAMPLED_PIXELS, SAMPLED_OBJECTS = "pixels to sampled points", "objects to sampled points"
_DECODER = re.compile(r"(^|\.)(transformer_)?decoder\.layers\.")  # layers with object queries in mmdet and mmseg


@dataclass(kw_only=True)
class Tokens(Maps):
    """An attention layer over tokens."""

    attention: Any  # the layer
    query: Tensor  # in the layer's own layout
    key: Tensor  # likewise
    masks: dict[str, Tensor | None]  # key_padding_mask and attn_mask, as passed to it
    keys: tuple[int, int]  # (Hk, Wk)

    @torch.no_grad()
    def weights(self, chosen: Tensor | None = None, blank: bool = False) -> Tensor:
        """Return the weights (B, M, Q, S) of all or of the chosen queries."""
        attention, masks = self.attention, self.masks
        query, key = (torch.zeros_like(n) if blank else n for n in (self.query, self.key))
        if hasattr(attention, "token_logits"):  # all queries cost as much as one
            if self.part:
                weights = softmax_over_keys(self._logits(query, key)[self.part])
            else:
                weights = attention.token_weights(query, key, **masks)
            return weights if chosen is None else weights.index_select(2, chosen)
        if chosen is not None:
            mask = masks.get("attn_mask")
            query = query.index_select(token_axis(attention), chosen)
            masks = {**masks, "attn_mask": None if mask is None else mask.index_select(-2, chosen)}
        if _conditional(attention):
            return product_weights(attention, query, key, masks)
        # Not a call of the module: its hooks must not record another pass.
        return attention.forward(query, key, key, **masks, average_attn_weights=False)[1]

    def weigh(self, queries: Sequence[Query], blank: bool = False) -> Weights:
        """See :meth:`.Maps.weigh`."""
        chosen = torch.as_tensor(queries)
        if self.size is not None:
            chosen = chosen[:, 0] * self.size[1] + chosen[:, 1]
        return self.weights(chosen, blank)[0].unflatten(-1, self.keys), None

    def terms(self) -> tuple[Any, Iterable[str]]:
        """See :meth:`.Maps.terms`."""
        names = self._logits(self.query, self.key) if hasattr(self.attention, "token_logits") else ()
        return self.attention, names

    def _logits(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        return self.attention.token_logits(query, key, self.masks.get("key_padding_mask"), self.masks.get("attn_mask"))


def token_axis(attention: Any) -> int:
    """Return the axis of the tokens in a layer's inputs."""
    return 1 if _conditional(attention) or getattr(attention, "batch_first", False) else 0


def product_weights(attention: Any, query: Tensor, key: Tensor, masks: dict[str, Any]) -> Tensor:
    """Return the weights (B, M, Q, S) of Conditional DETR's attention, whose query and key are already projected."""
    heads, mask, padding = attention.num_heads, masks.get("attn_mask"), masks.get("key_padding_mask")
    q, k = (tokens.unflatten(2, (heads, -1)).transpose(1, 2) for tokens in (query, key))
    logits = (q * q.shape[-1] ** -0.5) @ k.mT
    if mask is not None:
        mask = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
        logits = logits.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if padding is not None:
        logits = logits.masked_fill(padding.bool()[:, None, None], -torch.inf)
    return logits.softmax(-1)


def tokens(model: nn.Module) -> dict[str, str]:
    """Return the attention layers whose keys are the picture, by name, each with its kinds of queries and keys.

    Attention among object queries is left out.
    """
    kinds = {}
    for name, module in model.named_modules():
        objects = bool(_DECODER.search(name))
        if _deformable(module):
            kinds[name] = SAMPLED_OBJECTS if objects else SAMPLED_PIXELS
        elif (_inner(module) is not None or _conditional(module)) and not (objects and name.endswith("self_attn")):
            kinds[name] = OBJECTS if objects else PIXELS
    return kinds


def _deformable(module: nn.Module) -> bool:
    return all(hasattr(module, part) for part in ("sampling_offsets", "attention_weights", "value_proj", "num_points"))


def _inner(module: nn.Module) -> nn.Module | None:
    """Return the attention inside mmcv's ``MultiheadAttention``, torch's or ours."""
    inner = getattr(module, "attn", None) if type(module).__name__ == "MultiheadAttention" else None
    return inner if isinstance(inner, (nn.MultiheadAttention, SpatialSelfAttention)) else None


def _conditional(module: nn.Module) -> bool:
    return hasattr(module, "qcontent_proj") and hasattr(module, "forward_attn")


def watch_tokens(model: nn.Module, names: Iterable[str], keep: Keep) -> Iterator[Handle]:
    """See :data:`.Watch`; layers whose keys are no map of encoded positions are left out."""
    kinds = tokens(model)
    grids: dict[int, tuple[int, int]] = {}  # by number of pixels

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        H, W = output.shape[-2:]
        grids[H * W] = (H, W)

    def record(name: str, attention: Any, method: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        signature = inspect.signature(method)
        given = dict(signature.bind(*arguments, **keywords).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        if _deformable(attention):
            keep(Points(name, attention, given, kinds[name] == SAMPLED_OBJECTS))
            return
        axis, query, key = token_axis(attention), given["query"], given["key"]
        grid = grids.get(key.shape[axis])
        size = grid if kinds[name] == PIXELS else None
        if grid is not None and (size is None or query.shape[axis] == key.shape[axis]):
            masks = {mask: given.get(mask) for mask in ("key_padding_mask", "attn_mask")}
            keep(Tokens(name=name, size=size, attention=attention, query=query, key=key, masks=masks, keys=grid))

    for module in model.modules():
        if type(module).__name__.endswith("PositionalEncoding"):
            yield module.register_forward_hook(note)
    for name in names:
        layer = model.get_submodule(name)
        inner = _inner(layer) or layer
        if _conditional(layer):
            yield _Replaced(layer, partial(record, name, layer))
        else:
            yield inner.register_forward_pre_hook(
                lambda module, *given, name=name: record(name, module, module.forward, *given), with_kwargs=True
            )


class _Replaced:
    """A hook of the method ``forward_attn``, which those of modules do not reach."""

    def __init__(self, layer: Any, record: Callable[..., None]) -> None:
        self.layer, method = layer, layer.forward_attn

        def watched(*arguments: Any, **keywords: Any) -> Any:
            record(method, arguments, keywords)
            return method(*arguments, **keywords)

        layer.forward_attn = watched

    def remove(self) -> None:
        """Restore the method."""
        del self.layer.forward_attn
