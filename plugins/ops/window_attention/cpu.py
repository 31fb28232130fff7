"""Call the CPU kernels of window attention (``csrc/window_attention/cpu.cpp``), which read and write any strides.

The kernels compute in float32 and read and write bfloat16; float16 is converted here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import library
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed, target
from .operands import Options, Terms

_REACH = 1 << 14  # keys that the windows of a row may cover beyond eight times its length


def _stored(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the kernels' operands."""
    return torch.float32 if dtype == torch.float16 else dtype


def _operands(terms: Terms, dtype: torch.dtype) -> list[Tensor | None]:
    query, key, value, position_logits = [t if t is None or t.dtype == dtype else t.to(dtype) for t in terms]
    assert value is not None
    if position_logits is not None and position_logits.shape[:2] != value.shape[:2]:
        position_logits = position_logits.expand(*value.shape[:2], -1, -1, -1)
    return [query, key, value, position_logits]


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why the kernels do not compute: packed rows are as long as their windows reach."""
    if reason := library.refusal(terms.value.device, "cpu"):
        return reason
    leader = terms.position_logits if terms.query is None else terms.query
    assert leader is not None
    keys, queries = terms.value.shape[3], leader.shape[3]
    reach = (options.kernel_size[1] - 1) * options.dilation[1] + options.padding[1] + options.stride[1] * queries
    if reach > 8 * keys + _REACH:
        return f"its windows reach {reach} keys along a row of {keys}"
    return None


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    dtype = terms.value.dtype
    stored = _stored(dtype)
    output, lse = empty_results(terms.value, *terms.grid(), dtype=stored)
    torch.ops.attn_plugins.window_attention_forward_(
        *_operands(terms, stored), output, lse, options.numbers(), options.border, options.scale
    )
    return output if stored == dtype else output.to(dtype), lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    stored = _stored(terms.value.dtype)
    grads: Gradients = {
        name: target(term, (*lse.shape[:2], *term.shape[2:]), lse.dtype, lambda grad: grad.dtype == stored)
        for name, term in needed(terms, needs)
    }
    torch.ops.attn_plugins.window_attention_backward_(
        grad_output.to(stored), *_operands(terms, stored), lse, *map(grads.get, terms._fields),
        options.numbers(), options.border, options.scale,
    )  # fmt: skip
    return like_terms(terms, grads)


BACKEND = Backend("cpu", cannot, forward, backward)
