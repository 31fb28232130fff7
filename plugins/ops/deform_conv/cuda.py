"""Deformable convolution by the kernels of ``csrc/deform_conv/cuda.cu``."""

from __future__ import annotations

from ..common import library
from ..common.backends import Backend
from .kernels import backward, forward
from .operands import Options, Terms


def refuses(terms: Terms, options: Options) -> str | None:
    return library.refusal(terms.input.device, "cuda")


BACKEND = Backend("cuda", refuses, forward, backward, library.refuses_determinism, allocates=True)
