"""A small example call of every operator, which the doctor runs and explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import (
    criss_cross_attention,
    deform_conv1d,
    deform_conv2d,
    deformable_attention,
    global_attention,
    sequence_attention,
    window_attention,
)

Call = tuple[Callable[..., Tensor], tuple, dict[str, Any]]


def examples(draw: Callable[..., Tensor]) -> dict[str, Call]:
    """Return the functional, positional and keyword arguments of each operator's example.

    Args:
        draw: Function that returns a tensor of a given shape, such as ``torch.randn``.
    """
    maps, sequences = [draw(2, 4, 5, 6, 8) for _ in range(3)], [draw(2, 4, 9, 8) for _ in range(3)]
    factored = dict(row_logits=draw(2, 4, 5, 6, 5), column_logits=draw(2, 4, 5, 6, 6), key_logits=draw(2, 4, 5, 6))
    image, line = draw(2, 8, 7, 9), draw(2, 8, 9)
    return {
        "deform_conv2d": (
            deform_conv2d,
            (image, draw(2, 18, 7, 9), draw(8, 8, 3, 3)),
            dict(padding=1, mask=draw(2, 9, 7, 9)),
        ),
        "deform_conv1d": (deform_conv1d, (line, draw(2, 3, 9), draw(8, 8, 3)), dict(padding=1, mask=draw(2, 3, 9))),
        "deformable_attention": (
            deformable_attention,
            (draw(2, 18, 4, 8), ((3, 5), (1, 3)), draw(2, 6, 4, 2, 3, 2).sigmoid(), draw(2, 6, 4, 2, 3)),
            {},
        ),
        "global_attention": (global_attention, (*maps,), factored),
        "sequence_attention": (sequence_attention, (*sequences,), dict(band_logits=draw(2, 4, 9, 5))),
        "window_attention": (window_attention, (*maps, draw(2, 4, 5, 6, 9), 3), {}),
        "criss_cross_attention": (criss_cross_attention, (*maps, draw(2, 4, 5, 6, 11)), {}),
    }


def drawing(device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a ``draw`` for :func:`examples` with the same random numbers on every device and in every dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return draw
