"""Definition of window attention; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.softmax import masked_softmax
from .operands import Terms, first_keys


class Windows:
    """Position of each query's taps among the keys: query * stride - padding + tap * dilation, along both axes.

    With the border ``'inside'``, stride and padding have no meaning, and no position is outside the map.
    """

    def __init__(
        self,
        queries: Sequence[int],
        keys: Sequence[int],
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        device: torch.device,
        border: str = "exclude",
    ) -> None:
        def positions(axis: int) -> Tensor:
            if border == "inside":
                first = first_keys(keys[axis], kernel_size[axis], dilation[axis], device)
            else:
                first = torch.arange(queries[axis], device=device) * stride[axis] - padding[axis]
            return first.unsqueeze(1) + torch.arange(kernel_size[axis], device=device) * dilation[axis]

        rows, columns = positions(0), positions(1)  # (Hq, Ky), (Wq, Kx)
        inside = [(line >= 0) & (line < size) for line, size in zip((rows, columns), keys)]
        self.rows, self.columns = rows.clamp(0, keys[0] - 1), columns.clamp(0, keys[1] - 1)
        self.inside = inside[0][:, None, :, None] & inside[1][:, None, :]  # (Hq, Wq, Ky, Kx)

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather each query's window, (B, M, Hk, Wk, width) -> (B, M, Hq, Wq, taps, width), 0 outside the map."""
        windows = tensor[:, :, self.rows][:, :, :, :, self.columns].transpose(3, 4)
        return torch.where(self.inside[..., None], windows, 0).flatten(4, 5)


def window_attention_logits(
    query: Tensor | None,
    key: Tensor | None,
    position_logits: Tensor | None,
    windows: Windows,
    border: str,
    scale: float,
) -> Tensor:
    """Return the sum of all logits, (B, M, Hq, Wq, taps); B and M are 1 if they are in all arguments."""
    query, key, position_logits = at_least_float32(query, key, position_logits)
    terms = []
    if query is not None and key is not None:
        terms.append(torch.einsum("bmhwd,bmhwtd->bmhwt", query, windows.gather(key)) * scale)
    if position_logits is not None:
        terms.append(position_logits)
    logits = sum(terms[1:], terms[0])
    if border == "exclude":
        logits = logits.masked_fill(~windows.inside.flatten(2), float("-inf"))
    return logits


def window_attention_probabilities(*operands: Any) -> Tensor:
    """Return the softmax of :func:`window_attention_logits`, in its shape; 0 for fully masked queries."""
    return masked_softmax(window_attention_logits(*operands))


def window_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    position_logits: Tensor | None,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    border: str,
    scale: float,
) -> Tensor:
    """See :func:`attn_plugins.ops.window_attention`; this one takes maps, and gathers every query's keys."""
    grid = Terms(query, key, value, position_logits).grid()
    windows = Windows(grid, value.shape[2:4], kernel_size, stride, padding, dilation, value.device, border)
    weights = window_attention_probabilities(query, key, position_logits, windows, border, scale)
    (values,) = at_least_float32(value)
    weights = weights.expand(*value.shape[:2], -1, -1, -1)
    return torch.einsum("bmhwt,bmhwtd->bmhwd", weights, windows.gather(values)).to(value.dtype)
