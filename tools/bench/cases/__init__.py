"""The benchmarks, their names, and the order of their rows."""

from __future__ import annotations

import importlib

from ..case import KINDS, Case

NAMES = (
    "deform_conv", "deformable_attention", "global_attention", "augmented_conv", "window_attention", "criss_cross",
    "sequence_attention", "vision_transformers", "calls",
)  # fmt: skip
# Measured when named, and in part longer.
MORE = (
    "modules", "eager", "end_to_end", "timm_models", "transformers_models", "encoders",
)  # fmt: skip
# Their rows follow the models, which are slow to build.
MODELS = ("end_to_end", "timm_models", "transformers_models", "encoders")


def cases(name: str, device: str) -> list[Case]:
    """Return the rows of one benchmark; those of CUDA by dtype, bfloat16 first.

    Raises:
        KeyError: There is no benchmark of this name.
    """
    if name not in (*NAMES, *MORE):
        raise KeyError(name)
    rows = importlib.import_module(f"{__package__}.{name}").cases(device)
    return rows if device == "cpu" or name in MODELS else sorted(rows, key=lambda case: list(KINDS).index(case.kind))
