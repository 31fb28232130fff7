"""Calls the CPU kernels of window attention (``csrc/window/cpu.cpp``), which read and write any strides.

Half precision is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import library
from ..backends import Backend
from .operands import Options, Terms

_REACH = 1 << 14  # keys, beyond eight times a row


def _operands(terms: Terms, dtype: torch.dtype) -> list[Tensor | None]:
    query, key, value, position_logits = terms
    if position_logits is not None:
        position_logits = position_logits.to(dtype).expand(*value.shape[:2], -1, -1, -1)
    return [None if query is None else query.to(dtype), None if key is None else key.to(dtype), value.to(dtype),
            position_logits]  # fmt: skip


def refuses(terms: Terms, options: Options) -> str | None:
    """Rows are packed with their windows' reach, which is nothing but memory where it is far beyond the map."""
    if reason := library.refusal(terms.value.device.type, "cpu"):
        return reason
    queries = terms.position_logits if terms.query is None else terms.query
    assert queries is not None
    keys, stride = terms.value.shape[3], options.stride[1]
    reach = (options.kernel_size[1] - 1) * options.dilation[1] + options.padding[1] + stride * queries.shape[3]
    if reach > 8 * keys + _REACH:
        return f"its windows reach {reach} keys along a row of {keys}"
    return None


def forward(terms: Terms, options: Options, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    target = output if output.dtype == lse.dtype else torch.empty_like(output, dtype=lse.dtype)
    torch.ops.attn_plugins.window_attention_forward_(
        *_operands(terms, lse.dtype), target, lse, options.numbers(), options.zero_border, options.scale
    )
    if target is not output:
        output.copy_(target)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, grads: Sequence[Tensor | None]
) -> None:
    """Fill the wanted gradients (those not None) of query, key, value and position logits."""
    value, dtype = terms[2], lse.dtype

    def full(grad: Tensor | None) -> Tensor | None:
        """Where the kernel writes: the gradient itself unless it is of another dtype or broadcasts."""
        if grad is None:
            return None
        shape = (*value.shape[:2], *grad.shape[2:])
        return grad if grad.shape == shape and grad.dtype == dtype else value.new_empty(shape, dtype=dtype)

    written = [full(grad) for grad in grads]
    geometry = (options.numbers(), options.zero_border, options.scale)
    torch.ops.attn_plugins.window_attention_backward_(
        grad_output.to(dtype), *_operands(terms, dtype), lse, *written, *geometry
    )
    for grad, result in zip(grads, written):
        if grad is not None and result is not None and grad is not result:
            grad.copy_(result.sum_to_size(grad.shape))


BACKEND = Backend("cpu", refuses, forward, backward)
