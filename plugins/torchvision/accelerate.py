"""``torchvision.ops.DeformConv2d`` and the windows of torchvision's Swin on this package's operators, in any model.

Derived classes and direct calls of ``torchvision.ops.deform_conv2d`` stay; the drop-in serves these on CPUs. Outputs
and gradients equal torchvision's up to rounding, under autocast as well. Half precision also runs on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..core.arguments import autocast_dtype
from ..replacement import Place, accelerate
from . import swin

__all__ = ["accelerate"]


def deform_conv2d(
    stock: Callable[..., Tensor], layer: Any, input: Tensor, offset: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Compute ``DeformConv2d.forward`` by :func:`attn_plugins.ops.deform_conv2d`."""
    weight, bias, geometry = layer.weight, layer.bias, (layer.stride, layer.padding, layer.dilation)
    device = input.device.type
    if autocast_dtype(device) is None:
        return ops.deform_conv2d(input, offset, weight, bias, *geometry, mask)
    dtype, terms = input.dtype, (input, offset, weight, bias, mask)
    with torch.autocast(device, enabled=False):  # torchvision computes in float32 there; float64 stays
        cast: Any = [t if t is None or t.dtype == torch.float64 else t.float() for t in terms]
        input, offset, weight, bias, mask = cast
        return ops.deform_conv2d(input, offset, weight, bias, *geometry, mask).to(dtype)


PLACES = (Place("torchvision.ops.deform_conv", "DeformConv2d", deform_conv2d, exports=True), *swin.PLACES)
_BY_CLASS = {(place.module, place.layer): place for place in PLACES}


def place_of(layer: type) -> Place | None:
    """Return the place of a class of torchvision, or None."""
    return _BY_CLASS.get((layer.__module__, layer.__name__))
