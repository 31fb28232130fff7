"""Deformable attention by the kernels of ``csrc/deformable_attention/cpu.cpp``.

They compute in float32, or in float64 for float64 values, and never store the samples. Half precision is copied to
float32, and threads that read the values of a head often pack them first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import library
from ..common.arguments import arithmetic_dtype
from ..common.backends import Backend, Gradients
from .operands import Options, Terms


def beside(terms: Terms, dtype: torch.dtype) -> list[Tensor]:
    """Return locations and weights in the dtype of the arithmetic."""
    return [terms.locations.to(dtype).contiguous(), terms.weights.to(dtype).contiguous()]


def _operands(terms: Terms) -> list[Tensor]:
    dtype = arithmetic_dtype(terms.value.dtype)
    value = terms.value.to(dtype)
    return [value if value.stride(3) == 1 else value.contiguous(), *beside(terms, dtype)]


def forward(terms: Terms, options: Options, output: Tensor) -> None:
    operands = _operands(terms)
    target = output if output.dtype == operands[0].dtype else torch.empty_like(output, dtype=operands[0].dtype)
    torch.ops.attn_plugins.deformable_attention_forward_(*operands, target, *options)
    if target is not output:
        output.copy_(target)


def backward(grad_output: Tensor, terms: Terms, options: Options, grads: Gradients) -> Gradients:
    operands = _operands(terms)
    dtype = operands[0].dtype
    written = in_dtype(grads, dtype)
    torch.ops.attn_plugins.deformable_attention_backward_(
        grad_output.to(dtype).contiguous(), *operands, *written.values(), *options
    )
    return written


def in_dtype(grads: Gradients, dtype: torch.dtype) -> Gradients:
    """Return the tensors that kernels write: the gradients themselves where they have the dtype of the arithmetic."""
    return {n: g if g is None or g.dtype == dtype else torch.empty_like(g, dtype=dtype) for n, g in grads.items()}


BACKEND = Backend("cpu", library.refuses_other_devices, forward, backward)
