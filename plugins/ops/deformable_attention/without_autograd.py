"""Deformable attention outside autograd, for code that calls a compiled extension's functions.

Operands may have several dtypes: DINO, for example, converts values and locations to float32 and leaves the weights in
float16. They are computed in the widest of them, in at least float32; results have the dtypes of their operands.

Locations that are not finite read 0 on CUDA, as in compiled extensions, and NaN on CPUs, where these have no kernels
and projects call ``grid_sample``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import without_autocast
from .deformable_attention import ATTEND, deformable_attention, policy_of_grid_sample, shapes_on_host
from .operands import Options, Terms


@contextlib.contextmanager
def without_autograd(like: Tensor) -> Iterator[None]:
    """Switch off gradients, and autocast on the device of ``like``."""
    with torch.no_grad(), without_autocast(like.device.type):
        yield


def cast(output: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an extension's output in ``dtype``.

    In a function of autograd, torch.compile passes no gradient to a result of ``to`` that is its argument.
    """
    return output if output.dtype == dtype else output.to(dtype)


def attend(value: Tensor, spatial_shapes: Any, sampling_locations: Tensor, attention_weights: Tensor) -> Tensor:
    """Return the output of ``deformable_attention`` in the value's dtype."""
    wide, locations, weights = _together(value, sampling_locations, attention_weights)
    policy = policy_of_grid_sample(value)
    return cast(deformable_attention(wide, spatial_shapes, locations, weights, nan_policy=policy), value.dtype)


def gradients(
    grad_output: Tensor, value: Tensor, spatial_shapes: Any, sampling_locations: Tensor, attention_weights: Tensor
) -> list[Tensor]:
    """Return the gradients of value, locations and weights, with the arguments of ``deformable_attention``."""
    B, Q, M, L, K = attention_weights.shape
    targets = value, sampling_locations, attention_weights
    value, locations, weights = _together(*targets)
    terms = Terms(value, locations.reshape(B, Q, M, L * K, 2), weights.reshape(B, Q, M, L * K))
    sizes: list[Any] = [size for shape in shapes_on_host(spatial_shapes) for size in shape]
    options = Options(sizes, [K] * L, policy_of_grid_sample(value) == "propagate")
    computed = ATTEND.gradients(grad_output.to(value.dtype), terms, options, [True] * 3)
    return [cast(grad, to.dtype).view_as(to) for grad, to in zip(computed, targets) if grad is not None]


def _together(value: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return operands in dtypes that the operator takes together; it names any that is no floating-point Tensor."""
    operands = value, *others
    if not all(isinstance(operand, Tensor) and operand.is_floating_point() for operand in operands):
        return operands
    if all(other.dtype == value.dtype for other in others):
        return operands
    dtype = functools.reduce(torch.promote_types, (operand.dtype for operand in operands), torch.float32)
    if torch.promote_types(value.dtype, torch.float32) != dtype:
        value = value.to(dtype)
    return value, *(other.to(dtype) for other in others)
