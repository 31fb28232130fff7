"""Calls the CUDA kernels of window attention (``csrc/window/cuda.cuh``).

They take float16, bfloat16 and float32 in any strides whose last axis is contiguous, and compute in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .geometry import Geometry, Terms

WIDEST_HEAD = 512  # channels that a team of 32 lanes holds


def forward_kernels(*arguments: Any) -> None:
    torch.ops.attn_plugins.window_attention_forward_(*arguments)


def backward_kernels(*arguments: Any) -> None:
    torch.ops.attn_plugins.window_attention_gather_backward_(*arguments)


def serves(terms: Terms) -> bool:
    """True where the kernels take these terms: not float64, and no head that is too wide."""
    query, _, value, _ = terms
    widths = (value.shape[-1], 0 if query is None else query.shape[-1])
    return value.dtype != torch.float64 and max(widths) <= WIDEST_HEAD


def _rows(tensor: Tensor | None) -> Tensor | None:
    """With contiguous channels."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def _operands(terms: Terms) -> list[Tensor | None]:
    query, key, value, position_logits = terms
    if position_logits is not None:
        position_logits = position_logits.expand(*value.shape[:2], -1, -1, -1)
    return [_rows(query), _rows(key), _rows(value), position_logits]


def forward(terms: Terms, geometry: Geometry, scale: float, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    forward_kernels(*_operands(terms), output, lse, geometry.numbers(), geometry.zero_border, scale)


def backward(
    grad_output: Tensor,
    terms: Terms,
    geometry: Geometry,
    output: Tensor,
    lse: Tensor,
    scale: float,
    grads: Sequence[Tensor | None],
) -> None:
    """Fill the wanted gradients (those not None) of query, key, value and position logits."""
    value = terms[2]

    def full(grad: Tensor | None, any_strides: bool) -> Tensor | None:
        """Where the kernel writes: the gradient itself unless it broadcasts or its channels are strided."""
        if grad is None:
            return None
        shape = (*value.shape[:2], *grad.shape[2:])
        fits = grad.shape == shape and (any_strides or grad.stride(-1) == 1 or grad.shape[-1] == 1)
        return grad if fits else grad.new_empty(shape)

    written = [full(grad, any_strides=n == 3) for n, grad in enumerate(grads)]
    backward_kernels(
        _rows(grad_output), *_operands(terms), _rows(output), lse.contiguous(), *written,
        geometry.numbers(), geometry.zero_border, scale,
    )  # fmt: skip
    for grad, result in zip(grads, written):
        if grad is not None and result is not None and grad is not result:
            grad.copy_(result.sum_to_size(grad.shape))
