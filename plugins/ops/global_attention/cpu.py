"""Pack the arguments of global attention for the CPU kernels (``csrc/global_attention/cpu.cpp``) and call them.

Half precision is computed in float32. All copies made here are O(N): the kernels read keys and values as packed
rows and columns, and queries, logits and gradients with any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core import library
from ...core.arguments import arithmetic_dtype
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed, target
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


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    query, key, value, *_ = terms
    dtype = arithmetic_dtype(value.dtype)
    output, lse = empty_results(value, *terms.grid(), dtype=dtype)
    narrow = _narrow(value.shape[-1], dtype)
    torch.ops.attn_plugins.global_attention_forward_(
        None if query is None else query.to(dtype),
        None if key is None else _scaled(_columns(key, dtype), options.scale),
        None if narrow else _rows(value, dtype),
        _columns(value, dtype) if narrow else None,
        *terms.logits(lse.shape, dtype),
        output,
        lse,
        value.shape[2] * value.shape[3],
        value.shape[2],
    )
    return output if value.dtype == dtype else output.to(value.dtype), lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    query, key, value, *_ = terms
    dtype = lse.dtype
    B, M, Hk, Wk, dv = value.shape
    keys, d = Hk * Wk, 0 if query is None else query.shape[-1]
    slots = max(1, -(-_TASKS // (B * M)))
    of_keys = dict(key=(d, _padded(keys, dtype)), value=(dv, _padded(keys, dtype)), key_logits=(keys,))
    grads: Gradients = {
        name: value.new_zeros((B, M, slots, *of_keys[name]), dtype=dtype)
        if name in of_keys
        else target(term, (*lse.shape, *term.shape[4:]), dtype, lambda grad: grad.dtype == dtype)
        for name, term in needed(terms, needs)
    }
    torch.ops.attn_plugins.global_attention_backward_(
        grad_output.to(dtype),
        None if query is None else query.to(dtype),
        None if key is None else _scaled(_columns(key, dtype), options.scale),
        None if key is None or _narrow(d, dtype) else _scaled(_rows(key, dtype), options.scale),
        _columns(value, dtype),
        *terms.logits(lse.shape, dtype),
        lse,
        *map(grads.get, terms._fields),
        keys,
        Hk,
        slots,
    )
    for name, scale in (("key", options.scale), ("value", 1.0)):  # (B, M, slots, width, keys)
        if (sums := grads.get(name)) is not None:
            grads[name] = _scaled(sums.sum(2)[..., :keys].mT, scale).unflatten(2, (Hk, Wk))
    if (sums := grads.get("key_logits")) is not None:
        grads["key_logits"] = sums.sum(2).unflatten(2, (Hk, Wk))
    return like_terms(terms, grads)


BACKEND = Backend("cpu", library.refuses_other_devices, forward, backward)
