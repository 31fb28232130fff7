"""Deformable attention's gradients outside autograd, for code that calls a compiled extension's functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .deformable_attention import ATTEND, shapes_on_host
from .operands import Options, Terms


@contextlib.contextmanager
def without_autograd(like: Tensor) -> Iterator[None]:
    """Switch off gradients, and autocast on the device of ``like``."""
    kind = like.device.type
    casts = torch.autocast(kind, enabled=False) if kind in ("cpu", "cuda") else contextlib.nullcontext()
    with torch.no_grad(), casts:
        yield


def gradients(
    grad_output: Tensor, value: Tensor, spatial_shapes: Any, sampling_locations: Tensor, attention_weights: Tensor
) -> list[Tensor]:
    """Return the gradients of value, locations and weights, with the arguments of ``deformable_attention``."""
    B, Q, M, L, K = attention_weights.shape
    locations = sampling_locations.reshape(B, Q, M, L * K, 2)
    terms = Terms(value, locations, attention_weights.reshape(B, Q, M, L * K))
    sizes: list[Any] = [size for shape in shapes_on_host(spatial_shapes) for size in shape]
    computed = ATTEND.gradients(grad_output, terms, Options(sizes, [K] * L), [True] * 3)
    targets = value, sampling_locations, attention_weights
    return [grad.view_as(target) for grad, target in zip(computed, targets) if grad is not None]
