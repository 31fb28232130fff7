"""CUDA's flash attention, PyTorch's or cuDNN's: content alone in half precision, with values as wide as the keys."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

WIDEST = 192  # width beyond which some devices have no backward
MULTIPLE = 8  # of widths and strides: rows are aligned to 16 bytes
MOST = 65535  # images and heads: axes of the grid
MOST_SUMS = 2**31 - 1  # elements of the backward's sums of the queries' gradients, which it counts by 32 bits
_CUDNN = getattr(getattr(torch._C, "_SDPBackend", None), "CUDNN_ATTENTION", None)  # torch >= 2.5


def refusal(query: Tensor, value: Tensor, scale: float) -> str | None:
    """Return the reason why flash attention does not compute this, or None.

    Args:
        query: (B, M, ..., d).
        value: (B, M, ..., dv).
        scale: Factor of the products.
    """
    d, dv = query.shape[-1], value.shape[-1]
    if not value.is_cuda or value.dtype not in (torch.float16, torch.bfloat16):
        return "it supports only float16 and bfloat16 on CUDA"
    if d != dv or d % MULTIPLE or d > WIDEST or d == 0:
        return (
            f"flash attention needs queries and values of one width, a multiple of {MULTIPLE} up to {WIDEST}, "
            f"not {d} and {dv}"
        )
    # It subtracts the products' maximum before it scales them, and multiplies the -inf of absent keys by the scale.
    if scale <= 0:
        return f"flash attention overflows where the scale is not positive, and it is {scale:g}"
    if max(value.shape[:2]) > MOST:
        return f"flash attention takes up to {MOST} images and heads, not {value.shape[0]} and {value.shape[1]}"
    if (sums := _sums(query)) > MOST_SUMS:
        return f"flash attention's backward takes up to 2**31 - 1 sums, and there are {sums}"
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch.backends.cuda.enable_flash_sdp(False) switched flash attention off"
    return None if _has_flash(value.device.index or 0) else "this device or build of torch has no flash attention"


def _sums(query: Tensor) -> int:
    """Return the number of sums in the backward, which rounds the length and the width of queries."""
    B, M, *lengths, d = query.shape
    step = 32 if d <= 128 else 64
    return B * M * (-(-math.prod(lengths) // 128) * 128) * (-(-d // step) * step)


@cache
def _has_flash(index: int) -> bool:
    available = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    if not (available() and torch.cuda.is_available()):
        return False
    return torch.cuda.get_device_capability(index) >= (8, 0)


def _aligned(rows: Tensor) -> Tensor:
    """Return (B, M, N, d) with rows aligned to 16 bytes: itself if they are."""
    places = (*rows.stride()[:3], rows.storage_offset())
    return rows if rows.stride(3) == 1 and not any(n % MULTIPLE for n in places) else rows.contiguous()


def forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, T, d), stored as the query is, and the log-sum-exp (B, M, T) in float32.

    Args:
        query: (B, M, T, d).
        key: (B, M, S, d).
        value: (B, M, S, d).
        scale: Factor of the products.
    """
    query, key, value = map(_aligned, (query, key, value))
    aten = torch.ops.aten
    if _prefers_cudnn(query, key, value, scale):
        output, total, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, scale=scale)
        return output, total.squeeze(3)
    output, total, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False, scale=scale)
    return output, total[..., : query.shape[2]]


def backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from what :func:`forward` returned."""
    unused = torch.empty((), dtype=torch.long, device=value.device)  # state of the dropout, which is off
    grad_output, query, key, value, output = rows = [*map(_aligned, (grad_output, query, key, value, output))]
    lengths = (query.shape[2], key.shape[2], 0.0, False)
    if _prefers_cudnn(query, key, value, scale):
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *rows, lse.contiguous().unsqueeze(3), unused, unused, None, None, None, *lengths, scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *rows, lse.contiguous(), None, None, *lengths, unused, unused, scale=scale
    )


def _prefers_cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Return whether PyTorch's SDPA would take cuDNN: on an H100 1.5 times as fast as PyTorch's kernels."""
    return _CUDNN is not None and torch._fused_sdp_choice(query, key, value, scale=scale) == int(_CUDNN)
