"""Deformable attention by the kernels of ``csrc/deformable_attention/cuda.cu``."""

from __future__ import annotations

from ..common import library
from ..common.backends import Backend
from .kernels import backward, forward
from .operands import Options, Terms

_MOST_LEVELS = 16  # as in cuda_problem.cuh


def refuses(terms: Terms, options: Options) -> str | None:
    if reason := library.refusal(terms.value.device, "cuda"):
        return reason
    levels = len(options.points)
    return f"it takes at most {_MOST_LEVELS} levels, got {levels}" if levels > _MOST_LEVELS else None


BACKEND = Backend("cuda", refuses, forward, backward, library.refuses_determinism, allocates=True)
