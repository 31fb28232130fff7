"""Transposed copies of matrices in tiles: ``csrc/common/transpose.cuh`` on CUDA, ``csrc/common/cpu_transpose.cpp``.

PyTorch's copy accesses another page for every element of a pixel or of a plane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import library
from .arguments import FLOATS

_IS_COMPILED = library.has_schemas() and hasattr(torch.ops.attn_plugins, "transposed_kernel")
_CPU_DTYPES = (torch.float32, torch.float64)


def has_kernel(tensor: Tensor) -> bool:
    """Return whether :func:`transposed` takes a tensor of this device and dtype."""
    dtypes = _CPU_DTYPES if tensor.is_cpu else FLOATS
    return _IS_COMPILED and tensor.dtype in dtypes and library.has_kernel(tensor.device)


def transposed(matrices: Tensor, addend: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Compute ``addend + scale * matrices.mT``, on CUDA rounded once.

    Args:
        matrices: (N, rows, columns).
        addend: (N, columns, rows); None for 0.
        scale: One element; None for 1.

    Returns:
        (N, columns, rows), contiguous.
    """
    return torch.ops.attn_plugins.transposed_kernel(matrices, addend, scale)


def channels_innermost(tensor: Tensor) -> Tensor:
    """Return a copy of (B, M, H, W, d), stored as (B, H, W, M, d)."""
    heads = tensor.permute(0, 1, 4, 2, 3)
    B, M, d, H, W = heads.shape
    if has_kernel(tensor) and heads.stride(3) == W * heads.stride(4) and heads.stride(1) == d * heads.stride(2):
        planes = heads.as_strided((B, M * d, H * W), (heads.stride(0), heads.stride(2), heads.stride(4)))
        return transposed(planes).view(B, H, W, M, d).permute(0, 3, 1, 2, 4)
    return tensor.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)


if _IS_COMPILED:

    @torch.library.register_fake("attn_plugins::transposed_kernel")
    def _fake(matrices: Tensor, addend: Tensor | None, scale: Tensor | None) -> Tensor:
        return matrices.new_empty(matrices.mT.shape)
