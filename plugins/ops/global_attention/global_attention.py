"""Region "everywhere": two-dimensional attention over all keys, with factored position logits.

The arguments decide which of five ways computes it:
    * plain matrix products, if the weights are the same for all queries or are a product of row and column weights;
    * PyTorch's fused attention, with all terms folded into its dot product (``sdpa``): on CPUs for wide content alone;
      on CUDA without content, for content alone in half precision, and where Triton cannot, up to 256 channels of all
      folded terms;
    * one compiled pass over blocks of queries (``cpu``): on CPUs otherwise;
    * Triton kernels (``triton``): on CUDA otherwise;
    * plain PyTorch over chunks of queries (``eager``): everything else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.arguments import arithmetic_dtype, broadcasts, check_dim, check_tensors, finite, under_autocast
from ...core.attention import check_query_and_key, counts_of_products, empty_results
from ...core.backends import closed_form
from ...core.operator import Operator
from ...core.softmax import masked_softmax
from . import cpu, eager, reference, sdpa, triton
from .operands import Options, Terms
from .prefix import with_prefix


def global_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    *,
    row_logits: Tensor | None = None,
    column_logits: Tensor | None = None,
    key_logits: Tensor | None = None,
    prefix_key: Tensor | None = None,
    prefix_value: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Attend from every query of a map to all keys of a map (Zhu et al. 2019, Eq. 1, 2 and 8).

    The weight of key k = (hk, wk) for query q = (hq, wq) is the softmax over all keys of

        scale * query[q]·key[k] + row_logits[q, hk] + column_logits[q, wk] + key_logits[k]

    where absent terms count as 0. Prefix keys, such as class tokens and registers, have no position; in the same
    softmax, the logit of prefix key p is scale * query[q]·prefix_key[p].

    Beyond a bounded workspace, only O(Hq * Wq + Hk * Wk) memory is used, except for second derivatives, which hold
    all logits. A logit of -inf masks its keys, so that -inf in ``row_logits`` and ``column_logits`` limits attention
    to a window. Fully masked queries return zeros. Strided views are read without a copy if their last axis is
    contiguous.

    Args:
        query: (B, M, Hq, Wq, d); None, together with ``key``, for no content term.
        key: (B, M, Hk, Wk, d).
        value: (B, M, Hk, Wk, dv).
        row_logits: (B, M, Hq, Wq, Hk); size 1 in any of the first four axes to broadcast.
        column_logits: (B, M, Hq, Wq, Wk); size 1 likewise.
        key_logits: (B, M, Hk, Wk); size 1 in the first two axes to broadcast.
        prefix_key: (B, M, P, d); None if ``query`` is None.
        prefix_value: (B, M, P, dv).
        scale: Factor of the content term.

    Returns:
        (B, M, Hq, Wq, dv). Hq or Wq is 1 if it is in all arguments that have it.

    Raises:
        ValueError: A shape or a device does not match, or there is no key.
        TypeError: The tensors are not floating-point or do not share one dtype.
    """
    terms = Terms(query, key, value, row_logits, column_logits, key_logits)
    _check(terms)
    scale = finite("scale", scale)
    if prefix_key is not None or prefix_value is not None:
        terms = with_prefix(terms, prefix_key, prefix_value)
        query, key, value, row_logits, column_logits, key_logits = terms
    if query is None and row_logits is None and column_logits is None:
        if closed_form():
            return under_autocast(_attend_by_keys, (value, key_logits))
        terms = terms._replace(row_logits=value.new_zeros(1, 1, 1, 1, value.shape[2]))  # a single query
    rows_alone = row_logits is None or row_logits.shape[3] == 1
    columns_alone = column_logits is None or column_logits.shape[2] == 1
    if query is None and key_logits is None and rows_alone and columns_alone and closed_form():
        return under_autocast(_attend_by_axes, (value, row_logits, column_logits))
    return ATTEND(terms, Options(scale))


def _attend_by_keys(value: Tensor, key_logits: Tensor | None) -> Tensor:
    """Compute a single query, since all have the same weights ('0010' in the paper, or plain averaging)."""
    values = value.flatten(2, 3).to(arithmetic_dtype(value.dtype))
    if key_logits is None:
        output = values.mean(2, keepdim=True)
    else:
        weights = masked_softmax(key_logits.to(values.dtype).flatten(2))
        output = torch.matmul(weights.unsqueeze(2), values)
    return output.unsqueeze(3).to(value.dtype)


def _attend_by_axes(value: Tensor, row_logits: Tensor | None, column_logits: Tensor | None) -> Tensor:
    """Reduce one axis after the other, since exp(row + column) = exp(row) * exp(column) ('0001' in the paper)."""
    values = value.to(arithmetic_dtype(value.dtype))
    if column_logits is None:
        reduced = values.mean(3, keepdim=True)
    else:
        weights = masked_softmax(column_logits.to(values.dtype)[:, :, 0])
        reduced = torch.einsum("bmwx,bmyxd->bmywd", weights, values)
    if row_logits is None:
        output = reduced.mean(2, keepdim=True)
    else:
        weights = masked_softmax(row_logits.to(values.dtype)[:, :, :, 0])
        output = torch.einsum("bmhy,bmywd->bmhwd", weights, reduced)
    return output.to(value.dtype)


def _check(terms: Terms) -> None:
    query, key, value, row_logits, column_logits, key_logits = terms
    check_tensors("value", **terms._asdict())
    check_dim("value", value, "(B, M, Hk, Wk, dv)")
    B, M, Hk, Wk, _ = value.shape
    if Hk * Wk == 0:
        raise ValueError(f"value must have at least one key, got shape {tuple(value.shape)}")
    check_query_and_key(query, key, value, "(B, M, Hq, Wq, d)")
    for name, logits, axes in (("row_logits", row_logits, "Hk"), ("column_logits", column_logits, "Wk")):
        if logits is not None:
            check_dim(name, logits, f"(B, M, Hq, Wq, {axes})")
    Hq, Wq = terms.grid()
    shapes = {
        "row_logits": (row_logits, (B, M, Hq, Wq, Hk), 4),
        "column_logits": (column_logits, (B, M, Hq, Wq, Wk), 4),
        "key_logits": (key_logits, (B, M, Hk, Wk), 2),
    }
    for name, (logits, shape, leading) in shapes.items():
        if logits is not None and not broadcasts(logits, shape, leading):
            queries = "" if leading == 2 else f"positions of {'row_logits' if query is None else 'query'}, "
            raise ValueError(
                f"{name} must have shape {shape}, {queries}batch, heads and keys of value, or size 1 in any of the "
                f"first {leading} axes, got {tuple(logits.shape)}"
            )


# --- the operator -------------------------------------------------------------------------------------------------


def _products(terms: Any, options: Options) -> tuple[int, int]:
    """Count the operations of one content product and of one value product."""
    query, _, (B, M, Hk, Wk, dv), row_logits, column_logits, _ = terms
    shapes = [shape for shape in (query, row_logits, column_logits) if shape is not None]
    Hq, Wq = (max(shape[axis] for shape in shapes) for axis in (2, 3))
    pairs = 2 * B * M * Hq * Wq * Hk * Wk
    return (0 if query is None else pairs * query[4]), pairs * dv


ATTEND = Operator(
    "global_attention",
    Terms,
    Options,
    ("output", "log_sum_exp"),
    fake=lambda terms, options: empty_results(terms.value, *terms.grid()),
    reference=lambda terms, options: reference.global_attention(*terms, *options),
    table=[sdpa.BACKEND, cpu.BACKEND, triton.BACKEND, eager.BACKEND],
    **counts_of_products(_products),
)
