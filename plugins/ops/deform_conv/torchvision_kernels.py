"""Deformable convolution by torchvision's kernels for GPUs, where none of ours is compiled.

They have run on CUDA. On other devices, such as Apple's, those that torchvision has serve as well, which is untested.

float16 and bfloat16 are computed in float32: torchvision has no kernel of bfloat16, and that of float16 rounds the
positions of samples to float16, which moves them by up to 1/32 of a pixel on a map of 100 columns (1.7 % of the output;
0.02 % through float32). Its gradients also add up in the dtype that it is given.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core import library
from ...core.arguments import at_least_float32
from ...core.backends import Backend, Gradients
from ...core.devices import has_kernel
from ...core.strides import memory_format
from .operands import Options, Terms

NAME = "torchvision"


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why torchvision's kernels cannot compute, or None."""
    kind = terms.input.device.type
    if kind == "meta":
        return "it serves GPUs, and the tensors are on meta"
    return _missing(kind)


def prefers_not(terms: Terms, options: Options) -> str | None:
    """Leave CPUs to others, on which every call looks for NaN."""
    return "it serves GPUs, and the tensors are on cpu" if terms.input.device.type == "cpu" else None


@cache
def _missing(kind: str) -> str | None:
    """Return the reason why torchvision has no kernels for a device type, or None."""
    try:
        import torchvision  # noqa: F401  defines torch.ops.torchvision
    except ImportError:
        return "torchvision is not installed"
    except Exception as error:  # as one for another torch raises
        return f"torchvision does not load: {error}"
    for name in ("deform_conv2d", "_deform_conv2d_backward"):
        try:
            there = has_kernel(f"torchvision::{name}", kind)
        except RuntimeError:  # its Python code loads without its binary
            there = False
        if not there:
            return f"this torchvision has no {name} for {kind}"
    return None


def _arguments(terms: Terms, options: Options) -> tuple[Any, ...]:
    """Return the arguments of torchvision's operators, tensors in at least float32."""
    input, offset, weight, bias, mask = at_least_float32(*terms)
    if offset.device.type == "cpu" and offset.isnan().any():
        raise ValueError("offset has a NaN, for which torchvision's kernels for CPUs read beyond their memory")
    if bias is None:
        bias = input.new_zeros(weight.shape[0])
    stand_in = input.new_zeros(offset.shape[0], 0) if mask is None else mask
    return (
        input, weight, offset, stand_in, bias,
        *options.stride, *options.padding, *options.dilation, options.groups, options.offset_groups, mask is not None,
    )  # fmt: skip


def forward(terms: Terms, options: Options) -> Tensor:
    output = torch.ops.torchvision.deform_conv2d(*_arguments(terms, options))
    return output.to(terms.input.dtype, memory_format=memory_format(terms.input))


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    """Return the needed gradients; torchvision computes all of them together."""
    arguments = _arguments(terms, options)
    (grad_output,) = at_least_float32(grad_output)
    input, weight, offset, mask, bias = torch.ops.torchvision._deform_conv2d_backward(grad_output, *arguments)
    if needs["offset"]:
        offset = without_nowhere(offset, arguments[2])
    computed = dict(input=input, offset=offset, weight=weight, bias=bias, mask=mask)
    return {
        name: _like(term, computed[name], name)
        for name, term in terms._asdict().items()
        if term is not None and needs[name]
    }


def _like(term: Tensor, grad: Tensor, name: str) -> Tensor:
    """Return a contiguous gradient in its term's dtype and in the layout that compiled graphs count on."""
    if name == "input":
        return grad.to(term.dtype, memory_format=memory_format(term))
    if name == "weight" or term.is_contiguous():
        return grad.to(term.dtype)
    return torch.empty_like(term).copy_(grad)


def without_nowhere(grad_offset: Tensor, offset: Tensor) -> Tensor:
    """Return a gradient that is 0 where ``offset`` is NaN, unless the gradient is NaN itself.

    There, torchvision differentiates between rows or columns 0 and 1; the definition reads nothing, so that the
    difference is one of zeros.
    """
    return grad_offset.mul_(offset == offset)


BACKEND = Backend(NAME, cannot, forward, backward, library.refuses_determinism, prefers_not)
