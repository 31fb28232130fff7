"""Attention inside the windows of a partitioned map, shifted or not (Liu et al. 2021, section 3.2).

Shapes: B batch, (H, W) the map, C channels, (Wh, Ww) a window, (nH, nW) numbers of windows, N = Wh * Ww tokens of a
window row by row, n windows of one group in the whole batch, M heads, d width per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.axes import unflatten
from ....terms.cosine_scale import cosine_operands
from ....terms.log_positions import bounded_logits, log_coordinates
from ....terms.position_table import table_logits
from ....terms.size_cache import cached
from ....terms.window import shifted_window_masks, shifted_window_segments
from ...common.attention import attend
from ...common.bypass import has_global_hooks, untouched
from ...common.logits import Logits, SequenceLogits
from ...common.weights import checked_queries, parts, weights_of
from .token_moves import grouped_qkv, inverse, reorder

Pair = tuple[int, int]
Project = Callable[[Tensor], Tensor]  # (n, N, C) -> (n, N, 3 * M * d)
# From query, key, value (n, M, N, d), the windows' mask (N, N) or None, and their tokens (n, N, C).
Fill = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Logits]


def in_windows(
    x: Tensor,
    window: Pair,
    shift: Pair,
    num_heads: int,
    project: Project,
    fill: Fill,
    result: Callable[[Any], Tensor] = attend,
) -> Tensor:
    """Attend from every token of a map to the tokens of its window.

    The map is rolled by -shift, then padded at the bottom and the right to whole windows, in timm's order. It is padded
    with zeros before the projection, so padding tokens are keys too, with the projection's biases. ``fill`` is called
    once for all windows that share a mask, or, if it is a :class:`TableAttention`, for all windows.

    Args:
        x: (B, H, W, C).
        window: (Wh, Ww).
        shift: Rows and columns, each less than the window's.
        num_heads: M.
        project: Function from tokens to queries, keys and values, in this order.
        fill: What attention in windows that share a mask adds up.
        result: Function from that to (n, M, N, width), or N as a grid: the weighted sums of values.

    Returns:
        (B, H, W, M * width).
    """
    B, H, W, C = x.shape
    h, w = window
    nH, nW = (H + h - 1) // h, (W + w - 1) // w
    below, right = nH * h - H, nW * w - W
    padded = bool(below or right) or torch.jit.is_tracing()  # a traced layer may need padding for another size
    if padded:
        # Roll before padding, as timm does; without padding, the order of tokens includes the roll.
        x = x.roll((-shift[0], -shift[1]), (1, 2)) if any(shift) else x
        x = F.pad(x, (0, 0, 0, right, 0, below))
    rolled = (0, 0) if padded else shift
    at_once = fill if any(shift) and isinstance(fill, TableAttention) else None
    sizes, order, back = _window_order(B, (nH, nW), window, rolled, shift if at_once is None else (0, 0), x.device)
    tokens = reorder(x.reshape(-1, C), order, back).view(-1, h * w, C)
    heads = grouped_qkv(project(tokens), sizes, num_heads)  # one product for all groups
    filled: list[Any]
    if at_once is not None:
        segments = shifted_window_segments((nH, nW), window, shift, x.device)
        filled = [at_once(*heads[0], None, tokens)._replace(segment_ids=segments)]
    else:
        masks = shifted_window_masks((nH, nW), window, shift, x.device, x.dtype) if any(shift) else [None]
        groups = zip(heads, masks, tokens.split(sizes))
        filled = [fill(q, k, v, mask, part) for (q, k, v), mask, part in groups]
    attended = [result(logits).flatten(2, -2).transpose(1, 2).flatten(2) for logits in filled]
    width = attended[0].shape[2]
    joined = reorder(_cat(attended, 0).reshape(-1, width), back, order).view(B, nH * h, nW * w, width)
    if padded:
        joined = joined[:, :H, :W]
        return joined.roll(shift, (1, 2)) if any(shift) else joined
    return joined


@cached
def _window_order(
    B: int, windows: Pair, window: Pair, rolled: Pair, shift: Pair, device: torch.device
) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Return the number of windows in each group, and the map index of their tokens with its inverse."""
    (nH, nW), (h, w) = windows, window
    places = torch.arange(B * nH * h * nW * w, device=device).view(B, nH * h, nW * w)
    if any(rolled):
        places = places.roll((-rolled[0], -rolled[1]), (1, 2))
    rows, columns = ([n - 1, 1] if moved and n > 1 else [n] for n, moved in zip(windows, shift))
    parts = [
        part.reshape(-1)
        for row in places.view(B, nH, h, nW, w).transpose(2, 3).split(rows, 1)
        for part in row.split(columns, 2)
    ]
    order = _cat(parts, 0)
    return tuple(B * row * column for row in rows for column in columns), order, inverse(order)


