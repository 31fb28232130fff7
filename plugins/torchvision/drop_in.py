"""Drop-in replacement of torchvision's deformable convolution on CPUs, for all models of the process.

::

    import attn_plugins.torchvision.drop_in

replaces the CPU kernels of the dispatcher's operator ``torchvision::deform_conv2d``, forward and backward. So the
function ``torchvision.ops.deform_conv2d`` is served wherever it was imported, before or after, and so is the layer
``DeformConv2d``. autograd, autocast, ``torch.compile``, exporters and counters see torchvision's operator as before. On
other devices torchvision's kernels stay. :func:`restore` takes the replacement back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchvision  # noqa: F401  it defines the operators
from torch import Tensor

from ..core import library
from ..ops import backend, deform_conv2d
from ..ops.deform_conv.deform_conv import CONVOLVE
from ..ops.deform_conv.operands import Options, Terms

_lock = threading.Lock()
_kernels: torch.library.Library | None = None


def replace() -> bool:
    """Replace the kernels; a repeated call has no effect.

    Returns:
        Whether this package's kernels serve now: torchvision's stay where ours are not compiled.
    """
    global _kernels
    with _lock:
        if _kernels is None and library.failures()["cpu"] is None:
            _kernels = library.override(
                "torchvision", {"deform_conv2d": _forward, "_deform_conv2d_backward": _backward}
            )
        return _kernels is not None


def restore() -> None:
    """Take :func:`replace` back."""
    global _kernels
    with _lock:
        if _kernels is not None:
            _kernels._destroy()
            _kernels = None


@contextmanager
def _by_our_kernels() -> Iterator[None]:
    """Compute by the C++ kernels, once torchvision's rule for autocast has been applied.

    Our table of backends ends in torchvision's operator, which would call this file again.
    """
    with torch.autocast("cpu", enabled=False), backend("cpu"):
        yield


def _read(
    input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, *numbers: int
) -> tuple[Terms, Options]:
    """Return our operands from torchvision's: the geometry, the numbers of groups, and whether there is a mask."""
    *geometry, groups, offset_groups, use_mask = numbers
    terms = Terms(input, offset, weight, bias, mask if use_mask else None)
    return terms, Options(geometry[:2], geometry[2:4], geometry[4:], groups, offset_groups)


def _forward(*args: Any) -> Tensor:
    terms, (stride, padding, dilation, *_) = _read(*args)
    with _by_our_kernels():
        return deform_conv2d(*terms[:4], stride, padding, dilation, terms.mask)


def _backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients in torchvision's order: input, weight, offset, mask, bias."""
    terms, options = _read(*args)
    with _by_our_kernels():
        grads = CONVOLVE.gradients(grad, terms, options, [True] * 4 + [terms.mask is not None])
    of_input, of_offset, of_weight, of_bias, of_mask = grads
    return of_input, of_weight, of_offset, torch.zeros_like(args[3]) if of_mask is None else of_mask, of_bias  # type: ignore[return-value]


replace()
