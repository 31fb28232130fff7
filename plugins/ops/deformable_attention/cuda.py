"""Deformable attention by the kernels of ``csrc/deformable_attention/cuda.cu``, with the arithmetic of :mod:`.cpu`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common import library
from ..common.arguments import arithmetic_dtype
from ..common.backends import Backend
from .cpu import beside, copy
from .operands import Options, Terms

_MOST_LEVELS = 16  # as in cuda.cuh


def refuses(terms: Terms, options: Options) -> str | None:
    if reason := library.refusal(terms.value.device, "cuda"):
        return reason
    levels = len(options.points)
    return f"it takes at most {_MOST_LEVELS} levels, got {levels}" if levels > _MOST_LEVELS else None


def refuses_backward(terms: Terms, options: Options) -> str | None:
    """Refuse deterministic mode: the kernel adds with atomics, but the reference's index_add can be deterministic."""
    return "its backward is not deterministic" if torch.are_deterministic_algorithms_enabled() else None


def forward(terms: Terms, options: Options, output: Tensor) -> None:
    others = beside(terms, arithmetic_dtype(terms.value.dtype))
    torch.ops.attn_plugins.deformable_attention_forward_(terms.value.contiguous(), *others, output, *options)


def backward(grad_output: Tensor, terms: Terms, options: Options, grads: Sequence[Tensor | None]) -> None:
    dtype = arithmetic_dtype(terms.value.dtype)
    written = [g if g is None or g.dtype == dtype else torch.empty_like(g, dtype=dtype) for g in grads]
    if written[0] is not None:
        written[0].zero_()
    torch.ops.attn_plugins.deformable_attention_backward_(
        grad_output.contiguous(), terms.value.contiguous(), *beside(terms, dtype), *written, *options
    )
    copy(written, grads)


BACKEND = Backend("cuda", refuses, forward, backward, refuses_backward)
