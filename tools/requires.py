"""One-line errors for missing packages, with the command that installs them.

At the head of a tool, around imports that a plain ``pip install .`` does not provide::

    from tools.requires import extras

    with extras("timm", "tools"):
        import timm
        import yaml

        from tools.classification.config import Config

and before work that needs a package imported later::

    need("tensorboard")

Without timm, the tool then exits with status 1 and the line ``tools.train_classifier needs timm, which is not
installed: python -m attn_plugins install timm tools``. If the module is imported by anything but a tool, the usual
ModuleNotFoundError is raised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# Module to the name of its packages in `python -m attn_plugins install`; "" for attn_plugins' own.
EXTRAS = {
    "attn_plugins": "",
    "numpy": "captioning",
    "packaging": "",
    "torch": "",
    "timm": "timm",
    "torchvision": "timm",
    "matplotlib": "tools",
    "PIL": "tools",
    "polib": "tools",
    "pycocotools": "tools",
    "safetensors": "tools",
    "sentencepiece": "tools",
    "skimage": "tools",
    "sklearn": "tools",
    "tensorboard": "tools",
    "yaml": "tools",
    "h5py": "captioning",
    "lmdb": "captioning",
    "pycocoevalcap": "captioning",
}
# Toolkits, likewise. If a toolkit is missing, the error names only the toolkit.
STACKS = {"cv2": "mm", "mmcv": "mm", "mmdet": "mm", "mmengine": "mm", "mmseg": "mm"}
STACKS |= {"fairseq": "fairseq", "sacrebleu": "fairseq"}


@contextmanager
def extras(*names: str) -> Iterator[None]:
    """Exit the running tool with one line if a package is missing.

    Args:
        names: The extras of pyproject.toml that the tool needs; the command in the error installs them all.

    Raises:
        SystemExit: A tool is running and a package of :data:`EXTRAS` or :data:`STACKS` is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if running_tool() is None or install_command(module) is None or _is_there(module):
            raise
        raise SystemExit(_line(module, names)) from error


def need(*modules: str, extras: tuple[str, ...] = ()) -> None:
    """Exit the running program with one line if one of ``modules`` is not installed.

    Args:
        modules: Import names, keys of :data:`EXTRAS` or :data:`STACKS`.
        extras: Further extras that the command in the error installs.

    Raises:
        SystemExit: A module is missing.
    """
    for module in modules:
        if not _is_there(module):
            raise SystemExit(_line(module, extras))


def install_command(module: str, extras: tuple[str, ...] = ()) -> str | None:
    """Return the command that installs ``module``, or None if no tool needs it."""
    if module in STACKS:
        return f"python -m attn_plugins install {STACKS[module]}"
    if module not in EXTRAS:
        return None
    steps = [] if EXTRAS[module] else ["pip install ."]
    if needed := sorted({*extras, EXTRAS[module]} - {""}):
        steps.append(f"python -m attn_plugins install {' '.join(needed)}")
    return " && ".join(steps)


def running_tool() -> str | None:
    """Return the name of the tool that this process runs (``python -m tools.NAME``), or None."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", "").removesuffix(".__main__")
    return name if name.startswith("tools.") else None


def _is_there(module: str) -> bool:
    return find_spec(module) is not None


def _line(module: str, extras: tuple[str, ...]) -> str:
    return f"{running_tool() or 'this'} needs {module}, which is not installed: {install_command(module, extras)}"
