"""Actions right after the import of a module, in whatever order a user imports.

This file imports neither torch nor a toolkit nor another file of this package, so that every layer may use it. Each
``import torch`` loads it, through :mod:`attn_plugins.autoload`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` right after the import of the module ``name``, or now if it is already imported.

    This imports nothing. An action is registered once per module; several actions run in the order of registration.
    The import of the module raises any error that an action raises.

    Args:
        name: Full module name, such as ``'timm.models'``.
        action: Function called once with the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    actions = _finder.waiting.setdefault(name, [])
    if action not in actions:
        actions.append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _PostImportFinder(MetaPathFinder):
    """Finder that runs the actions right after a module of ``waiting`` has executed, then removes them."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.waiting:
            return None
        spec = next(filter(None, (f.find_spec(fullname, path, target) for f in self._others())), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module):
            execute(module)  # if the toolkit's import fails, the hook stays for the next attempt
            if module.__name__ == fullname:
                del loader.exec_module
                self._finish(fullname, module)

        # Patch the instance: inspect, pkgutil and importlib.resources depend on the loader's class.
        loader.exec_module = exec_module
        return spec

    def _others(self):
        return [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]

    def _finish(self, name: str, module: ModuleType) -> None:
        actions = self.waiting.pop(name, [])
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        for action in actions:
            action(module)


_finder = _PostImportFinder()
