"""Deformable convolution by its definition in plain PyTorch, for devices without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.backends import Backend, Gradients, never
from ..common.gradients import gradients_by_image
from . import reference
from .operands import Options, Terms


def memory_format(like: Tensor) -> torch.memory_format:
    """Return channels-last if ``like`` is, unless it is contiguous as well (the rule of ``deform_conv.h``)."""
    if not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def forward(terms: Terms, options: Options) -> Tensor:
    output = reference.deform_conv2d(*terms, *options[:3])
    return output.contiguous(memory_format=memory_format(terms.input))


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    def definition(one: Terms) -> Tensor:
        return reference.deform_conv2d(*one, *options[:3])

    return gradients_by_image(definition, grad_output, terms, needs, shared=("weight", "bias"))


BACKEND = Backend("eager", never, forward, backward, allocates=True)
