"""Registration of this package's names, once more after a reload, and of classes that are imported when first built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mmengine.registry import Registry


def register(registry: Registry, module: Any) -> None:
    """Register a class or function, in place of an earlier one of this package.

    A package is imported again after ``importlib.reload``, in notebooks, and after an import that failed.

    Raises:
        KeyError: The name belongs to another package.
    """
    name = module.__name__
    owner = getattr(registry.module_dict.get(name), "__module__", "")
    registry.register_module(name=name, module=module, force=owner.startswith("attn_plugins."))


def register_lazily(registry: Registry, module: str, *names: str) -> None:
    """Register the classes ``names`` of ``module``, a module of this package that needs mmseg, without importing it.

    ``module`` registers the classes itself on its import, with ``register_module(force=True)``.
    """
    for name in names:
        register(registry, _builder(module, name))


def _builder(module: str, name: str) -> Callable[..., Any]:
    def build(*args: Any, **options: Any) -> Any:
        if find_spec("mmseg") is None:
            raise ImportError(f"{name} belongs to mmsegmentation: pip install onedl-mmsegmentation")
        return getattr(import_module(f".{module}", __package__), name)(*args, **options)

    build.__name__ = name
    return build
