"""Deformable attention by its definition in plain PyTorch, for devices without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.backends import Backend, Gradients, never
from ..common.gradients import autograd_within_operator
from . import reference
from .operands import Options, Terms


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    """Return the gradients of the definition, one image at a time, since it stores all samples of its input."""
    needed = [name for name in terms._fields if needs[name]]
    parts = []
    for n in range(len(terms.value)):
        one = Terms(*(t[n : n + 1].detach().requires_grad_() for t in terms))
        with autograd_within_operator():
            output = reference.deformable_attention(one, options)
            wanted = [getattr(one, name) for name in needed]
            parts.append(torch.autograd.grad(output, wanted, grad_output[n : n + 1]))
    return {name: torch.cat(images) for name, images in zip(needed, zip(*parts))}


BACKEND = Backend("torch", never, reference.deformable_attention, backward, allocates=True)
