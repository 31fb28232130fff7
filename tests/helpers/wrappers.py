"""What users put around a layer: adapters that hold it, in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def exchanged(module: nn.Module, name: str, part: nn.Module) -> Iterator[None]:
    parent, _, key = name.rpartition(".")
    owner = module.get_submodule(parent)
    stock = getattr(owner, key)
    setattr(owner, key, part)
    try:
        yield
    finally:
        setattr(owner, key, stock)


def increased(output: Any) -> Any:
    return (1.5 * output[0], *output[1:]) if isinstance(output, tuple) else 1.5 * output


class Wrapped(nn.Module):
    """What LoRA's wrappers look like: the layer inside, something added, no ``weight``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return increased(self.inner(*args, **options))


class Rotated(nn.Module):
    """What PEFT's OFT looks like: it rotates pairs of each token's channels, and takes no maps (B, H, W, C)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("inner", "_modules") else getattr(self.inner, name)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        assert x.dim() < 4
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return self.inner(torch.stack((0.6 * first - 0.8 * second, 0.8 * first + 0.6 * second), -1).flatten(-2))
