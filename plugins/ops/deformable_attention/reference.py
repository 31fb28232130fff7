"""Definition of deformable attention; see :mod:`attn_plugins.ops.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.sampling import bilinear_samples
from .operands import Options, Terms


def deformable_attention(terms: Terms, options: Options) -> Tensor:
    """See :func:`attn_plugins.ops.deformable_attention`."""
    dtype = terms.value.dtype
    value, locations, weights = at_least_float32(*terms)
    B, _, M, d = value.shape
    Q = weights.shape[1]
    locations, weights = locations.flatten(3, -2).transpose(1, 2), weights.flatten(3).transpose(1, 2)  # (B, M, Q, P, 2)
    output = value.new_zeros(B, M, Q, d)
    levels, point = options.levels(), 0
    for rows, (H, W, count) in zip(value.split([H * W for H, W, _ in levels], 1), levels):
        points = slice(point, point + count)
        maps = rows.permute(0, 2, 3, 1).reshape(B * M, d, H, W)
        # Pixel i spans [i / W, (i + 1) / W], so its centre is at (i + 1/2) / W.
        x = (locations[..., points, 0] * W - 0.5).reshape(B * M, Q, count)
        y = (locations[..., points, 1] * H - 0.5).reshape(B * M, Q, count)
        if not options.propagates_nan:
            inside = (y >= -1) & (y < H) & (x >= -1) & (x < W)  # not NaN, which reads 0 as in mmcv's kernels
            y, x = torch.where(inside, y, -2), torch.where(inside, x, -2)
        samples = bilinear_samples(maps, y, x, zero_beyond=False).view(B, M, Q, count, d)
        output = output + torch.einsum("bmqp,bmqpd->bmqd", weights[..., points], samples)
        point += count
    return output.transpose(1, 2).reshape(B, Q, M * d).to(dtype)
