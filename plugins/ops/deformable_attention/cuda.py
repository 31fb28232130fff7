"""Deformable attention by the kernels of ``csrc/deformable_attention/cuda.cu``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import library
from ...core.backends import Backend, Gradients
from . import kernels
from .operands import Options, Terms

_MOST_LEVELS = 16  # as in cuda_problem.cuh


def cannot(terms: Terms, options: Options) -> str | None:
    if reason := library.refusal(terms.value.device, "cuda"):
        return reason
    levels = len(options.points)
    return f"it takes at most {_MOST_LEVELS} levels, got {levels}" if levels > _MOST_LEVELS else None


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    return kernels.backward(grad_output, terms, options, needs, torch.are_deterministic_algorithms_enabled())


BACKEND = Backend("cuda", cannot, kernels.forward, backward, library.refuses_determinism_in_float64)
