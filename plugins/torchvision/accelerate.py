"""Acceleration of ``torchvision.ops.DeformConv2d``, with the same parameters, keys and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

from .. import ops
from ..ops.common.arguments import autocast_dtype


def accelerate(model: nn.Module) -> list[str]:
    """Replace the deformable convolutions of a model by this package's operator, in place.

    Layers of the class ``torchvision.ops.DeformConv2d`` are replaced, in any model; derived classes and direct calls of
    ``torchvision.ops.deform_conv2d`` stay. Outputs and gradients equal torchvision's up to rounding, under autocast as
    well. Half precision also runs on CPUs. On devices other than CPUs and CUDA, torchvision's own code runs.
    ``torch.jit.script`` needs the model as it was; ``torch.jit.trace``, ``torch.export`` and ONNX do not.

    Args:
        model: A model, or a module that contains one.

    Returns:
        The names of the replaced modules. Empty if all were replaced before.

    Raises:
        ValueError: ``model`` contains no such layer.
        RuntimeError: A layer has a ``forward`` of its own; nothing is replaced.
    """
    found = {name: layer for name, layer in model.named_modules() if type(layer) is DeformConv2d}
    if not found and not any(isinstance(layer, AcceleratedDeformConv2d) for layer in model.modules()):
        raise ValueError(f"model must contain torchvision.ops.DeformConv2d, but {type(model).__name__} has none")
    for name, layer in found.items():
        if "forward" in vars(layer):
            raise RuntimeError(f"{name} has a forward of its own, not torchvision's; nothing was replaced")
    for layer in found.values():
        layer.__class__ = AcceleratedDeformConv2d
    return list(found)


class AcceleratedDeformConv2d(DeformConv2d):
    """Deformable convolution of torchvision on :func:`attn_plugins.ops.deform_conv2d`."""

    def forward(self, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        device = input.device.type
        if device not in ("cpu", "cuda"):
            return super().forward(input, offset, mask)
        weight, bias, geometry = self.weight, self.bias, (self.stride, self.padding, self.dilation)
        if autocast_dtype(device) is None:
            return ops.deform_conv2d(input, offset, weight, bias, *geometry, mask)
        dtype, terms = input.dtype, (input, offset, weight, bias, mask)
        with torch.autocast(device, enabled=False):  # torchvision computes in float32 there; float64 stays
            cast: Any = [t if t is None or t.dtype == torch.float64 else t.float() for t in terms]
            input, offset, weight, bias, mask = cast
            return ops.deform_conv2d(input, offset, weight, bias, *geometry, mask).to(dtype)
