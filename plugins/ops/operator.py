"""What the attention operators share around their kernels: definition for torch, autocast, second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .arguments import autocast_dtype

_HAS_CUSTOM_OPERATORS = hasattr(torch.library, "custom_op")  # torch >= 2.4
Result = TypeVar("Result")


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    differentiate: Callable[..., tuple],
    setup_context: Callable[..., None],
    flops: Callable[..., int],
) -> None:
    """Define operator ``attn_plugins::name``: for all devices, with shapes, gradient and operation count."""
    if not _HAS_CUSTOM_OPERATORS:
        return
    from torch.utils.flop_counter import register_flop_formula

    operator = torch.library.custom_op(f"attn_plugins::{name}", kernel, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.register_autograd(differentiate, setup_context=setup_context)
    register_flop_formula(getattr(torch.ops.attn_plugins, name))(flops)


def by_reference() -> bool:
    """Whether references stand for operators: an older torch has none, and ONNX knows none of ours."""
    return not _HAS_CUSTOM_OPERATORS or torch.onnx.is_in_onnx_export()


def under_autocast(function: Callable[..., Result], terms: Sequence[Tensor | None], device_type: str) -> Result:
    """``function(*terms)``; where autocast is on, of terms in its dtype (but for float64) and with it off."""
    dtype = autocast_dtype(device_type)
    if dtype is None:
        return function(*terms)
    with torch.autocast(device_type, enabled=False):
        return function(*(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in terms))


def differentiate_twice(
    reference: Callable[..., Tensor],
    saved: Sequence[Tensor | None],
    needs: Sequence[bool],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradient of an operator's backward: the reference is differentiated twice.

    What the forward kept besides its terms (log-sum-exp, weights, output) are functions of the terms, no variables.

    Args:
        reference: The operator's definition, of the terms alone.
        saved: grad_output, then the terms.
        needs: Which terms the backward gave gradients of.
        wanted: Of which of ``saved`` a gradient is wanted.
        grads: Of the backward's results.

    Returns:
        As many as ``saved``; None where not wanted.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        grad_output, *terms = (
            t if t is None or (create_graph and t.requires_grad) else t.detach().requires_grad_() for t in saved
        )
        output = reference(*terms)
        chosen = [(t, g) for t, g, need in zip(terms, grads, needs) if t is not None and need and g is not None]
        first = torch.autograd.grad(output, [t for t, _ in chosen], grad_output, create_graph=True)
        second = torch.autograd.grad(
            first,
            [t for t, want in zip((grad_output, *terms), wanted) if want and t is not None],
            [g for _, g in chosen],
            create_graph=create_graph,
            allow_unused=True,
        )
    found = iter(second)
    return [next(found) if want else None for want in wanted]