class TableAttention:
    """Attention with the same position logits in all windows, apart from the masks of shifted ones.

    It is an argument ``fill`` of :func:`in_windows`.

    Args:
        logits: (M, N, N), or None.
        scale: Factor of the content term.
        logit_scale: Logarithm of a head's scale, (M, 1, 1), for scaled cosine attention (Liu et al. 2022, Eq. 2).
    """

    def __init__(self, logits: Tensor | None, scale: float = 1.0, logit_scale: Tensor | None = None) -> None:
        self.logits = None if logits is None else logits.unsqueeze(0)
        self.scale, self.logit_scale = scale, logit_scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor) -> SequenceLogits:
        if self.logit_scale is not None:
            q, k = cosine_operands(q, k, self.logit_scale)
        return SequenceLogits(q, k, v, position_logits=masked(self.logits, mask, q), scale=self.scale)

    def parts(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor) -> dict[str, Logits]:
        """Return the attention by content alone and by ``logits`` alone, for :func:`window_parts`."""
        found = parts(self(q, k, v, None, tokens))
        return {
            name: part._replace(position_logits=masked(part.position_logits, mask, q)) for name, part in found.items()
        }


def masked(logits: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Add a mask (N, N) to position logits (n or 1, M, N, N), or without logits return it in the dtype of ``like``."""
    if mask is None:
        return logits
    return mask.to(like.dtype)[None, None] if logits is None else logits + mask.to(logits.dtype)


def project_v2(tokens: Tensor, qkv: nn.Linear, q_bias: Tensor | None, v_bias: Tensor | None) -> Tensor:
    """Apply Swin V2's projection, whose keys have no bias: (n, N, C) -> (n, N, 3 * M * d)."""
    if q_bias is None or v_bias is None:
        return qkv(tokens)
    bias = torch.cat((q_bias, torch.zeros_like(q_bias), v_bias))
    return F.linear(tokens, qkv.weight, bias) if untouched(qkv, nn.Linear) else qkv(tokens) + bias


def on_tokens(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a layer on a map (B, H, W, C) as tokens (B, H * W, C): adapters such as PEFT's OFT take no maps."""
    return unflatten(layer(x.flatten(1, 2)), 1, x.shape[1:3])


def needs_weights(attn: Any, stock: type[nn.Module] | None = None) -> bool:
    """Return whether a toolkit's layer must run its own code, as its weights are dropped or its modules in use.

    Args:
        attn: The layer, with its ``attn_drop`` and perhaps ``softmax``, which the toolkit calls and our code does not.
        stock: Class of the toolkit, if our code does not call ``attn`` either.
    """
    if has_global_hooks() or (stock is not None and not untouched(attn, stock)):
        return True
    drop = attn.attn_drop
    if not untouched(drop, nn.Dropout) or (drop.p > 0 and (drop.training or attn.training)):
        return True
    return hasattr(attn, "softmax") and not untouched(attn.softmax, nn.Softmax)


def predicted_logits(net: nn.Module, window: Pair, pretrained: Pair | None, like: Tensor) -> Tensor:
    """Compute Swin V2's position logits, (M, N, N), from its network ``cpb_mlp``.

    Args:
        net: Network from coordinates (..., 2) to one number per head.
        window: (Wh, Ww).
        pretrained: The window that offsets are scaled by; None for ``window``.
        like: Tensor of the coordinates' device and dtype, as the network may have no parameters before it is called.
    """
    return table_logits(predicted_table(net, window, pretrained, like), window)


def predicted_table(net: nn.Module, window: Pair, pretrained: Pair | None, like: Tensor) -> Tensor:
    """Compute the table over offsets for :func:`predicted_logits`, ((2 Wh - 1) * (2 Ww - 1), M)."""
    pretrained = window if pretrained is None else pretrained
    return bounded_logits(net(_coordinates(window, pretrained, like.device, like.dtype)))


@cached
def _coordinates(window: Pair, pretrained: Pair, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the coordinates of all offsets, ((2 Wh - 1) * (2 Ww - 1), 2)."""
    return log_coordinates(window, pretrained, device=device).to(dtype).flatten(0, 1)


def window_maps(
    x: Tensor,
    window: Pair,
    shift: Pair,
    num_heads: int,
    project: Project,
    fill: Fill,
    queries: Tensor | None = None,
    result: Callable[[Any], Tensor] = weights_of,
) -> Tensor:
    """Compute the ``attention_maps`` of windows: weights on the whole map, 0 outside the query's window.

    The weights of padding tokens are not part of the map, so a query's weights may sum to less than 1.

    Other arguments are those of :func:`in_windows`.

    Args:
        queries: (Q, 2), rows and columns; None for all.
        result: Function to values of queries and keys, (n, M, N, p * N): weights, of p parts one after another.

    Returns:
        (B, M * p, H, W, H, W), or (B, M * p, Q, H, W) with ``queries``.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """
    H, W = x.shape[1:3]
    N = window[0] * window[1]
    weights = unflatten(in_windows(x, window, shift, num_heads, project, fill, result), 3, (-1, N)).flatten(1, 2)
    # Find the keys of each query by sending token numbers through the same steps: from 1 on the map, 0 in the padding.
    dtype = torch.float32 if H * W < 2**24 else torch.float64  # in which they are exact; Apple's GPUs lack float64
    numbers = torch.arange(1, H * W + 1, dtype=dtype, device=x.device).view(1, H, W, 1)
    places = in_windows(
        numbers, window, shift, 1, lambda n: n.repeat(1, 1, 3), lambda q, k, v, *_: SequenceLogits(q, k, v),
        lambda logits: logits.value.mT.expand(-1, -1, N, -1),
    )  # fmt: skip
    index = places.long().view(1, H * W, 1, N)
    if queries is not None:
        row, column = checked_queries(queries, (H, W), x.device)
        weights, index = weights[:, row * W + column], index[:, row * W + column]
    maps = weights.new_zeros((*weights.shape[:3], 1 + H * W)).scatter_add_(3, index.expand_as(weights), weights)
    maps = unflatten(maps[..., 1:], 3, (H, W)).transpose(1, 2)
    return unflatten(maps, 2, (H, W)) if queries is None else maps


def window_parts(
    x: Tensor,
    window: Pair,
    shift: Pair,
    num_heads: int,
    project: Project,
    fill: Callable[..., dict[str, Logits]],
    queries: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the softmax of each term's own logits, by name; ``fill`` returns what each adds up.

    Other arguments and results are those of :func:`window_maps`.
    """
    names: list[str] = []

    def result(filled: dict[str, Logits]) -> Tensor:
        names[:] = filled
        return torch.cat([weights_of(logits) for logits in filled.values()], 3)

    maps = window_maps(x, window, shift, num_heads, project, fill, queries, result)  # type: ignore[arg-type]
    return dict(zip(names, unflatten(maps, 1, (num_heads, -1)).unbind(2)))


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
