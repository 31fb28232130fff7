"""Sequence attention by PyTorch's SDPA: halves on CPUs that multiply tiles of them (AMX), where it is the faster one.

Content alone, or with position logits, which SDPA takes as its mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..backends import Backend
from .operands import SequenceOptions, SequenceTerms


@cache
def multiplies_tiles() -> bool:
    """Whether this CPU has AMX, and torch may use it."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)  # torch has no public name for it
    return bool(supported is not None and supported())


def refuses(terms: SequenceTerms, options: SequenceOptions) -> str | None:
    query, _, value, band, *_ = terms
    if value.device.type != "cpu" or value.dtype != torch.bfloat16:
        return "it serves bfloat16 on CPUs alone"
    if not multiplies_tiles():
        return "this CPU multiplies no tiles of bfloat16 (AMX)"
    if query is None or band is not None:
        return "it knows content and position logits, no band"
    if options.causal or options.key_padding_mask is not None:
        return "it knows no padding and no order of keys"
    if query.shape[3] != value.shape[3] or 0 in query.shape:
        return f"queries of width {query.shape[3]} and values of width {value.shape[3]} do not fit it"
    return None


def refuses_backward(terms: SequenceTerms, options: SequenceOptions) -> str | None:
    return "its backward wants the output, which is not kept"


def forward(terms: SequenceTerms, options: SequenceOptions, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    query, key, value, _, _, position = terms
    assert query is not None
    mask = None if position is None else position.expand(*query.shape[:3], value.shape[2])
    found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=options.scale
    )
    output.copy_(found)  # 0 where all keys are masked
    lse.copy_(total if position is None else total.masked_fill(position.isneginf().all(-1), float("inf")))


def backward(*_: Any) -> None:
    raise AssertionError("refused")


BACKEND = Backend("amx", refuses, forward, backward, refuses_backward)
