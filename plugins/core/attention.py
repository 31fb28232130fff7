"""What the attention operators share: checks, uninitialized results and operation counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import arithmetic_dtype


def check_query_and_key(query: Tensor | None, key: Tensor | None, value: Tensor, axes: str) -> None:
    """Check that both are given or neither, with value's batch and heads, key with value's positions, and of one width.

    Args:
        query: (B, M, ..., d), with as many axes as value.
        key: (B, M, ..., d).
        value: (B, M, ..., dv), already checked.
        axes: Shape of the query, for the message.
    """
    if query is None or key is None:
        if query is not key:
            raise ValueError("query and key must be given together, or both be None for no content term")
        return
    if query.dim() != value.dim():
        raise ValueError(f"query must have shape {axes}, as many axes as value, got {tuple(query.shape)}")
    if query.shape[:2] != value.shape[:2]:
        B, M = value.shape[:2]
        raise ValueError(f"query must have value's batch and heads ({B}, {M}), got shape {tuple(query.shape)}")
    expected = (*value.shape[:-1], query.shape[-1])
    if key.shape != expected:
        raise ValueError(f"key must have shape {expected}, value's axes and query's width, got {tuple(key.shape)}")


def empty_results(value: Tensor, *sizes: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return an uninitialized output (B, M, *sizes, dv) and log-sum-exp (B, M, *sizes), of one or two sizes.

    The output is stored as (B, *sizes, M, dv) for the projection that follows, in the value's dtype or ``dtype``. It is
    no view.
    """
    B, M, dv = value.shape[0], value.shape[1], value.shape[-1]
    steps = (M * dv,) if len(sizes) == 1 else (sizes[1] * M * dv, M * dv)
    output = value.new_empty_strided((B, M, *sizes, dv), (sizes[0] * steps[0], dv, *steps, 1), dtype=dtype)
    return output, value.new_empty((B, M, *sizes), dtype=arithmetic_dtype(value.dtype))


def counts_of_products(products: Callable[[Any, Any], tuple[int, int]]) -> dict[str, Any]:
    """Return operation counts of attention whose backward recomputes its logits.

    Args:
        products: ``(terms, options)`` to the operations of one content product and of one value product.

    Returns:
        The arguments ``operations`` and ``backward_operations`` of :class:`.Operator`.
    """

    def backward(terms: Any, options: Any, needs: Sequence[bool]) -> int:
        """Count recomputed logits, gradients of query and key; gradients of weights and value."""
        content, mixing = products(terms, options)
        return 3 * content + 2 * mixing

    return dict(operations=lambda terms, options: sum(products(terms, options)), backward_operations=backward)
