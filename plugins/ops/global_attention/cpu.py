"""Call the CPU kernels of global attention (``csrc/global_attention/cpu.cpp``).

Half precision is computed in float32. The kernels read arguments with any strides, and copy keys and values to packed
rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import library
from ...core.arguments import arithmetic_dtype
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed, target
from .operands import Options, Terms


def _operands(terms: Terms, shape: torch.Size, dtype: torch.dtype) -> list[Tensor | None]:
    """Return the terms as the kernels take them: logits expanded, all in the dtype of the arithmetic."""
    content = [term if term is None or term.dtype == dtype else term.to(dtype) for term in terms[:3]]
    return [*content, *terms.logits(shape, dtype)]


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    value = terms.value
    dtype = arithmetic_dtype(value.dtype)
    output, lse = empty_results(value, *terms.grid(), dtype=dtype)
    torch.ops.attn_plugins.global_attention_forward_(*_operands(terms, lse.shape, dtype), output, lse, options.scale)
    return output if value.dtype == dtype else output.to(value.dtype), lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    dtype, keys = lse.dtype, terms.value.shape[:4]

    def writable(grad: Tensor) -> bool:  # in memory that the kernels write to: of key logits, contiguous
        return grad.dtype == dtype and (grad.stride(-1) == 1 if grad.dim() == 5 else grad.is_contiguous())

    grads: Gradients = {
        name: target(
            term, (*(keys if name in ("key", "value", "key_logits") else lse.shape), *term.shape[4:]), dtype, writable
        )
        for name, term in needed(terms, needs)
    }
    torch.ops.attn_plugins.global_attention_backward_(
        grad_output.to(dtype), *_operands(terms, lse.shape, dtype), lse, *map(grads.get, terms._fields), options.scale
    )
    return like_terms(terms, grads)


BACKEND = Backend("cpu", library.refuses_other_devices, forward, backward)
