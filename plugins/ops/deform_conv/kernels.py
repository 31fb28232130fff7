"""The call of the compiled kernels, the same for ``csrc/deform_conv/cpu.cpp`` and ``csrc/deform_conv/cuda.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.backends import Gradients
from .operands import Options, Terms


def forward(terms: Terms, options: Options) -> Tensor:
    return torch.ops.attn_plugins.deform_conv2d_forward_kernel(*terms, *options)


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    """Return the needed gradients; those of offset and mask are computed together."""
    input, offset, weight, bias, mask = terms
    samples = needs["offset"] or needs["mask"]
    grads: Gradients = {}
    if needs["input"] or samples or needs["weight"]:
        computed = torch.ops.attn_plugins.deform_conv2d_backward_kernel(
            grad_output, input, offset, weight, mask, *options, needs["input"], samples, needs["weight"]
        )
        grads = dict(zip(("input", "offset", "weight", "mask"), computed))
    if needs["bias"] and bias is not None:
        grads["bias"] = grad_output.sum((0, 2, 3))
    return {name: grad for name, grad in grads.items() if needs[name]}
