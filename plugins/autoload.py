"""Registration of the plug-ins in timm, fairseq and mmengine without an import in the user's code.

torch (>= 2.5) calls :func:`activate` at the end of ``import torch``, through the ``torch.backends`` entry
point. The function imports no toolkit. It installs hooks that act right after the import of a toolkit's module:

* ``timm.models``: import ``attn_plugins.timm``, which registers the models with ``timm.create_model``;
* ``fairseq.utils``: make ``import_user_module`` accept this package's folder (``--user-dir plugins/fairseq``),
  which fairseq refuses because a module called ``fairseq`` exists already;
* ``mmengine.config.utils``: make ``_base_ = 'mmseg::...'`` resolve when mmseg comes from a distribution that
  is not called ``mmsegmentation``;

It also offers :data:`EXTENSIONS`, such as :mod:`attn_plugins.mmcv_ext` as ``mmcv._ext``, where none is compiled.

``ATTN_PLUGINS_AUTOLOAD=0`` disables these hooks, ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` all such entry points.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from .import_hooks import after_import

logger = logging.getLogger("attn_plugins")

PACKAGE = Path(__file__).resolve().parent
FAIRSEQ_USER_DIR = PACKAGE / "fairseq"


def activate() -> None:
    """Install the hooks, once per process. No exception escapes, because this runs inside ``import torch``."""
    try:
        if os.environ.get("ATTN_PLUGINS_AUTOLOAD", "1") == "0":
            return
        for name in ACTIONS:
            if name not in _done:
                after_import(name, _run)
        stand_in_for_extensions()
    except Exception:
        logger.warning("attn_plugins could not install its toolkit hooks", exc_info=True)


def _run(module: ModuleType) -> None:
    """Run a toolkit's action once per process; a failure is logged as a warning."""
    if module.__name__ in _done:
        return
    _done.add(module.__name__)
    try:
        ACTIONS[module.__name__](module)
    except Exception as error:
        logger.warning(
            "attn_plugins is not available in %s: %s: %s (for details run `python -m attn_plugins`)",
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
    """Return True if ``path`` is the ``fairseq`` folder of this package or of another copy of attn_plugins.

    Another copy is, for example, a checkout used while a wheel is installed. One process can hold only one
    attn_plugins, so the installed one is used, with a warning.
    """
    folder = Path(os.path.abspath(path))
    if not (folder / "__init__.py").is_file():
        return False
    if folder.samefile(FAIRSEQ_USER_DIR):
        return True
    ours = ("autoload.py", "fairseq/__init__.py", "core/library.py")
    if folder.name == "fairseq" and all((folder.parent / name).is_file() for name in ours):
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


class StandIn(NamedTuple):
    """A module of ours that stands in for an extension.

    It offers the names of its ``__all__``, and any other if it has a ``__getattr__``. Its ``when_offered()``, if it has
    one, runs at the end of the extension's import.
    """

    module: str
    needed: str | None = None  # a package that the module imports beside torch
    caller: str | None = None  # a function that the importing code calls, where the name alone says too little
    is_package: bool = False


# By the extension's name, in which "*." stands for any package and for none.
EXTENSIONS: dict[str, StandIn] = {
    "mmcv._ext": StandIn("attn_plugins.mmcv_ext", "torchvision"),
    "MultiScaleDeformableAttention": StandIn("attn_plugins.extensions.ms_deform_attn"),
    "groundingdino._C": StandIn("attn_plugins.extensions.ms_deform_attn"),
    "grounding_dino.groundingdino._C": StandIn("attn_plugins.extensions.ms_deform_attn"),
    "detrex._C": StandIn("attn_plugins.extensions.detrex"),
    "adet._C": StandIn("attn_plugins.extensions.adet", "torchvision"),
    "DCNv3": StandIn("attn_plugins.extensions.dcnv3"),
    "DCNv4.ext": StandIn("attn_plugins.extensions.dcnv4"),
    "*._ext": StandIn("attn_plugins.extensions.dcnv2", "torchvision", caller="dcn_v2_forward"),
    "*.deform_conv_cuda": StandIn("attn_plugins.extensions.deform_conv", "torchvision"),
    "*.deform_conv_ext": StandIn("attn_plugins.extensions.deform_conv", "torchvision"),
    "*.deform_pool_cuda": StandIn("attn_plugins.extensions.psroi_pooling", "torchvision"),
    "*.deform_pool_ext": StandIn("attn_plugins.extensions.psroi_pooling", "torchvision"),
    "detectron2._C": StandIn("attn_plugins.extensions.detectron2", "torchvision"),
    "maskrcnn_benchmark._C": StandIn("attn_plugins.extensions.maskrcnn_benchmark", "torchvision"),
    "natten": StandIn("attn_plugins.extensions.natten", is_package=True),
    "natten.functional": StandIn("attn_plugins.extensions.natten_functional"),
}


# Models of transformers on natten; see :mod:`attn_plugins.extensions.dinat`.
NEIGHBORHOODS = [
    f"transformers.models.{name}"
    for name in ("dinat.modeling_dinat", "nat.modeling_nat", "deprecated.nat.modeling_nat")
]


def _repair_neighborhoods(module: ModuleType) -> None:
    stand_in = EXTENSIONS["natten.functional"].module
    if getattr(getattr(sys.modules.get("natten.functional"), "__spec__", None), "origin", None) == stand_in:
        importlib.import_module("attn_plugins.extensions.dinat").replace(module)


class _ExtensionFinder(MetaPathFinder, Loader):
    """Finder of :data:`EXTENSIONS`; as the last finder it is asked only where there is no compiled one."""

    def find_spec(self, fullname, path=None, target=None):
        stand_in = EXTENSIONS.get(fullname) or EXTENSIONS.get(f"*.{fullname.rpartition('.')[2]}")
        if stand_in is None or (stand_in.caller and not _importer_calls(stand_in.caller)):
            return None
        if stand_in.needed is not None and importlib.util.find_spec(stand_in.needed) is None:
            return None
        return ModuleSpec(fullname, self, origin=stand_in.module, is_package=stand_in.is_package)

    def exec_module(self, module):
        stand_in = importlib.import_module(module.__spec__.origin)
        names = [*stand_in.__all__, *({"__getattr__"} & vars(stand_in).keys())]
        module.__dict__.update({name: getattr(stand_in, name) for name in names})
        if "when_offered" in vars(stand_in):
            stand_in.when_offered()
        logger.info("%s is not compiled: attn_plugins stands in", module.__name__)


def _importer_calls(function: str) -> bool:
    """Return True if the code that is importing a module names ``function``, be it in a function of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith((__name__, "importlib")):
        frame = frame.f_back
    return frame is not None and _names(frame.f_code, function)


def _names(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_names(part, name) for part in code.co_consts if isinstance(part, CodeType))


def extensions_are_offered() -> bool:
    """Return True if an import finds :data:`EXTENSIONS`."""
    return any(isinstance(finder, _ExtensionFinder) for finder in sys.meta_path)


def stand_in_for_extensions() -> None:
    """Offer this package's operators as :data:`EXTENSIONS`; a compiled extension takes precedence."""
    if not extensions_are_offered():
        sys.meta_path.append(_ExtensionFinder())
        for name in NEIGHBORHOODS:
            after_import(name, _repair_neighborhoods)


# Each action runs after a module that is imported only once torch is complete, so that the module is never
# half-imported when `activate` checks it (timm and fairseq import torch before these modules).
ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "timm.models": _register_timm_models,
    "fairseq.utils": _accept_own_user_dir,
    "mmengine.config.utils": _repair_mmseg_name,
}
_done: set[str] = set()
