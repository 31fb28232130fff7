"""Call the CUDA kernels of window attention (``csrc/window_attention/cuda.cuh``).

They read float16, bfloat16 and float32 and compute in float32. Fast kernels take windows of stride 1 whose channels are
contiguous; a general kernel takes every stride, dilation and size, and windows that stay inside the map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import library
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed, target
from ...core.strides import has_rows, with_rows
from .operands import Options, Terms

WIDEST_HEAD = 512  # channels that fit the registers of a team of 32 lanes


def forward_kernels(*arguments: Any) -> None:
    torch.ops.attn_plugins.window_attention_forward_(*arguments)


def backward_kernels(*arguments: Any) -> None:
    torch.ops.attn_plugins.window_attention_gather_backward_(*arguments)


def cannot(terms: Terms, options: Options) -> str | None:
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


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    output, lse = empty_results(terms.value, *terms.grid())
    forward_kernels(*_operands(terms), output, lse, options.numbers(), options.border, options.scale)
    return output, lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    grads: Gradients = {
        name: target(
            term, (*lse.shape[:2], *term.shape[2:]), term.dtype, None if name == "position_logits" else has_rows
        )
        for name, term in needed(terms, needs)
    }
    backward_kernels(
        with_rows(grad_output), *_operands(terms), with_rows(output), lse.contiguous(),
        *map(grads.get, terms._fields), options.numbers(), options.border, options.scale,
    )  # fmt: skip
    return like_terms(terms, grads)


BACKEND = Backend("cuda", cannot, forward, backward)
