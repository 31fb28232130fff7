"""Sine and cosine encoding of positions along one axis (Vaswani et al. 2017, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def sine_encoding(offsets: Tensor, width: int, wavelength: float = 10000.0) -> Tensor:
    """Encode offsets by sines and cosines whose wavelengths increase from 2π to ``wavelength`` * 2π.

    For i < width/2, feature i is sin(offset / wavelength^(2i / width)) and feature width/2 + i is the cosine. This is
    R of one axis in Zhu et al. (2019), Eq. 2, which encodes the two axes of a map separately.

    Args:
        offsets: Any shape, in pixels.
        width: Number of features, even.
        wavelength: Upper bound of the wavelengths, in units of 2π pixels.

    Returns:
        (*offsets.shape, width), in the dtype of floating-point ``offsets``, else float32.

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
