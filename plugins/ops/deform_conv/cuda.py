"""Deformable convolution by the kernels of ``csrc/deform_conv/cuda.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import library
from ...core.backends import Backend, Gradients
from . import kernels
from .operands import Options, Terms


def cannot(terms: Terms, options: Options) -> str | None:
    return library.refusal(terms.input.device, "cuda")


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    return kernels.backward(grad_output, terms, options, needs, torch.are_deterministic_algorithms_enabled())


BACKEND = Backend("cuda", cannot, kernels.forward, backward, library.refuses_determinism_in_float64)
