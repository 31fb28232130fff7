"""Call the CUDA kernels of deformable convolution (``csrc/deform_conv/cuda.cu``)."""

from __future__ import annotations

import torch

from ..common import library
from ..common.backends import Backend
from .cpu import backward, forward
from .operands import Options, Terms


def refuses(terms: Terms, options: Options) -> str | None:
    return library.refusal(terms.input.device, "cuda")


def refuses_backward(terms: Terms, options: Options) -> str | None:
    """Refuse deterministic mode: the kernel adds with atomics, but the reference's index_add can be deterministic."""
    return "its backward is not deterministic" if torch.are_deterministic_algorithms_enabled() else None


BACKEND = Backend("cuda", refuses, forward, backward, refuses_backward, allocates=True)
