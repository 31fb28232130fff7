"""Choices that were made by measurement on a device, such as the sizes of a kernel's blocks.

``tuned.json`` beside this file maps a compute capability (``"9.0"``) to names, and a name to the value that takes the
place of the kernel's default there. ``python -m tools.bench gpu`` measures candidates and writes it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
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


@contextlib.contextmanager
def trying(name: str, value: Any) -> Iterator[None]:
    """Let :func:`tuned` return ``value`` for ``name``, on any device."""
    before = _tried.get(name)
    _tried[name] = value
    try:
        yield
    finally:
        _tried[name] = before


@cache
def _measured(index: int) -> dict[str, Any]:
    capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
    return json.loads(FILE.read_text(encoding="utf-8")).get(capability, {})
