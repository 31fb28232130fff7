"""What PyTorch offers on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's GPU the current one; no effect for tensors of the CPU."""
    return (torch.xpu if tensor.device.type == "xpu" else torch.cuda).device_of(tensor)


def has_float64(device_type: str) -> bool:
    """Return whether float64 is sure to exist on a device: Apple's GPUs and some of Intel's lack it."""
    return device_type in ("cpu", "cuda", "meta")


def has_kernel(operator: str, device_type: str) -> bool:
    """Return whether PyTorch, or a library such as torchvision, has a kernel of ``namespace::operator`` for a device.

    Raises:
        RuntimeError: There is no such operator.
    """
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def has_grid_sample(tensor: Tensor, backward: bool = False) -> bool:
    """Return whether ``grid_sample`` serves on a tensor's device, as its backward does not on Apple's GPUs.

    On CUDA that backward adds in an order that varies, which deterministic mode forbids.
    """
    kind = tensor.device.type
    if backward and kind == "cuda" and torch.are_deterministic_algorithms_enabled():
        return False
    return has_kernel(f"aten::grid_sampler_2d{'_backward' if backward else ''}", kind)
