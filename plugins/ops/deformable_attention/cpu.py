"""Deformable attention by the kernels of ``csrc/deformable_attention/cpu.cpp``."""

from __future__ import annotations

from ...core import library
from ...core.backends import Backend
from .kernels import backward, forward

BACKEND = Backend("cpu", library.refuses_other_devices, forward, backward)
