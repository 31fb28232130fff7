"""Scaled cosine attention: logits are cos(q, k) / τ, with a learned τ a head (Liu et al. 2022, Swin V2, Eq. 2)."""

from __future__ import annotations

import math

from torch import Tensor

from .alignment import unit_vectors


def cosine_scale(logit_scale: Tensor, largest: float = 100.0) -> Tensor:
    """1 / τ of a learned log(1 / τ), at most ``largest``: τ is at least 0.01. Nothing learns beyond.

    Args:
        logit_scale: log(1 / τ), any shape; Swin V2's is (M, 1, 1), log(10) at the start.
        largest: Positive.

    Returns:
        The shape of ``logit_scale``.

    Raises:
        ValueError: ``largest`` is not positive.
    """
    if not largest > 0:
        raise ValueError(f"largest must be a positive scale, got {largest}")
    return logit_scale.clamp(max=math.log(largest)).exp()


def cosine_operands(query: Tensor, key: Tensor, logit_scale: Tensor, largest: float = 100.0) -> tuple[Tensor, Tensor]:
    """Queries and keys whose plain product is cos(q, k) / τ, for any attention operator with ``scale=1``.

    Args:
        query: (B, M, ..., d).
        key: (B, M, ..., d).
        logit_scale: log(1 / τ), of M elements: (M,) or (M, 1, 1).
        largest: As in :func:`cosine_scale`.

    Returns:
        Two tensors of the shapes and dtypes of ``query`` and ``key``. A zero vector stays zero.

    Raises:
        ValueError: ``logit_scale`` does not have one element for each head.
    """
    if logit_scale.numel() != query.shape[1]:
        raise ValueError(f"logit_scale must have {query.shape[1]} elements, one a head, got {tuple(logit_scale.shape)}")
    scale = cosine_scale(logit_scale, largest).reshape(-1, *(1,) * (query.dim() - 2))
    return unit_vectors(query) * scale.to(query.dtype), unit_vectors(key)
