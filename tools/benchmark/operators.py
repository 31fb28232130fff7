"""Benchmarks of operators by name."""

from __future__ import annotations

import importlib

from .case import Case

OPERATORS = {  # name -> module with `cases(device)`
    "deform_conv": "sampled.deform_conv",
    "deformable_attention": "sampled.deformable_attention",
    "global_attention": "everywhere.global_attention",
    "augmented_conv": "everywhere.augmented_conv",
    "window_attention": "window.window_attention",
    "criss_cross": "criss_cross.criss_cross",
    "sequence_attention": "everywhere.sequence_attention",
    "vision_transformers": "everywhere.vision_transformers",
    "halves": "halves",
    "calls": "calls",
    "mmcv_ext": "mmcv_ext",
}


def cases(name: str, device: str) -> list[Case]:
    """Return the rows of one benchmark.

    Raises:
        KeyError: there is no benchmark of this name.
    """
    return importlib.import_module(f"{__package__}.{OPERATORS[name]}").cases(device)
