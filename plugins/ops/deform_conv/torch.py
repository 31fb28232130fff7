"""Deformable convolution by its definition in plain PyTorch, for devices without a kernel.

The backward differentiates the definition one image at a time, since it stores all samples of its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.backends import Backend, Gradients, never
from ..common.gradients import autograd_within_operator
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
    images = len(terms.input)
    if images < 2:
        return {**_backward(grad_output, terms, options, needs)}
    parts = []
    for n in range(images):
        one = slice(n, n + 1)
        mask = None if terms.mask is None else terms.mask[one]
        image = terms._replace(input=terms.input[one], offset=terms.offset[one], mask=mask)
        parts.append(_backward(grad_output[one], image, options, needs))
    grads = {name: [part[name] for part in parts] for name in parts[0]}
    return {n: torch.stack(g).sum(0) if n in ("weight", "bias") else torch.cat(g) for n, g in grads.items()}


def _backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> dict[str, Tensor]:
    with autograd_within_operator():
        leaves = Terms(*(None if t is None else t.detach().requires_grad_() for t in terms))  # type: ignore[arg-type]
        output = reference.deform_conv2d(*leaves, *options[:3])
        wanted = {name: t for name, t in zip(terms._fields, leaves) if t is not None and needs[name]}
        return dict(zip(wanted, torch.autograd.grad(output, [*wanted.values()], grad_output)))


BACKEND = Backend("torch", never, forward, backward, allocates=True)
