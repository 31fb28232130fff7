"""Makes the plug-ins known to timm, fairseq and mmengine without an import line in the user's code.

torch (>= 2.5) calls :func:`activate` at the end of ``import torch``, through the ``torch.backends`` entry
point. It imports nothing: it only waits for a toolkit and, right after that toolkit's module has run,

* ``timm.models``: imports ``attn_plugins.timm``, so that ``timm.create_model`` knows our models;
* ``fairseq.utils``: lets ``import_user_module`` accept our own folder (``--user-dir plugins/fairseq``), which
  fairseq itself refuses because a module called ``fairseq`` exists already;
* ``mmengine.config.utils``: lets ``_base_ = 'mmseg::...'`` resolve where mmseg came with a distribution that
  is not called ``mmsegmentation``.

``ATTN_PLUGINS_AUTOLOAD=0`` switches this off, ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` all such entry points.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger("attn_plugins")

PACKAGE = Path(__file__).resolve().parent
FAIRSEQ_USER_DIR = PACKAGE / "fairseq"


def activate() -> None:
    """Install the hooks, once per process. Never raises: it runs inside ``import torch``."""
    try:
        if os.environ.get("ATTN_PLUGINS_AUTOLOAD", "1") == "0":
            return
        for name in ACTIONS:
            if name not in _done:
                after_import(name, _run)
    except Exception:
        logger.warning("attn_plugins could not install its toolkit hooks", exc_info=True)


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` right after the module ``name`` has run, or now if it has been imported.

    Nothing is imported for it. The same action waits once for a module; several wait in the order of the calls. What an
    action raises, the import of the module raises.

    Args:
        name: Full, such as ``'timm.models'``.
        action: What to call, once, with the module.
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
    """Runs the actions right after a module of ``waiting`` has executed, then forgets them."""

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
            execute(module)  # where the toolkit itself fails, nothing was done and the hook stays
            if module.__name__ == fullname:
                del loader.exec_module
                self._finish(fullname, module)

        # On the instance: the loader keeps its class, which inspect, pkgutil and importlib.resources look at.
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


def _run(module: ModuleType) -> None:
    """Do a toolkit's action, once per process; a failure is a warning."""
    if module.__name__ in _done:
        return
    _done.add(module.__name__)
    try:
        ACTIONS[module.__name__](module)
    except Exception as error:
        logger.warning(
            "attn_plugins is not available in %s: %s: %s (`python -m attn_plugins` tells more)",
            module.__name__.partition(".")[0],
            type(error).__name__,
            error,
        )


def _register_timm_models(models: ModuleType) -> None:
    importlib.import_module("attn_plugins.timm")


def _accept_own_user_dir(utils: ModuleType) -> None:
    original = utils.import_user_module

    @functools.wraps(original)
    def import_user_module(args: Any) -> None:
        user_dir = getattr(args, "user_dir", None)
        if user_dir is None or not is_own_user_dir(user_dir):
            return original(args)
        importlib.import_module("attn_plugins.fairseq")

    utils.import_user_module = import_user_module  # type: ignore[attr-defined]


def is_own_user_dir(path: str | os.PathLike[str]) -> bool:
    """True where ``path`` is this package's ``fairseq`` folder, or that of another copy of attn_plugins.

    Another copy is, say, the checkout a user stands in while a wheel is installed: one process can hold only
    one attn_plugins, so the installed one serves, with a warning.
    """
    folder = Path(os.path.abspath(path))
    if not (folder / "__init__.py").is_file():
        return False
    if folder.samefile(FAIRSEQ_USER_DIR):
        return True
    ours = ("autoload.py", "fairseq/__init__.py")
    loader = ("ops/library.py", "ops/_library.py")  # the latter: older checkouts
    copy = folder.parent
    if (
        folder.name == "fairseq"
        and all((copy / name).is_file() for name in ours)
        and any((copy / name).is_file() for name in loader)
    ):
        logger.warning("--user-dir %s: using the installed attn_plugins in %s instead", path, PACKAGE)
        return True
    return False


def _repair_mmseg_name(utils: ModuleType) -> None:
    from importlib.metadata import PackageNotFoundError, distribution

    if utils.MODULE2PACKAGE.get("mmseg") != "mmsegmentation":
        return
    try:
        distribution("mmsegmentation")
    except PackageNotFoundError:
        if importlib.util.find_spec("mmseg") is not None:
            utils.MODULE2PACKAGE["mmseg"] = "mmseg"


# The module after which an action runs: one that starts only when torch is complete, so that it is never
# half-imported when `activate` looks (timm and fairseq import torch on their way to these).
ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "timm.models": _register_timm_models,
    "fairseq.utils": _accept_own_user_dir,
    "mmengine.config.utils": _repair_mmseg_name,
}
_finder = _PostImportFinder()
_done: set[str] = set()
