"""Deformable convolution by its definition in plain PyTorch, for devices without a kernel."""

from __future__ import annotations

from torch import Tensor

from ..common.backends import Backend, Gradients, never
from ..common.gradients import gradients_by_image
from ..common.strides import memory_format
from . import reference
from .operands import Options, Terms


def forward(terms: Terms, options: Options) -> Tensor:
    output = reference.deform_conv2d(*terms, *options[:3])
    return output.contiguous(memory_format=memory_format(terms.input))


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    def definition(one: Terms) -> Tensor:
        return reference.deform_conv2d(*one, *options[:3])

    return gradients_by_image(definition, grad_output, terms, needs, shared=("weight", "bias"))


BACKEND = Backend("eager", never, forward, backward, allocates=True)
