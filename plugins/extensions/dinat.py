"""Neighborhood attention of transformers' DiNAT and NAT, where this package stands in for ``natten``.

transformers 5 hands queries, keys and values to ``natten`` with the axes of a map in the place of heads, so that its
models run with no version of it; and older ones store the weights. Ours replaces the layers' ``forward``.

Shapes: B batch, (H, W) the map, C channels, M heads, d width of a head, K taps along an axis.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from ..core.axes import unflatten
from ..modules.common.attention import attend
from ..modules.maps.neighborhood import neighborhood
from .natten_functional import natten2dav, natten2dqkrpb


def forward(self: Any, hidden_states: Tensor, output_attentions: bool | None = False) -> tuple[Tensor, ...]:
    """Compute ``NeighborhoodAttention.forward``, (B, H, W, C) -> (B, H, W, C).

    Returns:
        The output, and with ``output_attentions`` the weights (B, M, H, W, K²).
    """
    M, dilation = self.num_attention_heads, getattr(self, "dilation", 1)
    query, key, value = [
        unflatten(project(hidden_states), 3, (M, -1)).permute(0, 3, 1, 2, 4)
        for project in (self.query, self.key, self.value)
    ]
    scale = query.shape[4] ** -0.5
    if not output_attentions and not (self.dropout.training and self.dropout.p > 0):
        window = (self.kernel_size, self.kernel_size), (dilation, dilation)
        context = attend(neighborhood(query, key, value, self.rpb, *window, scale))
        return (context.permute(0, 2, 3, 1, 4).flatten(3),)
    logits = natten2dqkrpb(query * scale, key, self.rpb, self.kernel_size, dilation)
    weights = self.dropout(logits.softmax(-1))
    context = natten2dav(weights, value, self.kernel_size, dilation).permute(0, 2, 3, 1, 4).flatten(3)
    return (context, weights) if output_attentions else (context,)


def replace(module: ModuleType) -> None:
    """Replace the ``forward`` of the layers in a module of transformers."""
    module.NeighborhoodAttention.forward = forward
