"""Sequence attention by PyTorch's SDPA: bfloat16 on CPUs with AMX, where it is faster than our kernels.

It takes content alone, or with position logits, which become SDPA's mask.
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
    """Return whether this CPU has AMX and torch may use it."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)  # torch has no public name for it
    return bool(supported is not None and supported())


def refuses(terms: SequenceTerms, options: SequenceOptions) -> str | None:
    query, _, value, band, *_ = terms
    if value.device.type != "cpu" or value.dtype != torch.bfloat16:
        return "it supports only bfloat16 on CPUs"
    if not multiplies_tiles():
        return "this CPU has no AMX for bfloat16"
    if query is None or band is not None:
        return "it supports content and position logits only"
    if options.causal or options.key_padding_mask is not None:
        return "it supports neither key_padding_mask nor causal"
    if query.shape[3] != value.shape[3] or 0 in query.shape:
        return f"it needs queries and values of one width, not {query.shape[3]} and {value.shape[3]}, and no empty axis"
    return None


def refuses_backward(terms: SequenceTerms, options: SequenceOptions) -> str | None:
    return "its backward needs the output, which is not kept"


def forward(terms: SequenceTerms, options: SequenceOptions, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    query, key, value, _, _, position = terms
    assert query is not None
    mask = None if position is None else position.expand(*query.shape[:3], value.shape[2])
    attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=options.scale
    )
    output.copy_(attended)  # 0 where all keys are masked
    lse.copy_(total if position is None else total.masked_fill(position.isneginf().all(-1), float("inf")))


def backward(*_: Any) -> None:
    raise AssertionError("refused")


BACKEND = Backend("amx", refuses, forward, backward, refuses_backward)
