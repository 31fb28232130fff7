"""Suggestions for model names that timm does not know."""

from __future__ import annotations

import difflib


def check_model_name(name: str) -> str | None:
    """Return an unknown model name with timm's nearest names, or None for a known name.

    >>> check_model_name("aa_resnet51")
    "'aa_resnet51': did you mean aa_resnet50, aa_resnet152 or aa_resnet101?"
    """
    import timm

    import attn_plugins.timm  # noqa: F401 - registers our models

    if timm.is_model(name):
        return None
    names = timm.list_models()
    begin = sorted((known for known in names if name and known.startswith(name)), key=len)
    near = (begin + [known for known in difflib.get_close_matches(name, names) if known not in begin])[:3]
    if not near:
        return f"{name!r}, which is near none of the {len(names)} names of timm.list_models()"
    few = " or ".join(filter(None, (", ".join(near[:-1]), near[-1])))
    return f"{name!r}: did you mean {few}?"


def is_built_for_a_size(name: str) -> bool:
    """Return whether a timm model has a fixed image size, ``img_size``, such as that of its position tables."""
    import timm

    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return name.startswith("aa_") or bool(cfg is not None and cfg.fixed_input_size)
