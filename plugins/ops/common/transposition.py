"""Transposed copies of matrices by the tiled kernel of ``csrc/common/transpose.cuh``, on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from . import library
from .arguments import FLOATS

_IS_COMPILED = library.has_schemas() and hasattr(torch.ops.attn_plugins, "transposed_kernel")


def has_kernel(tensor: Tensor) -> bool:
    """Return whether :func:`transposed` takes a tensor of this device and dtype."""
    return _IS_COMPILED and tensor.is_cuda and tensor.dtype in FLOATS and library.has_kernel(tensor.device)


def transposed(matrices: Tensor, addend: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Compute ``addend + scale * matrices.mT``, rounded once.

    Args:
        matrices: (N, rows, columns).
        addend: (N, columns, rows); None for 0.
        scale: One element; None for 1.

    Returns:
        (N, columns, rows), contiguous.
    """
    return torch.ops.attn_plugins.transposed_kernel(matrices, addend, scale)


if _IS_COMPILED:

    @torch.library.register_fake("attn_plugins::transposed_kernel")
    def _fake(matrices: Tensor, addend: Tensor | None, scale: Tensor | None) -> Tensor:
        return matrices.new_empty(matrices.mT.shape)
