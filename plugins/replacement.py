"""Replacement of other packages' layers by this package's operators: the engine behind ``accelerate`` and drop-ins.

Adapters say in tables of :class:`Place` which class computes what by which of our functions. The engine checks all
layers of a model before it replaces any, and takes replacements back.

A replaced layer keeps everything but its class. The new class is derived from the stock one and shows its name, module,
signatures and source, so that sharding policies and ``no_split_module_classes``, which look classes up by name,
``isinstance``, ``repr`` and ``torch.jit.script``, which reads source, find what they found before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .core import library, triton_launch
from .core.gradients import traced
from .import_hooks import after_import
from .ops import use_onednn

# Adapters by the package whose layers they know; each has PLACES and ``place_of``.
ADAPTERS = {
    "timm": "timm.accelerate",
    "torchvision": "torchvision.accelerate",
    "transformers": "transformers.places",
    "rfdetr": "transformers.places",
    "ultralytics": "transformers.places",
    "segment_anything": "segment_anything.accelerate",
    "mmcv": "mmcv.places",
    "mmdet": "mmcv.places",
    "mmseg": "mmcv.places",
}
FUNCTIONS = {"torchvision": "torchvision.drop_in"}  # modules that replace functions for the process on import
SUPPORTED = (
    "Swin and Swin V2 of timm, transformers and torchvision, Swin of mmdet and mmseg; "
    "attention with relative positions of timm's SAM and MViTv2, of segment_anything, "
    "and of transformers' SAM, ViTDet and relatives; "
    "multi-scale deformable attention of mmcv, transformers, rfdetr and Ultralytics; torchvision.ops.DeformConv2d; "
    "mmcv's DCN, DCNv2, GeneralizedAttention, CrissCrossAttention and MultiheadAttention"
)


def _always(*layer: Any) -> bool:
    return True


class Place(NamedTuple):
    """A class of another package, and what of it this package computes.

    Attributes:
        module: Full name of the module that defines the class.
        layer: Name of the class.
        ours: Function from the stock one and its arguments to its result. It may call the stock one.
        method: Method of the class, which is replaced or calls what is replaced.
        function: Global function called by that method, which is replaced; None: the method itself is.
        attribute: Attribute in which every layer keeps that function from its construction on.
        child: Attribute and class name of a child whose code is replaced as well, defined in the same module.
        supports: Function from a layer to whether ``ours`` computes it; only where the method is replaced.
        arguments: Names of the method's arguments after ``self``; versions with others keep their code. None: any.
        exports: Whether ``ours`` runs in ONNX exports, where it becomes a node that the stock code does not.
        traces: Whether ``ours`` runs in ``torch.jit.trace``, which cannot follow the stock code.
        more: Methods that the class gets besides, by name.
        caution: Warning for a model that contains such a layer.
    """

    module: str
    layer: str
    ours: Callable[..., Any]
    method: str = "forward"
    function: str | None = None
    attribute: str | None = None
    child: tuple[str, str] | None = None
    supports: Callable[[Any], bool] = _always
    arguments: tuple[str, ...] | None = None
    exports: bool = False
    traces: bool = False
    more: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    caution: str | None = None

    @property
    def package(self) -> str:
        """Name of the package that defines the class."""
        return self.module.partition(".")[0]


def accelerate(model: nn.Module, *, onednn: bool = True) -> list[str]:
    """Replace layers of other packages in a model by this package's operators, in place.

    Supported are, in any mixture, Swin and Swin V2 of timm, transformers and torchvision, Swin of mmdet and mmseg, the
    attention with decomposed positions of timm's SAM and MViTv2, of segment_anything, and of transformers' SAM, ViTDet
    and relatives, multi-scale deformable attention of mmcv, transformers, rfdetr and Ultralytics,
    ``torchvision.ops.DeformConv2d``, and mmcv's ``DCN``, ``DCNv2``, ``GeneralizedAttention``, ``CrissCrossAttention``
    and ``MultiheadAttention``. Parameters, keys, hooks and class names stay; outputs and gradients equal the stock ones
    up to rounding. The stock code runs where others take part in what is replaced, on devices that this package has no
    kernels for, and while ``torch.jit``, ``torch.fx`` or an ONNX exporter traces. Code that ``torch.compile`` has
    compiled before is discarded, in the whole process, since it would go on to run as it is.

    Args:
        model: A model, or a module that contains one.
        onednn: Also call :func:`attn_plugins.ops.use_onednn` for the float32 products of the process.

    Returns:
        The names of the replaced modules. Empty if all were replaced before.

    Raises:
        ValueError: ``model`` contains no supported module.
        RuntimeError: Other code has modified one of the modules; nothing is replaced.
    """
    found: dict[str, tuple[Any, Place]] = {}
    known = False
    for name, module in model.named_modules():
        known = known or is_replaced(type(module))
        place = place_of(type(module))
        if place is None or not fits(place, type(module)) or not place.supports(module):
            continue
        known = True
        if not _is_dropped_in(module, place):
            _check(name, module, place)
            found[name] = module, place
    if not known:
        raise ValueError(f"model must contain layers to accelerate: {SUPPORTED}; {_seen(model)}")
    for module, place in found.values():
        vars(module).pop(place.method, None)  # the class's own, which ``kernelize`` binds where it has no kernel
        stock: Any = type(module)
        module.__class__ = derived(stock)
        _exchange(module)
    if found:
        forget_compiled()
    for caution in {place.caution for _, place in found.values() if place.caution is not None}:
        warnings.warn(caution, stacklevel=2)
    if onednn:
        use_onednn()
    return list(found)


def restore(model: nn.Module) -> list[str]:
    """Take :func:`accelerate` back, so that the model has the stock layers' classes and can be pickled as stock.

    Args:
        model: A model, or a module that contains one.

    Returns:
        The names of the restored modules; empty if there are none.
    """
    found: dict[str, Any] = {name: layer for name, layer in model.named_modules() if is_replaced(type(layer))}
    for module in found.values():
        _exchange(module, back=True)
        for name, own in list(vars(module).items()):
            if hasattr(own, "__func__") and own.__func__ is getattr(type(module), name, None):  # ``kernelize`` bound it
                del vars(module)[name]
        module.__class__ = type(module).attn_plugins_stock
    if found:
        forget_compiled()
    return list(found)


def forget_compiled() -> None:
    """Discard what ``torch.compile`` has compiled: it does not notice that a layer's class or ``forward`` changes."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


