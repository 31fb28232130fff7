"""Attention weights of a transformer's tokens for chosen queries, from torch's layers and ours.

Shapes: B batch, M heads, Q queries, S keys, C channels, d width per head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Weigh = Callable[..., Tensor]  # arguments: query, key, masks and chosen queries


@dataclass
class TokenMaps:
    """An attention layer over tokens and its inputs in the last forward pass.

    Attributes:
        name: Name of the layer in its model.
        weigh: Computes the weights: :func:`stock_weights`, or another function of its arguments.
        attention: The layer itself.
        query: Its query, in its own layout.
        key: Its key, likewise.
        masks: ``key_padding_mask`` and ``attn_mask``, as passed to it.
        keys: (Hk, Wk), the map whose pixels the keys are.
        size: (Hq, Wq), the map whose pixels the queries are; None for object queries.
    """

    name: str
    weigh: Weigh
    attention: Any
    query: Tensor
    key: Tensor
    masks: dict[str, Tensor | None]
    keys: tuple[int, int]
    size: tuple[int, int] | None = None
    _probed: Tensor | None = field(default=None, init=False, repr=False)
    _blank: TokenMaps | None = field(default=None, init=False, repr=False)

    @torch.no_grad()
    def weights(self, chosen: Tensor | None = None) -> Tensor:
        """Return the weights (B, M, Q, S) of all or of the chosen queries."""
        if self.weigh is not probed_weights:
            return self.weigh(self.attention, self.query, self.key, self.masks, chosen)
        if self._probed is None:  # all queries cost as much as one
            self._probed = probed_weights(self.attention, self.query, self.key, self.masks)
        return self._probed if chosen is None else self._probed.index_select(2, chosen)

    def of_objects(self, chosen: Tensor) -> Tensor:
        """Return the maps (B, M, Q, Hk, Wk) of object queries, by their numbers."""
        return self.weights(chosen).unflatten(-1, self.keys)

    def maps(self, queries: Tensor) -> Tensor:
        """Return the maps (B, M, Q, Hk, Wk) of the pixels ``queries``, (Q, 2), rows and columns."""
        return self.of_objects(self.numbers(queries))

    def numbers(self, queries: Tensor) -> Tensor:
        """Return the tokens (Q,) of pixels (Q, 2)."""
        assert self.size is not None
        return queries[:, 0] * self.size[1] + queries[:, 1]

    def uniform(self, chosen: Tensor) -> Tensor:
        """Return 1 / the number of keys that are not masked, (Q,), for the first picture."""
        # For tokens of zeros all unmasked keys have equal weights, so a weight of 0 means a masked key.
        if self._blank is None:
            self._blank = replace(self, query=torch.zeros_like(self.query), key=torch.zeros_like(self.key))
        return 1 / (self._blank.weights(chosen)[0] != 0).any(0).sum(-1).clamp(min=1)


def stock_weights(
    attention: nn.MultiheadAttention, query: Tensor, key: Tensor, masks: dict[str, Any], chosen: Tensor | None = None
) -> Tensor:
    """Return the weights of every head from torch's layer.

    Args:
        attention: The layer.
        query: (Q, B, C), or (B, Q, C) if the layer is ``batch_first``, like ``key``.
        key: (S, B, C).
        masks: ``key_padding_mask`` and ``attn_mask``.
        chosen: (Q',), numbers of queries; None for all.

    Returns:
        (B, M, Q', S).
    """
    mask = masks.get("attn_mask")
    if chosen is not None:
        query = query.index_select(1 if attention.batch_first else 0, chosen)
        mask = None if mask is None else mask.index_select(-2, chosen)
    # Not a call of the module: its hooks must not record another pass.
    _, weights = attention.forward(
        query, key, key, key_padding_mask=masks.get("key_padding_mask"), attn_mask=mask, average_attn_weights=False
    )
    assert weights is not None
    return weights


def probed_weights(
    attention: nn.Module, query: Tensor, key: Tensor, masks: dict[str, Any], chosen: Tensor | None = None
) -> Tensor:
    """Recover a layer's weights, for any kind of logits, from its outputs for values that are 1 at one key.

    The layer's output is linear in its values. Without the projections of values and outputs, channel j of a head
    carries the weight of key j among d keys at a time, in S / d passes.

    Args:
        attention: As ``attn_plugins.mmcv.attended.TokenAttention`` (``in_proj_weight``, ``out_proj``), called with
            tokens first.
        query: (Q, B, C).
        key: (S, B, C).
        masks: ``key_padding_mask`` and ``attn_mask``.
        chosen: (Q',), numbers of queries; None for all.

    Returns:
        (B, M, Q', S).
    """
    S, B, C = key.shape
    heads: int = attention.num_heads  # type: ignore[assignment]
    d = C // heads
    own = dict(attention.named_parameters())
    plain = {"in_proj_weight": own["in_proj_weight"].detach().clone()}
    plain["out_proj.weight"] = torch.eye(C).to(own["out_proj.weight"])
    plain["in_proj_weight"][2 * C :] = plain["out_proj.weight"]
    if "in_proj_bias" in own:
        plain["in_proj_bias"] = own["in_proj_bias"].detach().clone()
        plain["in_proj_bias"][2 * C :] = 0
        plain["out_proj.bias"] = torch.zeros_like(own["out_proj.bias"])
    found = []
    for start in range(0, S, d):
        one = torch.eye(S, d if start + d <= S else S - start, dtype=key.dtype, device=key.device).roll(start, 0)
        value = torch.zeros(S, B, heads, d, dtype=key.dtype, device=key.device)
        value[..., : one.shape[1]] = one[:, None, None]
        output = functional_call(attention, plain, (query, key, value.flatten(2)), masks)[0]
        found.append(output.unflatten(2, (heads, d))[..., : one.shape[1]])
    weights = torch.cat(found, -1).permute(1, 2, 0, 3)
    return weights if chosen is None else weights.index_select(2, chosen)


def product_weights(
    attention: Any, query: Tensor, key: Tensor, masks: dict[str, Any], chosen: Tensor | None = None
) -> Tensor:
    """Return the weights of Conditional DETR's attention, whose inputs are already projected queries and keys.

    Args:
        attention: mmdet's ``ConditionalAttention``.
        query: (B, Q, C'), content and position concatenated.
        key: (B, S, C').
        masks: ``key_padding_mask`` and ``attn_mask``.
        chosen: (Q',), numbers of queries; None for all.

    Returns:
        (B, M, Q', S).
    """
    heads, mask, padding = attention.num_heads, masks.get("attn_mask"), masks.get("key_padding_mask")
    if chosen is not None:
        query = query.index_select(1, chosen)
        mask = None if mask is None else mask.index_select(-2, chosen)
    q, k = (tokens.unflatten(2, (heads, -1)).transpose(1, 2) for tokens in (query, key))
    logits = (q * q.shape[-1] ** -0.5) @ k.mT
    if mask is not None:
        mask = mask.unflatten(0, (-1, heads)) if mask.dim() == 3 else mask
        logits = logits.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if padding is not None:
        logits = logits.masked_fill(padding.bool()[:, None, None], -torch.inf)
    return logits.softmax(-1)
