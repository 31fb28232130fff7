"""``forward`` of two attention layers of mmcv that the transformers of mmdet and mmseg use.

mmdet refers to these classes directly instead of using a registry. Therefore :mod:`attn_plugins.mmcv.drop_in` replaces
their ``forward`` and not the classes, so that existing models, ``isinstance`` checks and checkpoints remain valid.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.utils import deprecated_api_warning
from torch import Tensor, nn

from ..modules.common.untouched import has_global_hooks, untouched
from ..modules.tokens.deformable_attention import SampledAttention


@deprecated_api_warning({"residual": "identity"}, cls_name="MultiScaleDeformableAttention")
def deformable_forward(
    self: Any,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    identity: Tensor | None = None,
    query_pos: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    reference_points: Tensor | None = None,
    spatial_shapes: Tensor | Sequence[Sequence[int]] | None = None,
    level_start_index: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute deformable attention; see :meth:`attn_plugins.modules.MultiScaleDeformableAttention.forward`."""
    return SampledAttention.attend(
        self, query, value, identity, query_pos, key_padding_mask, reference_points, spatial_shapes
    )


@deprecated_api_warning({"residual": "identity"}, cls_name="MultiheadAttention")
def multihead_forward(
    self: Any,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    identity: Tensor | None = None,
    query_pos: Tensor | None = None,
    key_pos: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention without the weights, which mmcv requests from torch and discards.

    Args:
        self: The layer.
        query: (Q, B, C), or (B, Q, C) with ``batch_first``, like all tensors below.
        key: (S, B, C); None for ``query``.
        value: (S, B, C); None for ``key``.
        identity: (Q, B, C), added to the result; None for ``query``.
        query_pos: (Q, B, C), added to ``query``.
        key_pos: (S, B, C), added to ``key``; None for ``query_pos`` if that has the shape of ``key``.
        attn_mask: (Q, S) or (B * M, Q, S), bool (True excludes a key) or added to the logits.
        key_padding_mask: (B, S), bool; True for padding.
        **kwargs: Ignored.

    Returns:
        (Q, B, C), or (B, Q, C) with ``batch_first``.
    """
    key = query if key is None else key
    value = key if value is None else value
    identity = query if identity is None else identity
    if key_pos is None and query_pos is not None:
        if query_pos.shape == key.shape:
            key_pos = query_pos
        else:
            warnings.warn(f"{type(self).__name__}: key_pos is None, and query_pos does not fit key", stacklevel=3)
    query = query if query_pos is None else query + query_pos
    key = key if key_pos is None else key + key_pos
    if self.batch_first:  # the inner layer expects the batch as second axis
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    inputs = dict(query=query, key=key, value=value, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
    weights = {} if _observed(self.attn) else dict(need_weights=False)
    output = self.attn(**inputs, **weights)[0]
    if self.batch_first:
        output = output.transpose(0, 1)
    return identity + self.dropout_layer(self.proj_drop(output))


def _observed(attention: Any) -> bool:
    """Return whether somebody sees how the inner layer is called, or its weights, or its products while traced."""
    return torch.jit.is_tracing() or has_global_hooks() or not untouched(attention, nn.MultiheadAttention)
