"""A device that this package has no kernels for and that knows no float64, as Apple's GPUs: PyTorch's PrivateUse1.

Importing this file names the device ``DEVICE`` in the whole process, so only processes of their own do. Its tensors
hold one of the CPU, on which their operations run. They raise an error where a real device would: for float64, for
operands on the CPU, and for kernels of this package. ``CALLS`` counts the operations.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from attn_plugins.core.operator import NAMESPACE, OPERATORS

DEVICE = "otherdevice"
CALLS: collections.Counter[str] = collections.Counter()
_FACTORIES = ("arange", "arange.start", "arange.start_step", "empty.memory_format", "empty_strided", "eye", "full",
              "linspace", "ones", "rand", "randint", "randint.low", "randn", "scalar_tensor", "zeros")  # fmt: skip
_MOVES = ("aten.copy_.default", "aten._to_copy.default")
_INDICES = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")


class Elsewhere(Tensor):
    """A tensor of ``DEVICE`` that holds one of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{DEVICE} does not support {inner.dtype}")
        layout = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype)
        return Tensor._make_wrapper_subclass(cls, inner.size(), device=torch.device(DEVICE, 0), **layout)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor):
        self.inner = inner.detach()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        CALLS[name] += 1
        if name.startswith(NAMESPACE):
            return _ours(name, args)
        _check(name, args, kwargs)
        results = func(*pytree.tree_map(_held, args), **pytree.tree_map(_held, kwargs))
        given = {id(t.inner): t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, cls)}
        if name == "aten._to_copy.default" and torch.device(kwargs.get("device") or DEVICE).type == "cpu":
            return results
        return pytree.tree_map(
            lambda t: given[id(t)] if id(t) in given else cls(t) if isinstance(t, Tensor) else t, results
        )


def _ours(name: str, args: Any) -> Any:
    """Run an operator as the dispatcher does on a device without kernels; an error for the kernels themselves."""
    operator = name.split(".")[1]
    with torch.no_grad():
        if operator in OPERATORS:
            return OPERATORS[operator]._forward(*args)
        return OPERATORS[operator.removesuffix("_backward")]._backward(*args)


def _check(name: str, args: Any, kwargs: Any) -> None:
    operands = args[:1] if name in _INDICES else () if name in _MOVES else (args, kwargs)
    if any(isinstance(t, Tensor) and not isinstance(t, Elsewhere) and t.dim() for t in pytree.tree_leaves(operands)):
        raise RuntimeError(f"{name}: expected all tensors on {DEVICE}, but one is on the CPU")


def _held(argument: Any) -> Any:
    if isinstance(argument, Elsewhere):
        return argument.inner
    if isinstance(argument, torch.device) and argument.type == DEVICE:
        return torch.device("cpu")
    return argument


def _factory(name: str) -> Any:
    operator, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, operator), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Tensor:
        CALLS[f"aten.{name}"] += 1
        kept = {n: v for n, v in kwargs.items() if n not in ("device", "pin_memory") and v is not None}
        return Elsewhere(function(*args, **kept))

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy where PyTorch's own functions, such as ``torch.tensor``, pass the tensors by."""
    _held(target).copy_(_held(source))
    return target


def _lstm_cell(x: Tensor, state: Any, ih: Tensor, hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Compute PyTorch's cell without its fused kernel, which GPUs have."""
    gates = nn.functional.linear(x, ih, b_ih) + nn.functional.linear(state[0], hh, b_hh)
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def elsewhere(value: Any) -> Any:
    """Return tensors, alone or in any structure, on the device; leaves of autograd stay leaves."""

    def move(t: Any) -> Any:
        return Elsewhere(t.detach().clone()).requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t

    return pytree.tree_map(move, value)


def back(value: Any) -> Any:
    """Return tensors on the CPU."""
    return pytree.tree_map(lambda t: t.detach().inner if isinstance(t, Elsewhere) else t, value)


def move(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers to the device; float64 becomes float32, as by ``to`` for Apple's."""
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                moved = nn.Parameter(Elsewhere(parameter.detach().clone()), parameter.requires_grad)
                layer._parameters[name] = moved
        for name, buffer in layer._buffers.items():
            layer._buffers[name] = elsewhere(buffer)
    return module


class _Module(_DummyBackendModule):
    """What ``torch.autocast`` asks of the module of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def has(*operators: str) -> torch.library.Library:
    """Say that the device has kernels of PyTorch's ``operators``, until the result is dropped."""
    library = torch.library.Library("aten", "IMPL")
    for name in operators:
        library.impl(name, lambda *args: None, "PrivateUse1")  # never called: tensors of Python come before it
    return library


torch.utils.rename_privateuse1_backend(DEVICE)
_setup_privateuseone_for_python_backend(DEVICE, backend_module=_Module())
_AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_AUTOCAST.fallback(torch.library.fallthrough_kernel)  # as PyTorch has for Intel's GPUs and Apple's
_LIBRARY = torch.library.Library("aten", "IMPL")
for _name in _FACTORIES:
    _LIBRARY.impl(_name, _factory(_name), "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
_LIBRARY.impl("lstm_cell", _lstm_cell, "AutogradPrivateUse1")
