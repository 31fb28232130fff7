"""Deformable attention by its definition in plain PyTorch, for devices without a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.backends import Backend, never
from ..common.gradients import autograd_within_operator
from . import reference
from .operands import Options, Terms


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the definition, one image at a time, since it stores all samples of its input."""
    parts = []
    for n in range(len(terms.value)):
        one = Terms(*(t[n : n + 1].detach().requires_grad_(need) for t, need in zip(terms, needs)))
        with autograd_within_operator():
            output = reference.deformable_attention(one, options)
            gradients = iter(
                torch.autograd.grad(output, [t for t, need in zip(one, needs) if need], grad_output[n : n + 1])
            )
        parts.append([next(gradients) if need else None for need in needs])
    return [torch.cat(images) if need else None for need, images in zip(needs, zip(*parts))]


BACKEND = Backend("torch", never, reference.deformable_attention, backward, allocates=True)
