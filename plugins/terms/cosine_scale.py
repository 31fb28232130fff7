"""Scaled cosine attention: logits cos(q, k) / τ, with a learned τ for each head (Liu et al. 2022, Swin V2, Eq. 2)."""

from __future__ import annotations

import math

from torch import Tensor

from .alignment import unit_vectors


def cosine_scale(logit_scale: Tensor, largest: float = 100.0) -> Tensor:
    """Return 1 / τ from a learned log(1 / τ), clamped to at most ``largest``.

    The default keeps τ at 0.01 or more. Clamped elements have no gradient.

    Args:
        logit_scale: log(1 / τ), any shape; Swin V2's is (M, 1, 1), initialized to log(10).
        largest: Upper bound of 1 / τ, positive.

    Returns:
        A tensor of the shape of ``logit_scale``.

    Raises:
        ValueError: ``largest`` is not positive.
    """
    if not largest > 0:
        raise ValueError(f"largest must be a positive scale, got {largest}")
    return logit_scale.clamp(max=math.log(largest)).exp()


def cosine_operands(query: Tensor, key: Tensor, logit_scale: Tensor, largest: float = 100.0) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose dot product is cos(q, k) / τ, for any attention operator with ``scale=1``.

    Args:
        query: (B, M, ..., d).
        key: (B, M, ..., d).
        logit_scale: log(1 / τ), M elements: (M,) or (M, 1, 1).
        largest: See :func:`cosine_scale`.

    Returns:
        Two tensors of the shapes and dtypes of ``query`` and ``key``. Zero vectors stay zero.

    Raises:
        ValueError: ``logit_scale`` does not have one element for each head.
    """
    if logit_scale.numel() != query.shape[1]:
        raise ValueError(
            f"logit_scale must have {query.shape[1]} elements, one per head, got {tuple(logit_scale.shape)}"
        )
    scale = cosine_scale(logit_scale, largest).reshape(-1, *(1,) * (query.dim() - 2))
    return unit_vectors(query) * scale.to(query.dtype), unit_vectors(key)
