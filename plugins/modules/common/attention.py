"""Attention by the operator for a record of logits, and the base of attention modules over maps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ...ops import global_attention, sequence_attention, window_attention
from .logits import Logits, MapLogits, WindowLogits, defined
from .tracing import Unscriptable
from .weights import map_logits, map_weights, mixed, parts, weights_of


def attend(logits: Logits, dropout: nn.Module | float = 0.0) -> Tensor:
    """Compute the weighted sums of values by the operator for these logits.

    Args:
        logits: What the attention adds up.
        dropout: Dropout probability of the weights, or a module that is called with them. They are then held in memory.

    Returns:
        (B, M, Hq, Wq, dv) or (B, M, T, dv); size 1 along axes of queries that no term has.
    """
    if isinstance(dropout, nn.Module) or dropout:
        weights = weights_of(logits).to(logits.value.dtype)
        return mixed(logits, dropout(weights) if isinstance(dropout, nn.Module) else F.dropout(weights, dropout))
    if isinstance(logits, MapLogits):
        return global_attention(
            logits.query, logits.key, logits.value, row_logits=logits.row_logits, column_logits=logits.column_logits,
            key_logits=logits.key_logits, prefix_key=logits.prefix_key, prefix_value=logits.prefix_value,
            scale=logits.scale,
        )  # fmt: skip
    if isinstance(logits, WindowLogits):
        logits = defined(logits)
        return window_attention(
            logits.query, logits.key, logits.value, logits.position_logits, logits.kernel_size,
            dilation=logits.dilation, scale=logits.scale, stride=logits.stride, padding=logits.padding,
            border=logits.border,
        )  # fmt: skip
    logits = defined(logits)
    return sequence_attention(
        logits.query, logits.key, logits.value, band_logits=logits.band_logits, outside_logits=logits.outside_logits,
        position_logits=logits.position_logits, causal=logits.causal, key_padding_mask=logits.key_padding_mask,
        scale=logits.scale, start=logits.start, segment_ids=logits.segment_ids,
    )  # fmt: skip


class MapAttention(Unscriptable, nn.Module):
    """Base of attention modules over a map: the weights and the logits for inspection."""

    def _logits(self, x: Tensor) -> Logits:
        """Check an input and return what its attention adds up."""
        raise NotImplementedError

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the size of the map of queries for an input of ``size`` (H, W)."""
        return size[0], size[1]

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights for inspection, in O(N²) memory without ``queries``.

        Args:
            x: As in ``forward``.
            queries: (Q, 2), rows and columns on the map of queries; None for all.

        Returns:
            (B, M, Hq, Wq, Hk, Wk), or (B, M, Q, Hk, Wk) with ``queries``; 0 outside a query's window.

        Raises:
            ValueError: As in ``forward``; a query lies outside the map; or there are no attention weights.
        """
        return map_weights(self._logits(x), self.attention_size(x.shape[2:]), queries)

    def attention_logits(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the logits of ``content`` and of ``position``, -inf outside a query's window.

        The softmax of their sum is :meth:`attention_maps`, whose arguments, axes and errors are the same, unless a
        window's positions outside the map take part as zeros.
        """
        found, size = parts(self._logits(x)), self.attention_size(x.shape[2:])
        return {name: map_logits(part, size, queries) for name, part in found.items()}
