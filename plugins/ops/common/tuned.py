"""Choices that were made by measurement on a device, such as the sizes of a kernel's blocks.

``tuned.json`` beside this file maps a compute capability (``"9.0"``) to names, and a name to the value that takes the
place of the kernel's default there. ``python -m tools.bench gpu`` measures candidates and writes it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

FILE = Path(__file__).with_suffix(".json")
Value = TypeVar("Value")
_tried: dict[str, Any] = {}


def tuned(name: str, device: torch.device, default: Value) -> Value:
    """Return the value of ``name`` that was measured as best on the device's capability, or ``default``.

    It has the type of ``default``: a number, a string or a (named) tuple.
    """
    value = _tried.get(name)
    if value is None and device.type == "cuda":
        value = _measured(device.index or 0).get(name)
    if value is None:
        return default
    kind: Any = type(default)
    return getattr(kind, "_make", kind)(value)


def tuned_parts(
    name: str, device: torch.device, parts: Iterable[str], defaults: tuple[Value, ...]
) -> tuple[Value, ...]:
    """Return :func:`tuned` of ``NAME/PART`` for each part, or ``defaults`` at once where nothing was measured."""
    if not (_tried or (device.type == "cuda" and _measured(device.index or 0))):
        return defaults
    return tuple(tuned(f"{name}/{part}", device, default) for part, default in zip(parts, defaults))


@contextlib.contextmanager
def trying(name: str, value: Any) -> Iterator[None]:
    """Let :func:`tuned` return ``value`` for ``name``, on any device."""
    before = dict(_tried)
    _tried[name] = value
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(before)


def tries() -> bool:
    """Return True within :func:`trying`."""
    return bool(_tried)


@cache
def _measured(index: int) -> dict[str, Any]:
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    return json.loads(FILE.read_text(encoding="utf-8")).get(capability, {})
