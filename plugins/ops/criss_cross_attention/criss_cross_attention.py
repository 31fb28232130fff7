"""Region "criss-cross": attention to the keys in the row and in the column of each query.

CCNet's criss-cross attention uses this operator without position logits, bilateral criss-cross attention uses it with
them. It is computed as batched matrix products around one softmax, PyTorch's (``eager``) or on CPUs our own (``cpu``),
or by Triton kernels (``triton``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...core import triton_launch
from ...core.arguments import broadcasts, check_dim, check_tensors, finite
from ...core.backends import forced
from ...core.operator import Operator
from . import cpu, eager, reference, triton
from .operands import Options, Terms


def criss_cross_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    position_logits: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Attend from every position of a map to its column and its row (Huang et al. 2019; Thesis, section 3.4.4).

    The weight of key k for query q = (h, w) is the softmax over the H + W - 1 positions of column w and row h of

        scale * query[q]·key[k] + position_logits[q, k]

    where an absent term counts as 0. The query's own position lies in both and counts once, in the row; entry h of
    its column is treated as -inf and receives no gradient. A logit of -inf masks its key. Fully masked queries return
    zeros.

    The weights, H + W numbers per query and head, are kept for the backward, which needs as much memory again; half
    precision adds a copy of the weights in float32. Triton's kernels, which compute content alone in half precision on
    CUDA, keep the output and one number per query and head instead. Strided views are read without a copy if their
    last axis is contiguous, except half precision on the CPU, which is copied to float32.

    Args:
        query: (B, M, H, W, d); None, together with ``key``, for position logits alone.
        key: (B, M, H, W, d).
        value: (B, M, H, W, dv).
        position_logits: (B, M, H, W, H + W), or size 1 in the first two axes to share logits between images or heads:
            H logits for the query's column, then W for its row. None for content alone.
        scale: Factor of the content term.

    Returns:
        (B, M, H, W, dv), stored as (B, H, W, M, dv). It may be modified in place unless Triton's kernels compute it
        and gradients are wanted.

    Raises:
        ValueError: A shape or a device does not match, or the map is empty.
        TypeError: The tensors are not floating-point or do not share one dtype.
    """
    terms = Terms(query, key, value, position_logits)
    _check(*terms)
    return ATTEND(terms, Options(finite("scale", scale), _recomputes(terms)))


def _check(query: Tensor | None, key: Tensor | None, value: Tensor, position_logits: Tensor | None) -> None:
    check_tensors("value", value=value, query=query, key=key, position_logits=position_logits)
    check_dim("value", value, "(B, M, H, W, dv)")
    B, M, H, W, _ = value.shape
    if H * W == 0:
        raise ValueError(f"value must have at least one position, got shape {tuple(value.shape)}")
    if (query is None) != (key is None):
        raise ValueError("query and key must be given together, or both be None for position logits alone")
    if query is None and position_logits is None:
        raise ValueError("query and key, or position_logits, must be given")
    if query is not None and key is not None:
        check_dim("query", query, "(B, M, H, W, d)")
        if query.shape[:4] != (B, M, H, W):
            raise ValueError(f"query must have value's first axes {(B, M, H, W)}, got shape {tuple(query.shape)}")
        if key.shape != query.shape:
            raise ValueError(f"key must have query's shape {tuple(query.shape)}, got {tuple(key.shape)}")
    if position_logits is not None:
        shape = (B, M, H, W, H + W)
        check_dim("position_logits", position_logits, "(B, M, H, W, H + W)")
        if not broadcasts(position_logits, shape, 2):
            raise ValueError(
                f"position_logits must have shape {shape}, H + W logits per position of value, or size 1 in either of "
                f"the first two axes, got {tuple(position_logits.shape)}"
            )


def _recomputes(terms: Terms) -> bool:
    """Return whether to keep log-sum-exps instead of weights: where Triton's kernels are forced, or on their devices.

    This is decided here, not by a backend: a compiled graph knows the results' shapes before any backend is chosen.
    """
    if not triton.takes(terms):
        return False
    if (name := forced()) is not None:
        return name == triton_launch.NAME
    return triton_launch.runs_on(terms.value.device.type, terms.value.device.index or 0)


# --- the operator -------------------------------------------------------------------------------------------------


def _definition(terms: Terms, options: Options) -> Tensor:
    return reference.criss_cross_attention(*terms, options.scale)


def _products(terms: Any, options: Options) -> tuple[int, int]:
    """Count the operations of one content and of one value product; a query's own position counts twice."""
    B, M, H, W, dv = terms.value
    pairs = 2 * B * M * H * W * (H + W)
    return (0 if terms.query is None else pairs * terms.query[4]), pairs * dv


def _backward_operations(terms: Any, options: Options, needs: Sequence[bool]) -> int:
    """Count the gradients of query, key, weights and value, and recomputed logits."""
    content, mixing = _products(terms, options)
    return (3 if options.recompute else 2) * content + 2 * mixing


ATTEND = Operator(
    "criss_cross_attention",
    Terms,
    Options,
    ("output", "weights", "log_sum_exp"),
    needs_output=lambda terms, options: options.recompute,
    fake=eager.empty_results,
    fake_gradient=lambda name, term: eager.empty_gradient(term),
    reference=_definition,
    table=[cpu.BACKEND, triton.BACKEND, eager.BACKEND],
    operations=lambda terms, options: sum(_products(terms, options)),
    backward_operations=_backward_operations,
    fill_value=0.0,
)
