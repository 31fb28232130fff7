"""What mmdet's and mmseg's transformers attend with: ``forward`` of two of mmcv's layers, on our operator and torch's.

mmdet names these classes itself and asks no registry, so that not the class is replaced but its ``forward``
(:mod:`attn_plugins.mmcv.drop_in` does it): models that are built already, ``isinstance`` checks and checkpoints stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from mmengine.utils import deprecated_api_warning
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..modules.deformable_attention import attend


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
    """See :meth:`attn_plugins.modules.MultiScaleDeformableAttention.forward`."""
    return attend(self, query, value, identity, query_pos, key_padding_mask, reference_points, spatial_shapes)


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
    """Attend, and write no attention weights out, which mmcv asks torch for and drops.

    Args:
        query: (Q, B, C), or (B, Q, C) with ``batch_first``, as all that follow.
        key: (S, B, C); None for ``query``.
        value: (S, B, C); None for ``key``.
        identity: (Q, B, C), added to the result; None for ``query``.
        query_pos: (Q, B, C), added to ``query``.
        key_pos: (S, B, C), added to ``key``; None for ``query_pos`` where that has its shape.
        attn_mask: (Q, S) or (B * M, Q, S), bool (True leaves out) or added to the logits.
        key_padding_mask: (B, S), bool; True for padding.
        **kwargs: Not used.

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
    if self.batch_first:  # the inner layer's batch is its second axis
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    masks = dict(attn_mask=attn_mask, key_padding_mask=key_padding_mask)
    output = self.attn(query, key, value, need_weights=_somebody_looks(self.attn), **masks)[0]
    if self.batch_first:
        output = output.transpose(0, 1)
    return identity + self.dropout_layer(self.proj_drop(output))


def _somebody_looks(attention: Any) -> bool:
    """True where a hook gets the weights, or where the inner layer is not torch's own."""
    hooks = attention._forward_hooks or torch_module._global_forward_hooks
    return bool(hooks) or type(attention) is not nn.MultiheadAttention
