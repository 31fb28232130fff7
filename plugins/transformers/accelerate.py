"""Acceleration of detection and segmentation transformers, with the same parameters, keys and outputs.

::

    model = AutoModelForObjectDetection.from_pretrained("SenseTime/deformable-detr")
    attn_plugins.transformers.accelerate(model)

Existing layers get a derived class, so that parameters, hooks and configs stay; their projections are called as before.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..ops import use_onednn
from .places import Place, calling, held_by, place_of, replacement, stock_of


def accelerate(model: nn.Module, *, onednn: bool = True) -> list[str]:
    """Replace multi-scale deformable attention of a model by this package's operator, in place.

    Supported are the families of Hugging Face transformers that have it (``places.PLACES``), the package ``rfdetr`` and
    RT-DETR of Ultralytics. Outputs and gradients equal the stock ones up to rounding. The stock code runs in ONNX
    exports, and for RT-DETR v2, D-FINE and DEIMv2 with ``method="discrete"``.

    A kernel of the Hub that ``use_kernels=True`` or ``kernelize`` loads later takes precedence on its devices.

    Args:
        model: A model, or a module that contains one.
        onednn: Also call :func:`attn_plugins.ops.use_onednn` for the float32 products of the process.

    Returns:
        The names of the replaced modules. Empty if all were replaced before.

    Raises:
        ValueError: ``model`` contains no supported module.
        RuntimeError: Other code has modified one of the modules; nothing is replaced.
    """
    found: dict[str, Any] = {}
    known = False
    for name, module in model.named_modules():
        place = place_of(type(module))
        known = known or place is not None or isinstance(module, Accelerated)
        if place is not None and not _replaced(module, place):
            _check(name, module, place)
            found[name] = type(module), module
    if not known:
        raise ValueError(
            "model must contain multi-scale deformable attention of transformers, rfdetr or Ultralytics, but "
            f"{type(model).__name__} has none"
        )
    for kind, module in found.values():
        vars(module).pop("forward", None)  # the class's own, which ``kernelize`` binds where it has no kernel
        module.__class__ = derived(kind)
        module.exchange()
    if onednn:
        use_onednn()
    return list(found)


class Accelerated(nn.Module):
    """Mixin of the derived classes, which are made at run time: instances are copied and pickled by the stock class."""

    stock: type
    kept: tuple[str, Any, Any] | None  # an attribute that holds a function, the stock function, and ours

    def exchange(self) -> None:
        """Put our function in the attribute that holds the stock one."""
        if self.kept is not None and vars(self).get(self.kept[0]) is self.kept[1]:
            vars(self)[self.kept[0]] = self.kept[2]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        name, stock, ours = self.kept or (None, None, None)
        state = {key: stock if key == name and held is ours else held for key, held in vars(self).items()}
        return _empty, (self.stock,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.exchange()


@functools.cache
def derived(layer: Any) -> Any:
    """Return the class that replaces a stock class."""
    place = place_of(layer)
    assert place is not None
    function = stock_of(held_by(place, layer))
    ours: Any = replacement(place, function)
    namespace: dict[str, Any] = dict(stock=layer, kept=None, __module__=__name__)
    if place.attribute is not None:
        namespace["kept"] = place.attribute, function, ours
    else:
        namespace["forward"] = ours if place.function is None else calling(layer.forward, place.function, ours)
    return type(f"Accelerated{layer.__name__}", (Accelerated, layer), namespace)


def _empty(layer: type) -> nn.Module:
    return object.__new__(derived(layer))


def _replaced(module: nn.Module, place: Place) -> bool:
    """Return whether the drop-in has replaced what this module computes with."""
    held = vars(module).get(place.attribute) if place.attribute else held_by(place, type(module))
    return stock_of(held) is not held


def _check(name: str, module: nn.Module, place: Place) -> None:
    """Raise an error if other code has modified what is to be replaced."""
    layer: Any = type(module)
    forward, function = layer.forward, stock_of(held_by(place, layer))
    package = place.module.partition(".")[0]
    for what, held in (("forward", forward), (place.function, function)):
        if getattr(held, "__module__", "").partition(".")[0] != package:
            raise RuntimeError(f"{what} of {layer.__name__} is {held}, not {package}'s; nothing was replaced")
    own = vars(module).get("forward", forward)
    if own is not forward and getattr(own, "__func__", None) is not forward:
        raise RuntimeError(f"{name} has a forward of its own, not {package}'s; nothing was replaced")
    if place.attribute is not None and vars(module).get(place.attribute) is not function:
        raise RuntimeError(f"{name}.{place.attribute} is not {package}'s; nothing was replaced")
