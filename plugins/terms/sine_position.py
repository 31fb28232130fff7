"""Sine and cosine encoding of positions along one axis (Vaswani et al. 2017, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def sine_encoding(offsets: Tensor, width: int, wavelength: float = 10000.0) -> Tensor:
    """Encode offsets by sines and cosines whose wavelengths rise from 2π to ``wavelength`` * 2π.

    Feature i is sin(offset / wavelength^(2i / width)), feature width/2 + i its cosine, for i < width/2. This is
    R of one axis in Zhu et al. (2019), Eq. 2: the two axes of a map are encoded apart.

    Args:
        offsets: Any shape, in pixels.
        width: Number of features, even.

    Returns:
        (*offsets.shape, width), float32 or the dtype of floating ``offsets``.

    Raises:
        ValueError: ``width`` is not a positive even number.
    """
    if width < 2 or width % 2:
        raise ValueError(f"width must be a positive even number (sines and cosines), got {width}")
    if not offsets.is_floating_point():
        offsets = offsets.float()
    rank = torch.arange(0, width, 2, device=offsets.device, dtype=offsets.dtype)
    angles = offsets.unsqueeze(-1) / wavelength ** (rank / width)
    return torch.cat((angles.sin(), angles.cos()), -1)
