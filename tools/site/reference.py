"""Pages of the reference: every public name, rendered from its docstring."""

from __future__ import annotations

import importlib
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "plugins"
TITLES = {
    "ops": ("Operators", "One operator for each set of keys that a query sees."),
    "modules": ("Modules", "`nn.Module`s that need no toolkit."),
    "captioning": ("Captioning", "Files and the reward of captioning."),
    "timm": ("timm", "Importing timm registers these; `timm.create_model` builds them."),
    "mmcv": ("mmdet and mmsegmentation", "`custom_imports` registers these."),
    "fairseq": ("fairseq", "`--user-dir plugins/fairseq` registers these."),
    "transformers": ("transformers", "Deformable attention of existing models on this package's operator."),
    "terms": ("Terms", "What enters the logits, one idea a file."),
}
DETAILED = ("terms", "captioning", "mmcv", "fairseq")  # packages whose files are the interface


def public_names(room: str) -> list[str]:
    """Return the dotted public names of a package: ``__all__``, or its files."""
    if room in DETAILED:
        files = sorted(p.stem for p in (PLUGINS / room).glob("*.py") if p.stem != "__init__")
        return [f"attn_plugins.{room}", *(f"attn_plugins.{room}.{name}" for name in files)]
    module = importlib.import_module(f"attn_plugins.{room}")
    return [f"attn_plugins.{room}.{name}" for name in module.__all__]


def pages() -> dict[str, str]:
    """Return file names, without their suffix, and Markdown."""
    return {room: page(room) for room in TITLES}


def page(room: str) -> str:
    title, about = TITLES[room]
    parts = [f"# {title}", about]
    for name in public_names(room):
        options = "" if room not in DETAILED else "\n    options:\n      show_submodules: false\n"
        parts.append(f"::: {name}{options}")
    return "\n\n".join(parts) + "\n"
