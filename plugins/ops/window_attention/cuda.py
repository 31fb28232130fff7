"""Call the CUDA kernels of window attention (``csrc/window_attention/cuda.cuh``).

They read float16, bfloat16 and float32 and compute in float32. Fast kernels take windows of stride 1 whose channels are
contiguous; a general kernel takes every stride, dilation and size, and windows that stay inside the map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common import library
from ..common.backends import Backend, Gradients
from ..common.strides import has_rows, with_rows
from .operands import Options, Terms

WIDEST_HEAD = 512  # channels that fit the registers of a team of 32 lanes


def forward_kernels(*arguments: Any) -> None:
    torch.ops.attn_plugins.window_attention_forward_(*arguments)


def backward_kernels(*arguments: Any) -> None:
    torch.ops.attn_plugins.window_attention_gather_backward_(*arguments)


def refuses(terms: Terms, options: Options) -> str | None:
    """Return the reason why the kernels cannot compute these terms, or None."""
    query, _, value, _ = terms
    if value.dtype == torch.float64:
        return "its kernels compute in float32, but the tensors are float64"
    width = max(value.shape[-1], 0 if query is None else query.shape[-1])
    if width > WIDEST_HEAD:
        return f"its kernels take heads of up to {WIDEST_HEAD} channels, got {width}"
    return library.refusal(value.device, "cuda")


def _operands(terms: Terms) -> list[Tensor | None]:
    query, key, value, position_logits = terms
    if position_logits is not None and position_logits.shape[:2] != value.shape[:2]:
        position_logits = position_logits.expand(*value.shape[:2], -1, -1, -1)
    return [with_rows(query), with_rows(key), with_rows(value), position_logits]


def forward(terms: Terms, options: Options, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    forward_kernels(*_operands(terms), output, lse, options.numbers(), options.border, options.scale)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, grads: Gradients
) -> Gradients:
    """Fill or return the gradients that are not None."""
    value = terms[2]

    def full(grad: Tensor | None, any_strides: bool) -> Tensor | None:
        """Return the tensor that the kernel writes: the gradient unless it broadcasts or its channels are strided."""
        if grad is None:
            return None
        shape = (*value.shape[:2], *grad.shape[2:])
        fits = grad.shape == shape and (any_strides or has_rows(grad))
        return grad if fits else grad.new_empty(shape)

    written = {name: full(grad, any_strides=name == "position_logits") for name, grad in grads.items()}
    backward_kernels(
        with_rows(grad_output), *_operands(terms), with_rows(output), lse.contiguous(), *written.values(),
        options.numbers(), options.border, options.scale,
    )  # fmt: skip
    return written


BACKEND = Backend("cuda", refuses, forward, backward)
