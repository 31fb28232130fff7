"""Checks of the memory format of layers' outputs."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def has_format(x: Tensor, name: str) -> bool:
    """Return True if ``x`` has this memory format and not the other one as well."""
    return all(x.is_contiguous(memory_format=FORMATS[other]) == (other == name) for other in FORMATS)


def check_memory_format(layer: nn.Module, shape: tuple[int, ...], autocast: bool) -> None:
    """Check that output and gradient have the input's memory format, and that it does not change the results."""
    torch.manual_seed(0)
    for parameter in layer.parameters():  # a residual factor of 0 would hide what is added
        if parameter.numel() == 1:
            nn.init.constant_(parameter, 0.5)
    results = {}
    original = torch.randn(shape)
    for name, memory_format in FORMATS.items():
        x = original.contiguous(memory_format=memory_format).requires_grad_()
        assert has_format(x, name)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            output = layer(x)
        assert has_format(output, name), f"{name} in, strides {output.stride()} of {tuple(output.shape)} out"
        (grad,) = torch.autograd.grad(output.float().square().sum(), x)
        assert has_format(grad, name), f"{name} in, strides {grad.stride()} of the gradient {tuple(grad.shape)}"
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            assert has_format(layer(x), name)
        results[name] = output.float(), grad
    for a, b in zip(*results.values()):
        tolerance = (0.1 if autocast else 1e-4) * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
