"""Helpers of the tests on a CUDA device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# For whole modules and networks: rounding accumulates over layers, and offsets decide where samples are read.
MODULE_TOLERANCES = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 0.2}


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """Disable TF32 in the libraries' products and convolutions; it is the default of convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def moved(values: Any, device: str, dtype: torch.dtype) -> Any:
    """Copy nested arguments: floating tensors become leaves of ``dtype`` with gradients, others stay as they are."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return value.detach().to(device, dtype, copy=True).requires_grad_()
        return value.to(device)

    return pytree.tree_map(move, values)


def floating(values: Any) -> list[Tensor]:
    """Return the floating-point tensors of nested values."""
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]


def results(
    module: nn.Module, args: Any, kwargs: Any, autocast: torch.dtype | None = None, compiled: Any = None
) -> dict[str, Tensor]:
    """Return a module's outputs, and the gradients of inputs and parameters for fixed gradients of the outputs."""
    leaves = {f"input {n}": t for n, t in enumerate(floating((args, kwargs)))} | dict(module.named_parameters())
    device, run = next(iter(leaves.values())).device.type, module if compiled is None else compiled(module)
    with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
        outputs = [t for t in floating(run(*args, **kwargs)) if t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True)
    given = {f"gradient of {name}": t for name, t in zip(leaves, gradients) if t is not None}
    return {f"output {n}": t.detach() for n, t in enumerate(outputs)} | given


def check_module(
    module: nn.Module,
    call: tuple[Any, Any],
    device: str,
    dtype: torch.dtype,
    *,
    autocast: torch.dtype | None = None,
    factor: float = 1.0,
    compiled: Any = None,
) -> None:
    """Compare a module on ``device`` with the same module on the CPU in float64.

    Args:
        module: Module in float32 on the CPU, not modified. All of its weights should have an effect.
        call: Arguments of the module, in float32 on the CPU, not modified.
        device: Device of the check.
        dtype: Dtype of weights and inputs on the device.
        autocast: Dtype of autocast, if used; weights and inputs should then be float32.
        factor: Factor on the tolerance.
        compiled: Returns the callable to use in place of the module.
    """
    there = copy.deepcopy(module).to(device, dtype).eval()
    args, kwargs = moved(call, device, dtype)
    exact_module = copy.deepcopy(there).cpu().double()
    expected = results(exact_module, *moved((args, kwargs), "cpu", torch.float64))
    actual = results(there, args, kwargs, autocast, compiled)
    tolerance = factor * MODULE_TOLERANCES[autocast or dtype]
    # A gradient that is 0 up to rounding, as of key biases, is measured on the scale of the largest one.
    least = 0.02 * max(t.double().norm().item() / t.numel() ** 0.5 for t in expected.values())
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        result = actual[name].cpu().double()
        assert result.isfinite().all(), name
        if name.startswith("gradient"):
            assert actual[name].dtype == dtype, name
        error = (result - wanted).norm().item() / max(wanted.norm().item(), least * wanted.numel() ** 0.5)
        assert error < tolerance, f"{name}: relative error {error:.2g}, allowed {tolerance:.2g}"


def randomized(module: nn.Module, std: float = 0.3) -> nn.Module:
    """Draw every parameter at random, so that none is zero or an identity. Normalization scales stay near 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in module.modules():
            normalizes = isinstance(part, (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm))
            for name, parameter in part.named_parameters(recurse=False):
                drawn = torch.randn(parameter.shape, generator=generator) * (0.1 if normalizes else std)
                parameter.copy_(drawn + (normalizes and name == "weight"))
    return module
