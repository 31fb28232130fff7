"""The slow, obvious definition of every operator, in plain differentiable PyTorch.

The compiled operators must equal these functions; where no binary serves a tensor, these run instead; and
second derivatives come from here. Arguments arrive validated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def _at_least_float32(*tensors: Any) -> Iterator[Any]:
    """Half tensors as float32, None as None: sums of many products are never taken in half precision."""
    return (t.float() if t is not None and t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors)


# --- sampled region -------------------------------------------------------------------------------------------


def bilinear_samples(input: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Sample feature maps at fractional positions; outside the map they read 0.

    Equation 4 of Zhu et al. (2019): sum over pixels k of G(k, (y, x)) * input[k], with
    G(a, b) = g(a_y, b_y) * g(a_x, b_x) and g(a, b) = max(0, 1 - |a - b|).

    Args:
        input: (B, C, H, W).
        y: Row of every sample, (B, *S).
        x: Column of every sample, (B, *S).

    Returns:
        (B, *S, C).
    """
    B, C, H, W = input.shape
    pixels = input.permute(0, 2, 3, 1).reshape(B * H * W, C)
    image = torch.arange(B, device=input.device).view(B, *[1] * (y.dim() - 1)) * (H * W)
    # Positions that no pixel reaches leave here, also NaN and what would overflow an integer.
    inside = (y >= -1) & (y < H) & (x >= -1) & (x < W)
    y, x = torch.where(inside, y, -2), torch.where(inside, x, -2)
    y0, x0 = y.detach().floor(), x.detach().floor()
    dy, dx = y - y0, x - x0  # at a pixel itself the derivative is the one to its right, as in torchvision
    total = input.new_zeros(*y.shape, C)
    for row, row_weight in ((y0, 1 - dy), (y0 + 1, dy)):
        for column, column_weight in ((x0, 1 - dx), (x0 + 1, dx)):
            weight = row_weight * column_weight
            exists = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            index = torch.where(exists, image + row.long() * W + column.long(), 0)
            values = pixels.index_select(0, index.flatten()).view(*y.shape, C)
            values = torch.where(exists.unsqueeze(-1), values, 0)  # 0, even where an absent pixel's stand-in is inf
            total = total + values * weight.unsqueeze(-1)
    return total


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """See :func:`attn_plugins.ops.deform_conv2d`."""
    dtype = input.dtype
    input, offset, weight, bias, mask = _at_least_float32(input, offset, weight, bias, mask)
    B, C, H, W = input.shape
    out_channels, group_channels, Kh, Kw = weight.shape
    taps, groups = Kh * Kw, C // group_channels
    D, Ho, Wo = offset.shape[1] // (2 * taps), offset.shape[2], offset.shape[3]

    def grid(steps: int, step: int, shape: tuple[int, ...]) -> Tensor:
        return (torch.arange(steps, device=input.device, dtype=input.dtype) * step).view(shape)

    # p_q + p_k + offset, per image, offset group, tap and output pixel: (B, D, Kh, Kw, Ho, Wo)
    shift = offset.view(B, D, Kh, Kw, 2, Ho, Wo)
    y = grid(Ho, stride[0], (Ho, 1)) - padding[0] + grid(Kh, dilation[0], (Kh, 1, 1, 1)) + shift[..., 0, :, :]
    x = grid(Wo, stride[1], (1, Wo)) - padding[1] + grid(Kw, dilation[1], (Kw, 1, 1)) + shift[..., 1, :, :]
    samples = bilinear_samples(
        input.reshape(B * D, C // D, H, W), y.reshape(B * D, taps, Ho, Wo), x.reshape(B * D, taps, Ho, Wo)
    )  # (B * D, taps, Ho, Wo, C / D)
    if mask is not None:
        samples = samples * mask.view(B * D, taps, Ho, Wo, 1)
    columns = samples.permute(0, 4, 1, 2, 3).reshape(B, groups, group_channels * taps, Ho * Wo)
    kernels = weight.reshape(groups, out_channels // groups, group_channels * taps)
    output = torch.matmul(kernels, columns).reshape(B, out_channels, Ho, Wo)
    if bias is not None:
        output = output + bias.view(-1, 1, 1)
    return output.to(dtype)


# --- region "everywhere" --------------------------------------------------------------------------------------


def masked_softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; where every logit is -inf the result is 0, and so is the gradient."""
    masked = (logits == float("-inf")).all(-1, keepdim=True)
    return logits.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)


def global_attention_probabilities(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
    scale: float,
) -> Tensor:
    """The attention weights themselves, (B, M, Hq, Wq, Hk, Wk); Hq = Wq = 1 where no argument has query axes.

    A query whose keys are all masked (logit -inf) has the weight 0 everywhere.
    """
    B, M, Hk, Wk, _ = value.shape
    query, key, row_logits, column_logits, key_logits = _at_least_float32(
        query, key, row_logits, column_logits, key_logits
    )
    dtype = torch.promote_types(value.dtype, torch.float32)
    logits = value.new_zeros(B, M, 1, 1, Hk, Wk, dtype=dtype)
    if query is not None and key is not None:
        logits = logits + torch.einsum("bmhwd,bmyxd->bmhwyx", query, key) * scale
    if row_logits is not None:
        logits = logits + row_logits.unsqueeze(-1)
    if column_logits is not None:
        logits = logits + column_logits.unsqueeze(-2)
    if key_logits is not None:
        logits = logits + key_logits[:, :, None, None]
    probabilities = masked_softmax(logits.flatten(-2))
    return probabilities.unflatten(-1, (Hk, Wk))


def global_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
    scale: float,
) -> Tensor:
    """See :func:`attn_plugins.ops.global_attention`."""
    weights = global_attention_probabilities(query, key, value, row_logits, column_logits, key_logits, scale)
    return torch.einsum("bmhwyx,bmyxd->bmhwd", weights, value.to(weights.dtype)).to(value.dtype)


# --- region "window" ------------------------------------------------------------------------------------------


class Windows:
    """Which key every tap of every query is: query * stride - padding + tap * dilation, rows and columns alike."""

    def __init__(
        self,
        queries: Sequence[int],
        keys: Sequence[int],
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        device: torch.device,
    ) -> None:
        def positions(axis: int) -> Tensor:
            first = torch.arange(queries[axis], device=device) * stride[axis] - padding[axis]
            return first.unsqueeze(1) + torch.arange(kernel_size[axis], device=device) * dilation[axis]

        rows, columns = positions(0), positions(1)  # (Hq, Ky), (Wq, Kx)
        inside = [(line >= 0) & (line < size) for line, size in zip((rows, columns), keys)]
        self.rows, self.columns = rows.clamp(0, keys[0] - 1), columns.clamp(0, keys[1] - 1)
        self.inside = inside[0][:, None, :, None] & inside[1][:, None, :]  # (Hq, Wq, Ky, Kx)

    def gather(self, tensor: Tensor) -> Tensor:
        """(B, M, Hk, Wk, width) -> (B, M, Hq, Wq, taps, width), 0 outside the map."""
        found = tensor[:, :, self.rows][:, :, :, :, self.columns].transpose(3, 4)
        return torch.where(self.inside[..., None], found, 0).flatten(4, 5)


def window_attention_probabilities(
    query: Tensor | None,
    key: Tensor | None,
    position_logits: Tensor | None,
    windows: Windows,
    zero_border: bool,
    scale: float,
) -> Tensor:
    """The attention weights themselves, (B, M, Hq, Wq, taps); B and M may be 1 where the logits' are."""
    query, key, position_logits = _at_least_float32(query, key, position_logits)
    terms = []
    if query is not None and key is not None:
        terms.append(torch.einsum("bmhwd,bmhwtd->bmhwt", query, windows.gather(key)) * scale)
    if position_logits is not None:
        terms.append(position_logits)
    logits = sum(terms[1:], terms[0])
    if not zero_border:
        logits = logits.masked_fill(~windows.inside.flatten(2), float("-inf"))
    return masked_softmax(logits)


def window_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    position_logits: Tensor | None,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    zero_border: bool,
    scale: float,
) -> Tensor:
    """See :func:`attn_plugins.ops.window_attention`; of maps, and every query's keys are written out."""
    leader = position_logits if query is None else query
    assert leader is not None
    windows = Windows(leader.shape[2:4], value.shape[2:4], kernel_size, stride, padding, dilation, value.device)
    weights = window_attention_probabilities(query, key, position_logits, windows, zero_border, scale)
    (values,) = _at_least_float32(value)
    weights = weights.expand(*value.shape[:2], -1, -1, -1)
    return torch.einsum("bmhwt,bmhwtd->bmhwd", weights, windows.gather(values)).to(value.dtype)


# --- region "criss-cross" -------------------------------------------------------------------------------------


def criss_cross_probabilities(
    query: Tensor | None, key: Tensor | None, value: Tensor, position_logits: Tensor | None, scale: float
) -> Tensor:
    """The attention weights themselves, (B, M, H, W, H + W): of the query's column, then of its row.

    The query's own position has its weight in the row and 0 in the column.
    """
    query, key, value, position_logits = _at_least_float32(query, key, value, position_logits)
    H, W = value.shape[2:4]
    logits = value.new_zeros((*value.shape[:4], H + W))
    if query is not None and key is not None:
        column = torch.einsum("bmhwd,bmiwd->bmhwi", query, key)
        row = torch.einsum("bmhwd,bmhjd->bmhwj", query, key)
        logits = torch.cat((column, row), -1) * scale
    if position_logits is not None:
        logits = logits + position_logits
    rows = torch.arange(H, device=value.device).unsqueeze(1)
    own = torch.arange(H + W, device=value.device) == rows  # (H, H + W)
    return masked_softmax(logits.masked_fill(own.unsqueeze(1), float("-inf")))


def criss_cross_attention(
    query: Tensor | None, key: Tensor | None, value: Tensor, position_logits: Tensor | None, scale: float
) -> Tensor:
    """See :func:`attn_plugins.ops.criss_cross_attention`."""
    weights = criss_cross_probabilities(query, key, value, position_logits, scale)
    values, H = value.to(weights.dtype), value.shape[2]
    column = torch.einsum("bmhwi,bmiwd->bmhwd", weights[..., :H], values)
    row = torch.einsum("bmhwj,bmhjd->bmhwd", weights[..., H:], values)
    return (column + row).to(value.dtype)


# --- region "everywhere" of a sequence ------------------------------------------------------------------------


def sequence_attention_probabilities(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    band_logits: Tensor | None,
    outside_logits: Tensor | None,
    position_logits: Tensor | None,
    key_padding_mask: Tensor | None,
    start: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """The attention weights themselves, (B, M, T, S); 0 everywhere for a query whose keys are all masked."""
    query, key, band_logits, outside_logits, position_logits = _at_least_float32(
        query, key, band_logits, outside_logits, position_logits
    )
    B, M, S, _ = value.shape
    leaders = (query,) if query is not None else (band_logits, outside_logits, position_logits)
    T = max(t.shape[2] for t in leaders if t is not None)
    logits = value.new_zeros(B, M, T, S, dtype=torch.promote_types(value.dtype, torch.float32))
    positions = torch.arange(T, device=value.device).unsqueeze(1) + start
    offset = torch.arange(S, device=value.device) - positions  # (T, S)
    if query is not None and key is not None:
        logits = logits + torch.einsum("bmtd,bmsd->bmts", query, key) * scale
    if position_logits is not None:
        logits = logits + position_logits
    if band_logits is not None:
        b, m, _, K = band_logits.shape
        tap = offset + (K - 1 if causal else K // 2)
        found = band_logits.expand(b, m, T, K).gather(3, tap.clamp(0, K - 1).expand(b, m, T, S))
        outside = 0.0 if outside_logits is None else outside_logits.unsqueeze(-1)
        logits = logits + torch.where((tap >= 0) & (tap < K), found, outside)
    if causal:
        logits = logits.masked_fill(offset > 0, float("-inf"))
    if key_padding_mask is not None:
        logits = logits.masked_fill(key_padding_mask[:, None, None], float("-inf"))
    return masked_softmax(logits)


def sequence_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    band_logits: Tensor | None,
    outside_logits: Tensor | None,
    position_logits: Tensor | None,
    key_padding_mask: Tensor | None,
    start: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """See :func:`attn_plugins.ops.sequence_attention`."""
    weights = sequence_attention_probabilities(
        query, key, value, band_logits, outside_logits, position_logits, key_padding_mask, start, causal, scale
    )
    return torch.matmul(weights, value.to(weights.dtype)).to(value.dtype)
