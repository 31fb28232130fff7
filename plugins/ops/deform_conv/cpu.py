"""Call the compiled kernels of deformable convolution of ``csrc/deform_conv/cpu.cpp``; those on CUDA take the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common import library
from ..common.backends import Backend
from .operands import Options, Terms


def refuses(terms: Terms, options: Options) -> str | None:
    return library.refusal(terms.input.device, "cpu")


def forward(terms: Terms, options: Options) -> Tensor:
    return torch.ops.attn_plugins.deform_conv2d_forward_kernel(*terms, *options)


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the needed gradients; those of offset and mask are computed together."""
    input, offset, weight, bias, mask = terms
    needs_input, needs_offset, needs_weight, needs_bias, needs_mask = needs
    samples = needs_offset or needs_mask
    grads: list[Tensor | None] = [None] * 5
    if needs_input or samples or needs_weight:
        computed = torch.ops.attn_plugins.deform_conv2d_backward_kernel(
            grad_output, input, offset, weight, mask, *options, needs_input, samples, needs_weight
        )
        grads = [computed[0], computed[1], computed[2], None, computed[3]]
    if needs_bias and bias is not None:
        grads[3] = grad_output.sum((0, 2, 3))
    return [grad if need else None for grad, need in zip(grads, needs)]


BACKEND = Backend("cpu", refuses, forward, backward, allocates=True)
