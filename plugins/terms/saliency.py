"""Saliency of keys, independent of the query: ε3 = u·key (Zhu et al. 2019, Eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.gradients import is_compiling
from ..ops import deformable_attention
from ..ops.deformable_attention.deformable_attention import shapes_on_host


def key_saliency(key: Tensor, vector: Tensor) -> Tensor:
    """Compute ε3 of every key.

    Args:
        key: Projected keys, (B, M, Hk, Wk, d) for a map, (B, M, S, d) for a sequence.
        vector: u, (M, d).

    Returns:
        (B, M, ...).
    """
    return torch.einsum("bm...d,md->bm...", key, vector)


def add_vector(query: Tensor, vector: Tensor) -> Tensor:
    """Return q + u, so that one product computes ε1 + ε3 = (q + u)·key; likewise ε2 + ε4 with v and R.

    Args:
        query: (B, M, Hq, Wq, d).
        vector: (M, d).

    Returns:
        (B, M, Hq, Wq, d), in the query's dtype, which under autocast is not the vector's.
    """
    return query + vector[:, None, None].to(query.dtype)


def sampled_saliency(saliency: Tensor, spatial_shapes: Sequence[Sequence[int]], sampling_locations: Tensor) -> Tensor:
    """Compute ε3 of keys that are sampled between pixels, 0 outside the maps.

    Sampled keys are interpolated bilinearly and ε3 is linear in the key, so the saliency itself is interpolated.

    Args:
        saliency: (B, S, M), of every pixel of all levels, row by row, one level after another.
        spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), the sizes of the levels.
        sampling_locations: (B, Q, M, L, K, 2), as (x, y), 0 to 1 on the map.

    Returns:
        (B, Q, M, L, K), in the dtype of ``sampling_locations``.

    Raises:
        ValueError: ``spatial_shapes`` is no list of (H, W), or its number of pixels is not that of ``saliency``.
    """
    shapes, (B, Q, M, _, K, _) = shapes_on_host(spatial_shapes), sampling_locations.shape
    pixels = sum(H * W for H, W in shapes)
    if is_compiling():  # symbols of a Tensor's values allow no condition
        torch._check(pixels == saliency.shape[1])
    elif pixels != saliency.shape[1]:
        raise ValueError(f"spatial_shapes must have as many pixels as saliency, {saliency.shape[1]}, got {pixels}")
    levels = saliency.to(sampling_locations.dtype).unsqueeze(-1).split([H * W for H, W in shapes], 1)
    sampled = []
    for values, shape, locations in zip(levels, shapes, sampling_locations.unbind(3)):
        # Treat every point as a separate query with a single sample of weight 1.
        points = locations.transpose(2, 3).reshape(B, Q * K, M, 1, 1, 2)
        at_points = deformable_attention(values, [shape], points, points.new_ones(1).expand(B, Q * K, M, 1, 1))
        sampled.append(at_points.view(B, Q, K, M).transpose(2, 3))
    return torch.stack(sampled, 3)
