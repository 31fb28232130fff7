"""Call the CPU kernels of window attention (``csrc/window_attention/cpu.cpp``), which read and write any strides.

The kernels compute in float32 and read and write bfloat16; float16 is converted here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import library
from ..common.backends import Backend, Gradients
from .operands import Options, Terms

_REACH = 1 << 14  # keys that the windows of a row may cover beyond eight times its length


def _stored(value: Tensor, computed: torch.dtype) -> torch.dtype:
    """Return the dtype of the kernels' operands."""
    return value.dtype if value.dtype == torch.bfloat16 else computed


def _operands(terms: Terms, dtype: torch.dtype) -> list[Tensor | None]:
    query, key, value, position_logits = [t if t is None or t.dtype == dtype else t.to(dtype) for t in terms]
    assert value is not None
    if position_logits is not None and position_logits.shape[:2] != value.shape[:2]:
        position_logits = position_logits.expand(*value.shape[:2], -1, -1, -1)
    return [query, key, value, position_logits]


def refuses(terms: Terms, options: Options) -> str | None:
    """Refuse windows far larger than the map: packed rows are as long as their windows reach."""
    if reason := library.refusal(terms.value.device, "cpu"):
        return reason
    leader = terms.position_logits if terms.query is None else terms.query
    assert leader is not None
    keys, queries = terms.value.shape[3], leader.shape[3]
    reach = (options.kernel_size[1] - 1) * options.dilation[1] + options.padding[1] + options.stride[1] * queries
    if reach > 8 * keys + _REACH:
        return f"its windows reach {reach} keys along a row of {keys}"
    return None


def forward(terms: Terms, options: Options, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    stored = _stored(terms.value, lse.dtype)
    target = output if output.dtype == stored else torch.empty_like(output, dtype=stored)
    torch.ops.attn_plugins.window_attention_forward_(
        *_operands(terms, stored), target, lse, options.numbers(), options.border, options.scale
    )
    if target is not output:
        output.copy_(target)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, grads: Gradients
) -> Gradients:
    """Fill or return the gradients that are not None."""
    value = terms.value
    stored = _stored(value, lse.dtype)

    def full(grad: Tensor | None) -> Tensor | None:
        """Return the tensor that the kernel writes: the gradient itself unless its dtype differs or it broadcasts."""
        if grad is None:
            return None
        shape = (*value.shape[:2], *grad.shape[2:])
        return grad if grad.shape == shape and grad.dtype == stored else value.new_empty(shape, dtype=lse.dtype)

    written = {name: full(grad) for name, grad in grads.items()}
    geometry = (options.numbers(), options.border, options.scale)
    torch.ops.attn_plugins.window_attention_backward_(
        grad_output.to(stored), *_operands(terms, stored), lse, *written.values(), *geometry
    )
    return written


BACKEND = Backend("cpu", refuses, forward, backward)
