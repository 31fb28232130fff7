"""Sequence attention by PyTorch's SDPA, in half precision, where it is faster than our kernels.

On CPUs with AMX it serves content in bfloat16, alone or with position logits, which become SDPA's mask; on CUDA, where
it is flash attention, content alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core import flash, library
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms
from .operands import Options, Terms

# Keys below which our CPU kernels are faster: 2.0 against 3.1 ms forward for Swin's windows of 49, and backward 15
# against 22 ms for 256 keys and 9 against 9 for 512, where for 1024 it is 34 against 30.
SHORT = 64
SHORT_BACKWARD = 1024


@cache
def multiplies_tiles() -> bool:
    """Return whether this CPU has AMX and torch may use it."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)  # torch has no public name for it
    return bool(supported is not None and supported())


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why SDPA cannot compute this on the device of the terms, or None."""
    value = terms.value
    if value.is_cuda:
        return _cannot_on_cuda(terms, options)
    if value.device.type != "cpu" or value.dtype != torch.bfloat16:
        return "it supports only bfloat16 on CPUs"
    if not multiplies_tiles():
        return "this CPU has no AMX for bfloat16"
    return _cannot_take(terms, options)


def cannot_backward(terms: Terms, options: Options) -> str | None:
    """Return the reason why SDPA cannot compute the gradients, or None."""
    if terms.value.is_cuda:
        return library.refuses_determinism(terms, options)
    if terms.position_logits is not None:
        return "its backward gives no gradients of position logits"
    return None


def prefers_not(terms: Terms, options: Options) -> str | None:
    """Leave few keys on CPUs to our kernels."""
    return _few_keys(terms.value, SHORT)


def prefers_not_backward(terms: Terms, options: Options) -> str | None:
    """Leave the gradients of more of them to our kernels."""
    return _few_keys(terms.value, SHORT_BACKWARD)


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    return (_forward_cuda if terms.value.is_cuda else _forward_cpu)(terms, options)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor | None, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients of query, key and value that are needed."""
    compute = _backward_cuda if terms.value.is_cuda else _backward_cpu
    grads = zip(terms._fields, compute(grad_output, terms, options, output, lse))
    return like_terms(terms, {name: grad for name, grad in grads if needs[name]})


BACKEND = Backend("sdpa", cannot, forward, backward, cannot_backward, prefers_not, prefers_not_backward)


def _cannot_take(terms: Terms, options: Options) -> str | None:
    query, _, value, band, *_ = terms
    if query is None or band is not None:
        return "it supports content and position logits only"
    if options.causal or options.key_padding_mask is not None or options.segment_ids is not None:
        return "it supports neither key_padding_mask nor segment_ids nor causal"
    if query.shape[3] != value.shape[3] or 0 in query.shape:
        return f"it needs equal query and value widths (got {query.shape[3]} and {value.shape[3]}) and no empty axis"
    return None


def _heads_innermost(output: Tensor) -> Tensor:
    """Return ``output`` stored as (B, T, M, dv); SDPA stores it as the query is stored."""
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _rows(*tensors: Tensor | None) -> list[Any]:
    """Return tensors whose last axis is contiguous: PyTorch's kernels for AMX read others as if it were."""
    return [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in tensors]


# --- CPUs with AMX --------------------------------------------------------------------------------------------------


def _few_keys(value: Tensor, limit: int) -> str | None:
    if value.device.type != "cpu" or (S := value.shape[2]) >= limit:
        return None
    return f"below {limit} keys our kernels are faster, and there are {S}"


def _forward_cpu(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    query, key, value, position = _rows(*terms[:3], terms.position_logits)
    mask = None if position is None else position.expand(*query.shape[:3], value.shape[2])
    output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=options.scale
    )
    lse = total.contiguous()
    if mask is not None:
        rows = (lse == 0).nonzero(as_tuple=True)  # fully masked queries have this sum and the output 0, others may
        masked = mask[rows].isneginf().all(-1)
        lse[rows] = lse[rows].masked_fill(masked, float("inf"))
    return _heads_innermost(output), lse


def _backward_cpu(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor | None, lse: Tensor
) -> Sequence[Tensor]:
    if output is None:  # another backend was to compute this backward pass
        output, _ = _forward_cpu(terms, options)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_rows(grad_output, *terms[:3], output), lse, 0.0, False, scale=options.scale
    )


# --- flash attention on CUDA ----------------------------------------------------------------------------------------


def _cannot_on_cuda(terms: Terms, options: Options) -> str | None:
    if reason := _cannot_take(terms, options):
        return reason
    if terms.position_logits is not None:
        return "it supports content only"
    assert terms.query is not None
    return flash.refusal(terms.query, terms.value, options.scale)


def _forward_cuda(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    output, lse = flash.forward(terms.query, terms.key, terms.value, options.scale)  # type: ignore[arg-type]
    return _heads_innermost(output), lse.contiguous()


def _backward_cuda(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor | None, lse: Tensor
) -> Sequence[Tensor]:
    return flash.backward(grad_output, *terms[:3], output, lse, options.scale)  # type: ignore[arg-type]
