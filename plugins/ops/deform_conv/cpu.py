"""Deformable convolution by the kernels of ``csrc/deform_conv/cpu.cpp``."""

from __future__ import annotations

from ...core import library
from ...core.backends import Backend
from .kernels import backward, forward
from .operands import Options, Terms


def cannot(terms: Terms, options: Options) -> str | None:
    return library.refusal(terms.input.device, "cpu")


BACKEND = Backend("cpu", cannot, forward, backward)
