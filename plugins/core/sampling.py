"""Bilinear samples of feature maps, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def bilinear_samples(input: Tensor, y: Tensor, x: Tensor, zero_beyond: bool = True) -> Tensor:
    """Sample feature maps at fractional positions, with zeros outside the map and NaN at a NaN position.

    The value at (y, x) is the sum over pixels k of G(k, (y, x)) * input[k], with G(a, b) = g(a_y, b_y) * g(a_x, b_x)
    and g(a, b) = max(0, 1 - |a - b|) (Zhu et al. 2019, Eq. 4).

    Args:
        input: (B, C, H, W).
        y: (B, *S), the row of each sample.
        x: (B, *S), the column of each sample.
        zero_beyond: Whether a sample beside the map is 0 even if its row or column is NaN or infinite. Without, it is
            NaN then.

    Returns:
        (B, *S, C).
    """
    B, C, H, W = input.shape
    pixels = input.permute(0, 2, 3, 1).reshape(B * H * W, C)
    image = torch.arange(B, device=input.device).view(B, *[1] * (y.dim() - 1)) * (H * W)
    y0, x0 = y.detach().floor(), x.detach().floor()
    dy, dx = y - y0, x - x0  # at a pixel, the derivative is that to its right, as in torchvision
    total = input.new_zeros(*y.shape, C)
    for row, row_weight in ((y0, 1 - dy), (y0 + 1, dy)):
        for column, column_weight in ((x0, 1 - dx), (x0 + 1, dx)):
            weight = row_weight * column_weight
            exists = (row >= 0) & (row < H) & (column >= 0) & (column < W)  # false for NaN
            index = image + row.where(exists, 0).long() * W + column.where(exists, 0).long()
            values = pixels.index_select(0, index.flatten()).view(*y.shape, C)
            values = torch.where(exists.unsqueeze(-1), values, 0)  # 0 even if pixel 0, read in its place, is inf
            total = total + values * weight.unsqueeze(-1)
    if not zero_beyond:
        return total
    beyond = (y < -1) | (y >= H) | (x < -1) | (x >= W)
    return total.masked_fill((beyond & (dy + dx).isnan()).unsqueeze(-1), 0)  # infinite y or x
