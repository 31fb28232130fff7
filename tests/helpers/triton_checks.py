"""Triton kernels against an operator's definition: on CUDA where there is a device, else interpreted on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_plugins.ops.common import backends
from attn_plugins.ops.common.operator import Operator
from tests.helpers.operator_checks import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative norms against float64. The interpreter truncates where the device rounds to bfloat16.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")


def results_and_gradients(operator: Operator, terms: Any, options: Any, grad_output: Tensor) -> list[Tensor | None]:
    """The output and all gradients by Triton's backend, called as the dispatcher calls it.

    (``backend("triton")`` would not reach a backward on CUDA, which autograd computes in a thread of its own.)
    """
    needs = [term is not None for term in terms]
    with backends.backend("triton"):
        results = operator._forward(*terms, *options)
        results = results if isinstance(results, tuple) else (results,)
        kept = [results[n] for n in operator._kept]
        grads = operator._backward(grad_output, *terms, *kept, *options, needs)
    return [results[0], *(grad if need else None for grad, need in zip(grads, needs))]


def definition(operator: Operator, terms: Any, options: Any, grad_output: Tensor) -> list[Tensor | None]:
    """The same, in float64, by the definition that autograd differentiates."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in terms]
    output = operator.reference(operator.terms(*leaves), options)
    wanted = [t for t in leaves if t is not None]
    gradients = iter(torch.autograd.grad(output, wanted, grad_output.double()))
    return [output.detach(), *(None if t is None else next(gradients) for t in leaves)]


def check(operator: Operator, terms: Any, options: Any, tolerance: float | None = None) -> None:
    """Assert that Triton gives the definition's output and gradients.

    Args:
        terms: Its terms, on :data:`DEVICE`.
        options: Its options.
        tolerance: Of the relative norms; None for that of the dtype.
    """
    dtype = next(t.dtype for t in terms if t is not None)
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    shape = operator.fake(terms, options)[0].shape
    random = torch.Generator().manual_seed(1)
    grad_output = torch.randn(shape, generator=random, dtype=torch.float64).to(DEVICE, dtype)
    actual = results_and_gradients(operator, terms, options, grad_output)
    expected = definition(operator, terms, options, grad_output)
    for name, ours, theirs in zip(("output", *operator.terms._fields), actual, expected):
        if theirs is None:
            assert ours is None
            continue
        assert ours is not None
        assert ours.shape == theirs.shape, name
        assert ours.dtype == dtype, name
        assert torch.isfinite(ours).all(), name
        if not theirs.any():  # of a single key, where all that is left is the rounding of what cancels
            sizes = [grad_output.norm(), *(t[t.isfinite()].norm() for t in terms if t is not None)]
            assert ours.norm() <= tolerance * float(torch.stack(sizes).double().prod()), name
            continue
        error = relative_error(ours, theirs)
        assert error < tolerance, f"{name}: {error:.2g}"


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers, the same on every device."""
    random = torch.Generator().manual_seed(seed + sum(n * 31**i for i, n in enumerate(shape)) % 2**31)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(DEVICE, dtype)
