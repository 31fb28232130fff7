"""The call of the compiled kernels, the same for ``csrc/deform_conv/cpu.cpp`` and ``csrc/deform_conv/cuda.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.backends import Gradients
from .operands import Options, Terms


def forward(terms: Terms, options: Options) -> Tensor:
    return torch.ops.attn_plugins.deform_conv2d_forward_kernel(*terms, *options)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool], deterministic: bool = False
) -> Gradients:
    """Return the needed gradients; those of offset and mask are computed together.

    ``deterministic`` chooses the kernel whose sums on CUDA have equal bits in every run.
    """
    input, offset, weight, bias, mask = terms
    samples = needs["offset"] or needs["mask"]
    name = f"deform_conv2d{'_deterministic' if deterministic else ''}_backward_kernel"
    computed = getattr(torch.ops.attn_plugins, name)(
        grad_output, input, offset, weight, mask, *options,
        needs["input"], samples, needs["weight"], needs["bias"] and bias is not None,
    )  # fmt: skip
    names = "input", "offset", "weight", "mask", "bias"  # those that were not computed are empty, as they shall be
    return {name: grad for name, grad in zip(names, computed) if needs[name] or not grad.numel()}
