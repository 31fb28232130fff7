"""Deformable attention by the kernels of ``csrc/deformable_attention/cuda.cu``, with the arithmetic of :mod:`.cpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import library
from ..common.arguments import arithmetic_dtype
from ..common.backends import Backend, Gradients
from .cpu import beside, in_dtype
from .operands import Options, Terms

_MOST_LEVELS = 16  # as in cuda.cuh


def refuses(terms: Terms, options: Options) -> str | None:
    if reason := library.refusal(terms.value.device, "cuda"):
        return reason
    levels = len(options.points)
    return f"it takes at most {_MOST_LEVELS} levels, got {levels}" if levels > _MOST_LEVELS else None


def forward(terms: Terms, options: Options, output: Tensor) -> None:
    others = beside(terms, arithmetic_dtype(terms.value.dtype))
    torch.ops.attn_plugins.deformable_attention_forward_(terms.value.contiguous(), *others, output, *options)


def backward(grad_output: Tensor, terms: Terms, options: Options, grads: Gradients) -> Gradients:
    dtype = arithmetic_dtype(terms.value.dtype)
    written = in_dtype(grads, dtype)
    if (of_values := written["value"]) is not None:
        of_values.zero_()
    torch.ops.attn_plugins.deformable_attention_backward_(
        grad_output.contiguous(), terms.value.contiguous(), *beside(terms, dtype), *written.values(), *options
    )
    return written


BACKEND = Backend("cuda", refuses, forward, backward, library.refuses_determinism)
