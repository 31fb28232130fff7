"""Deformable attention by its definition in plain PyTorch, for devices without a kernel."""

from __future__ import annotations

from torch import Tensor

from ..common.backends import Backend, Gradients, never
from ..common.gradients import gradients_by_image
from . import reference
from .operands import Options, Terms


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    return gradients_by_image(lambda one: reference.deformable_attention(one, options), grad_output, terms, needs)


BACKEND = Backend("eager", never, reference.deformable_attention, backward, allocates=True)
