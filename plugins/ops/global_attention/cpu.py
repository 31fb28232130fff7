"""Pack the arguments of global attention for the CPU kernels (``csrc/global_attention/cpu.cpp``) and call them.

Half precision is computed in float32. All copies made here are O(N): the kernels read keys and values as packed
rows and columns, and queries, logits and gradients with any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common import library
from ..common.backends import Backend, Gradients
from .operands import Options, Terms

_VECTOR = 64  # bytes; packed rows are padded to a multiple
_TASKS = 16  # minimum number of independent sums over queries in the backward, which threads share


def _padded(size: int, dtype: torch.dtype) -> int:
    lanes = _VECTOR // dtype.itemsize
    return -(-size // lanes) * lanes


def _narrow(width: int, dtype: torch.dtype) -> bool:
    """Return whether rows of this width need so much padding that products over the keys are cheaper."""
    return 4 * width <= 3 * _padded(width, dtype)


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack (B, M, Hk, Wk, width) as (B, M, Hk * Wk, padded width)."""
    rows = tensor.to(dtype).flatten(2, 3)
    return pad(rows, (0, _padded(rows.shape[-1], dtype) - rows.shape[-1])).contiguous()


def _columns(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack (B, M, Hk, Wk, width) as (B, M, width, padded Hk * Wk)."""
    columns = tensor.to(dtype).flatten(2, 3).transpose(2, 3)
    return pad(columns, (0, _padded(columns.shape[-1], dtype) - columns.shape[-1])).contiguous()


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else tensor * scale


def forward(terms: Terms, options: Options, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    query, key, value, *_ = terms
    dtype, narrow = lse.dtype, _narrow(value.shape[-1], lse.dtype)
    target = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
    torch.ops.attn_plugins.global_attention_forward_(
        None if query is None else query.to(dtype),
        None if key is None else _scaled(_columns(key, dtype), options.scale),
        None if narrow else _rows(value, dtype),
        _columns(value, dtype) if narrow else None,
        *terms.logits(lse.shape, dtype),
        target,
        lse,
        value.shape[2] * value.shape[3],
        value.shape[2],
    )
    if target is not output:
        output.copy_(target)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, grads: Gradients
) -> Gradients:
    """Fill or return the gradients that are not None."""
    query, key, value, *_ = terms
    dtype = lse.dtype
    B, M, Hk, Wk, dv = value.shape
    keys, d = Hk * Wk, 0 if query is None else query.shape[-1]
    slots = max(1, -(-_TASKS // (B * M)))

    def full(grad: Tensor | None, *shape: int) -> Tensor | None:
        """Return the tensor that the kernel writes: the gradient itself unless its dtype differs or it broadcasts."""
        if grad is None or (grad.shape == shape and grad.dtype == dtype):
            return grad
        return value.new_empty(shape, dtype=dtype)

    def sums(grad: Tensor | None, *shape: int) -> Tensor | None:
        return None if grad is None else value.new_zeros((B, M, slots, *shape), dtype=dtype)

    written = dict(
        query=full(grads["query"], *lse.shape, d),
        key=sums(grads["key"], d, _padded(keys, dtype)),
        value=sums(grads["value"], dv, _padded(keys, dtype)),
        row_logits=full(grads["row_logits"], *lse.shape, Hk),
        column_logits=full(grads["column_logits"], *lse.shape, Wk),
        key_logits=sums(grads["key_logits"], keys),
    )
    torch.ops.attn_plugins.global_attention_backward_(
        grad_output.to(dtype),
        None if query is None else query.to(dtype),
        None if key is None else _scaled(_columns(key, dtype), options.scale),
        None if key is None or _narrow(d, dtype) else _scaled(_rows(key, dtype), options.scale),
        _columns(value, dtype),
        *terms.logits(lse.shape, dtype),
        lse,
        *written.values(),
        keys,
        Hk,
        slots,
    )
    for name, scale in (("key", options.scale), ("value", 1.0)):  # (B, M, slots, width, keys)
        if (of_keys := written[name]) is not None:
            written[name] = _scaled(of_keys.sum(2)[..., :keys].mT, scale).unflatten(2, (Hk, Wk))
    if (of_logits := written["key_logits"]) is not None:
        written["key_logits"] = of_logits.sum(2).unflatten(2, (Hk, Wk))
    return written


BACKEND = Backend("cpu", library.refuses_other_devices, forward, backward)