# --- places -----------------------------------------------------------------------------------------------------------


def place_of(layer: type) -> Place | None:
    """Return the place of a stock class, or None."""
    adapter = ADAPTERS.get(layer.__module__.partition(".")[0])
    return None if adapter is None or is_replaced(layer) else _adapter(adapter).place_of(layer)


def is_replaced(layer: type) -> bool:
    """Return whether a class is one that :func:`derived` has returned, or is derived from it."""
    return hasattr(layer, "attn_plugins_stock")


def stock_of(function: Any) -> Any:
    """Return the function that :func:`replacement` replaced, or another ``function`` itself."""
    return getattr(function, "attn_plugins_stock", function)


def _adapter(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")


def _seen(model: nn.Module) -> str:
    """Describe what a model has instead of supported layers."""
    adapters = {name for package, name in ADAPTERS.items() if package in sys.modules}
    names = {place.layer for name in adapters for place in _adapter(name).PLACES}
    near = {f"{type(m).__module__}.{type(m).__name__}" for m in model.modules() if type(m).__name__ in names}
    kind = type(model).__name__
    return f"{kind} has {', '.join(sorted(near))}, which is not one of them" if near else f"{kind} has none"


def fits(place: Place, layer: Any) -> bool:
    """Return whether a class's method has the arguments that ``ours`` takes."""
    found = tuple(inspect.signature(getattr(layer, place.method)).parameters)[1:]
    return place.arguments is None or found == place.arguments


def _held_by(place: Place, layer: Any) -> Any:
    """Return what a class computes with now: its method, or the function of the method's module; None without one."""
    method = getattr(layer, place.method, None)
    return method if place.function is None else getattr(method, "__globals__", {}).get(place.function)


def _is_dropped_in(module: nn.Module, place: Place) -> bool:
    """Return whether a drop-in has replaced what this module computes with."""
    held = vars(module).get(place.attribute) if place.attribute else _held_by(place, type(module))
    return stock_of(held) is not held


def _check(name: str, module: nn.Module, place: Place) -> None:
    """Raise an error if other code has modified what is to be replaced.

    Raises:
        RuntimeError: It has.
    """
    layer: Any = type(module)
    _check_owner(getattr(layer, place.method), place, f"{place.method} of {place.layer}")
    if place.function is not None:
        _check_owner(stock_of(_held_by(place, layer)), place, f"{place.function} of {place.module}")
    parts = [(name, module)]
    if place.child is not None:
        attribute, kind = place.child
        child = getattr(module, attribute)
        if (type(child).__module__, type(child).__name__) != (place.module, kind):
            raise RuntimeError(
                f"{name}.{attribute} is {type(child).__name__}, not {place.package}'s; nothing was replaced"
            )
        parts.append((f"{name}.{attribute}", child))
    for part, owner in parts:
        for method in {"forward", place.method}:
            own = vars(owner).get(method)
            if own is not None and getattr(own, "__func__", None) is not getattr(type(owner), method):
                raise RuntimeError(f"{part} has a {method} of its own, not {place.package}'s; nothing was replaced")
    if place.attribute is not None and vars(module).get(place.attribute) is not stock_of(_held_by(place, layer)):
        raise RuntimeError(f"{name}.{place.attribute} is not {place.package}'s; nothing was replaced")


def _check_owner(held: Any, place: Place, what: str) -> None:
    if getattr(held, "__module__", "").partition(".")[0] != place.package:
        raise RuntimeError(f"{what} is {held}, not {place.package}'s; nothing was replaced")


# --- replacement of one model's layers --------------------------------------------------------------------------------


@functools.cache
def derived(stock: Any) -> Any:
    """Return the class that replaces a stock class, under the same name."""
    place = place_of(stock)
    assert place is not None
    function = stock_of(_held_by(place, stock))
    ours: Any = replacement(place, function)
    members: dict[str, Any] = dict(
        place.more,
        attn_plugins_stock=stock,
        attn_plugins_kept=None,  # an attribute that keeps a function, the stock function, and ours
        __module__=stock.__module__,
        __qualname__=stock.__qualname__,
        __doc__=stock.__doc__,
        __reduce_ex__=_reduce,
        __setstate__=_set_state,
    )
    if place.attribute is not None:
        members["attn_plugins_kept"] = place.attribute, function, ours
    elif place.function is not None:
        members[place.method] = _calling(getattr(stock, place.method), place.function, ours)
    else:
        members[place.method] = ours
    return type(stock.__name__, (stock,), members)


def _exchange(module: Any, back: bool = False) -> None:
    """Put our function in the attribute that keeps the stock one, or the stock one back."""
    if module.attn_plugins_kept is not None:
        name, stock, ours = module.attn_plugins_kept
        old, new = (ours, stock) if back else (stock, ours)
        if vars(module).get(name) is old:
            vars(module)[name] = new


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Copy and pickle as the stock class does, which drops compiled code; the derived class is made again."""
    layer: Any = type(self)
    make, arguments, state, *rest = layer.attn_plugins_stock.__reduce_ex__(self, max(protocol, 2))
    if self.attn_plugins_kept is not None:
        name, stock, ours = self.attn_plugins_kept
        state = {key: stock if key == name and value is ours else value for key, value in state.items()}
    if "attn_plugins_stock" in vars(layer):  # else a class that the user derived
        make, arguments = _empty, (layer.attn_plugins_stock,)
    return make, arguments, state, *rest


def _set_state(self: Any, state: dict[str, Any]) -> None:
    type(self).attn_plugins_stock.__setstate__(self, state)
    _exchange(self)


def _empty(stock: type) -> nn.Module:
    return object.__new__(derived(stock))


def replacement(
    place: Place, stock: Callable[..., Any], supports: Callable[[Any], bool] = _always
) -> Callable[..., Any]:
    """Return our function in the place of ``stock``, with its name, signature and source.

    The stock function runs for layers that are not what ``supports`` asks for.

    ``torch.jit.script`` finds the stock function's source by ``__wrapped__`` and the names in it by the globals, and
    so compiles the stock function. Therefore the function returned has these globals, and uses none itself.
    """
    ours, exports, traces = place.ours, place.exports, place.traces
    first = 0 if place.function is not None else 1  # position of the tensor that decides, after ``self``
    runs_stock = _runs_stock

    def replaced(*args: Any, **kwargs: Any) -> Any:
        x = args[first] if len(args) > first else next(iter(kwargs.values()))
        if runs_stock(x, exports, traces) or not supports(*args[:first]):
            return stock(*args, **kwargs)
        return ours(stock, *args, **kwargs)

    made: Any = FunctionType(replaced.__code__, _globals(stock), stock.__name__, None, replaced.__closure__)
    made = functools.update_wrapper(made, stock)
    made.attn_plugins_stock = stock
    return made


def _globals(function: Any) -> dict[str, Any]:
    return getattr(function, "__globals__", globals())


def _runs_stock(x: Any, exports: bool, traces: bool) -> bool:
    """Return whether the stock code must compute a call whose first tensor is ``x``.

    torch.fx passes proxies, on which our code cannot decide anything. A traced file holds PyTorch's operations, so that
    other programs read it.
    """
    if not isinstance(x, Tensor) or not _has_kernels(x.device.type, x.device.index or 0):
        return True
    if not traced():
        return False
    if torch.onnx.is_in_onnx_export():
        return not exports
    return torch.jit.is_tracing() and not traces


def _has_kernels(device_type: str, index: int) -> bool:
    """Return whether kernels of this package run on a device; PyTorch's operations would be slower than stock."""
    return _known_kernels(device_type, index)


# As torch.compiler.assume_constant_result does, which would import all of dynamo.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _known_kernels(device_type: str, index: int) -> bool:
    failures = library.failures()
    if device_type in failures and failures[device_type] is None:
        return True
    if triton_launch.runs_on(device_type, index):
        return True
    if device_type != "meta":
        warnings.warn(
            f"attn_plugins has no kernels for {device_type} here: replaced layers run the stock code on it. "
            "`python -m attn_plugins doctor` says why.",
            stacklevel=2,
        )
    return False


def _calling(method: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of ``method`` in which the global ``name`` is ``function``."""
    # Without the module's __name__, torch.compile reads these globals and not the module's.
    scope = {key: value for key, value in method.__globals__.items() if key != "__name__"}
    scope[name] = function
    copied = FunctionType(method.__code__, scope, method.__name__, method.__defaults__, method.__closure__)
    copied.__kwdefaults__ = method.__kwdefaults__
    return functools.update_wrapper(copied, method)


# --- replacement for all models of the process ------------------------------------------------------------------------


def drop_in() -> None:
    """Replace supported layers in all models of the process, those of packages that are imported later included.

    The layers are those of :func:`accelerate`, also in models that other code builds, and on CPUs the function
    ``torchvision.ops.deform_conv2d``. Classes and pickles stay stock's. Models that exist change as well, except for
    D-FINE and DEIMv2 of transformers, whose layers keep the function of their construction. Also calls
    :func:`attn_plugins.ops.use_onednn`. A repeated call has no effect.

    Raises:
        RuntimeError: An imported module holds other code in the place of a toolkit's. What belongs to other adapters
            may have been replaced before.
    """
    for package in ADAPTERS:
        after_import(package, _drop_in_package)
    use_onednn()


def _drop_in_package(package: ModuleType) -> None:
    replace_everywhere(_adapter(ADAPTERS[package.__name__]).PLACES, "attn_plugins.drop_in")
    if package.__name__ in FUNCTIONS:
        _adapter(FUNCTIONS[package.__name__])


def replace_everywhere(places: Iterable[Place], by: str) -> None:
    """Replace the methods or functions of ``places`` now, or when their modules are imported; all or none.

    A repeated call has no effect.

    Args:
        places: What is replaced; a module may have several classes.
        by: Name of the caller in the error.

    Raises:
        RuntimeError: An imported module holds other code there; nothing is replaced.
    """
    by_module: dict[str, list[Place]] = {}
    for place in places:
        by_module.setdefault(place.module, []).append(place)
        held = _in_module(sys.modules[place.module], place) if place.module in sys.modules else None
        if held is not None and getattr(held, "__module__", place.package).partition(".")[0] != place.package:
            raise RuntimeError(
                f"{by} replaces {place.function or f'the {place.method} of {place.layer}'}, but {place.module} holds "
                f"{held} there; nothing was replaced"
            )

    def replace(module: ModuleType) -> None:
        for place in by_module[module.__name__]:
            held = _in_module(module, place)
            layer: Any = getattr(module, place.layer, None)
            if held is not None and stock_of(held) is held and (place.function or fits(place, layer)):
                ours = replacement(place, held, place.supports)
                setattr(module if place.function else layer, place.function or place.method, ours)
                for name, method in place.more.items():
                    setattr(layer, name, method)
                forget_compiled()

    for name in by_module:
        after_import(name, replace)


def _in_module(module: ModuleType, place: Place) -> Any:
    owner = module if place.function else getattr(module, place.layer, None)
    return getattr(owner, place.function or place.method, None)
