"""Region "everywhere": two-dimensional attention over all keys, with factored position logits.

Four ways to compute it, chosen by what the arguments hold, never by a flag:
    * the weights are the same for all queries, or a product of rows' and columns': plain matrix products do;
    * CUDA up to a width, and wide content alone on CPUs: the library's fused attention, all terms folded into
      its dot product (``folding``);
    * CPU: one compiled pass over blocks of queries (``cpu_global``);
    * else plain PyTorch over chunks of queries (``chunked_global``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from ..arguments import arithmetic_dtype, check_dim, check_tensors
from ..operator import by_reference, define, differentiate_twice, under_autocast
from ..softmax import masked_softmax
from . import chunked_global as chunked
from . import cpu_global as cpu
from . import folding, reference
from .operands import GlobalTerms


def global_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    *,
    row_logits: Tensor | None = None,
    column_logits: Tensor | None = None,
    key_logits: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Attend from every query of a map to all keys of a map (Zhu et al. 2019, Eq. 1, 2 and 8).

    The weight of key k = (hk, wk) for query q = (hq, wq) is the softmax over all keys of

        scale * query[q]·key[k] + row_logits[q, hk] + column_logits[q, wk] + key_logits[k]

    with absent terms 0. Only O(Hq * Wq + Hk * Wk) memory is used beyond a bounded workspace, except for
    second derivatives, which hold all logits. A logit of -inf masks: a window of rows and columns is -inf in
    ``row_logits`` and ``column_logits``; a query whose keys are all masked gets zeros. Strided views are read
    without a copy where the last axis is contiguous.

    Args:
        query: (B, M, Hq, Wq, d); None, together with ``key``, for no content term.
        key: (B, M, Hk, Wk, d).
        value: (B, M, Hk, Wk, dv).
        row_logits: (B, M, Hq, Wq, Hk), of size 1 where it does not depend on batch, head, Hq or Wq.
        column_logits: (B, M, Hq, Wq, Wk), of size 1 likewise.
        key_logits: (B, M, Hk, Wk), of size 1 where it does not depend on batch or head.
        scale: Factor of the content term.

    Returns:
        (B, M, Hq, Wq, dv). Hq, Wq are those of the arguments that have them, or 1: logits that no query
        position enters are computed once and not expanded.

    Raises:
        ValueError: a shape or a device does not fit, or there is no key.
        TypeError: the tensors are not floating or not of one dtype.
    """
    terms = (query, key, value, row_logits, column_logits, key_logits)
    grid = _check(*terms)
    return under_autocast(lambda *cast: _attend(cast, float(scale), grid), terms, value.device.type)


def scripted_global_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
    scale: float,
) -> Tensor:
    """:func:`global_attention` for TorchScript, which has no keyword-only arguments and compiles no checks."""
    return torch.ops.attn_plugins.global_attention(query, key, value, row_logits, column_logits, key_logits, scale)[0]


def _attend(terms: GlobalTerms, scale: float, grid: tuple[int, int]) -> Tensor:
    query, _, value, row_logits, column_logits, key_logits = terms
    if query is None and row_logits is None and column_logits is None:
        return _attend_by_keys(value, key_logits)
    rows_alone = row_logits is None or row_logits.shape[3] == 1
    columns_alone = column_logits is None or column_logits.shape[2] == 1
    if query is None and key_logits is None and rows_alone and columns_alone:
        return _attend_by_axes(value, row_logits, column_logits)
    if by_reference():
        return reference.global_attention(*terms, scale)
    return torch.ops.attn_plugins.global_attention(*terms, scale)[0]


def _attend_by_keys(value: Tensor, key_logits: Tensor | None) -> Tensor:
    """All queries see the same weights (the '0010' of the paper, or plain averaging): one query is computed."""
    values = value.flatten(2, 3).to(arithmetic_dtype(value.dtype))
    if key_logits is None:
        output = values.mean(2, keepdim=True)
    else:
        weights = masked_softmax(key_logits.to(values.dtype).flatten(2))
        output = torch.matmul(weights.unsqueeze(2), values)
    return output.unsqueeze(3).to(value.dtype)


def _attend_by_axes(value: Tensor, row_logits: Tensor | None, column_logits: Tensor | None) -> Tensor:
    """exp(row + column) = exp(row) * exp(column): one axis is reduced after the other ('0001' of the paper)."""
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


def _check(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
) -> tuple[int, int]:
    """Check all arguments and return the queries' (Hq, Wq)."""
    check_tensors(
        "value", value=value, query=query, key=key, row_logits=row_logits, column_logits=column_logits,
        key_logits=key_logits,
    )  # fmt: skip
    check_dim("value", value, "(B, M, Hk, Wk, dv)")
    B, M, Hk, Wk, _ = value.shape
    if Hk * Wk == 0:
        raise ValueError(f"value must have at least one key, got shape {tuple(value.shape)}")
    if (query is None) != (key is None):
        raise ValueError("query and key must be given together, or both be None for no content term")
    if query is not None and key is not None:
        check_dim("query", query, "(B, M, Hq, Wq, d)")
        d = query.shape[4]
        if query.shape[:2] != (B, M):
            raise ValueError(f"query must have value's batch and heads ({B}, {M}), got shape {tuple(query.shape)}")
        if key.shape != (B, M, Hk, Wk, d):
            raise ValueError(
                f"key must have shape {(B, M, Hk, Wk, d)} = (B, M, Hk, Wk, d) of value and query, "
                f"got {tuple(key.shape)}"
            )
    for name, logits, axes in (("row_logits", row_logits, "Hk"), ("column_logits", column_logits, "Wk")):
        if logits is not None:
            check_dim(name, logits, f"(B, M, Hq, Wq, {axes})")
    Hq, Wq = _grid((query, key, value, row_logits, column_logits, key_logits))
    shapes = {
        "row_logits": (row_logits, (B, M, Hq, Wq, Hk)),
        "column_logits": (column_logits, (B, M, Hq, Wq, Wk)),
        "key_logits": (key_logits, (B, M, Hk, Wk)),
    }
    for name, (logits, shape) in shapes.items():
        if logits is None:
            continue
        broadcast = 4 if len(shape) == 5 else 2  # of the first axes
        fits = logits.dim() == len(shape) and logits.shape[broadcast:] == shape[broadcast:]
        if not fits or any(n not in (1, m) for n, m in zip(logits.shape[:broadcast], shape[:broadcast])):
            raise ValueError(
                f"{name} must have shape {shape}, or size 1 in any of the first {broadcast} axes, "
                f"got {tuple(logits.shape)}"
            )
    return Hq, Wq


# --- the operators: kernels, fake functions, gradients, FLOPs -----------------------------------------------------


def _grid(terms: GlobalTerms) -> tuple[int, int]:
    query, _, _, row_logits, column_logits, _ = terms
    Hq = Wq = 1
    for tensor in (query, row_logits, column_logits):
        if tensor is not None:
            Hq = tensor.shape[2] if Hq == 1 else Hq
            Wq = tensor.shape[3] if Wq == 1 else Wq
    return Hq, Wq


def _outputs(terms: GlobalTerms) -> tuple[Tensor, Tensor]:
    """Uninitialised output, heads innermost but for the width as a projection wants them, and log-sum-exp."""
    value = terms[2]
    B, M, _, _, dv = value.shape
    Hq, Wq = _grid(terms)
    lse = value.new_empty((B, M, Hq, Wq), dtype=arithmetic_dtype(value.dtype))
    return value.new_empty((B, Hq, Wq, M, dv)).permute(0, 3, 1, 2, 4), lse


def _gradients(terms: GlobalTerms, needs: list[bool]) -> list[Tensor]:
    """Uninitialised gradients, in the memory layout of what they are the gradients of; empty where not needed."""
    value = terms[2]
    return [torch.empty_like(t) if t is not None and need else value.new_empty(0) for t, need in zip(terms, needs)]


def _folds(terms: GlobalTerms) -> bool:
    """Whether the library's fused attention serves: on CUDA up to a width, on CPUs for wide content alone.

    (At widths up to 32 our CPU kernel is as fast or faster: 168 against 185 ms, forward and backward, for 4200
    queries and 1050 keys of 9 heads x 28; at 64 the library's is, at 256 by three times.)
    """
    query, _, value, *logits = terms
    if value.device.type == "cpu":
        return query is not None and query.shape[-1] > 32 and all(term is None for term in logits)
    return value.is_cuda and value.dtype != torch.float64 and folding.width(terms) <= folding.WIDEST


def _forward(query, key, value, row_logits, column_logits, key_logits, scale):
    terms = (query, key, value, row_logits, column_logits, key_logits)
    output, lse = _outputs(terms)
    with torch.autocast(value.device.type, enabled=False):
        if output.numel() == 0:
            lse.fill_(float("inf"))
        elif _folds(terms):
            folding.forward(terms, scale, output, lse)
        elif _compiled(value):
            cpu.forward(terms, scale, output, lse)
        else:
            chunked.forward(chunked.Problem(*terms, scale, _grid(terms)), output, lse)
    return output, lse


def _backward(grad_output, query, key, value, row_logits, column_logits, key_logits, output, lse, scale, needs):
    terms = (query, key, value, row_logits, column_logits, key_logits)
    results = _gradients(terms, needs)
    grads = [g if t is not None and need else None for t, g, need in zip(terms, results, needs)]
    with torch.autocast(value.device.type, enabled=False):
        if output.numel() == 0:
            for grad in results:
                grad.zero_()
        # CUDA's fused backward adds with atomics; the chunks' sums have a fixed order.
        elif _folds(terms) and not (value.is_cuda and torch.are_deterministic_algorithms_enabled()):
            folding.backward(grad_output, terms, output, lse, scale, grads)
        elif _compiled(value):
            cpu.backward(grad_output, terms, lse, scale, grads)
        else:
            chunked.backward(chunked.Problem(*terms, scale, _grid(terms)), grad_output, lse, scale, grads)
    return tuple(results)


def _compiled(value: Tensor) -> bool:
    return value.device.type == "cpu" and library.serves("cpu")


def _fake_forward(query, key, value, row_logits, column_logits, key_logits, scale):
    return _outputs((query, key, value, row_logits, column_logits, key_logits))


def _fake_backward(grad_output, query, key, value, row_logits, column_logits, key_logits, output, lse, scale, needs):
    return tuple(_gradients((query, key, value, row_logits, column_logits, key_logits), needs))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *terms, ctx.scale = inputs
    ctx.save_for_backward(*terms, *output)


def _differentiate(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple:
    *terms, output, lse = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:6])
    if grad_output is None:
        return (None,) * 7
    grads = torch.ops.attn_plugins.global_attention_backward(grad_output, *terms, output, lse, ctx.scale, needs)
    return (*(grad if need else None for grad, need in zip(grads, needs)), None)


def _setup_context_double(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad_output, *terms, _, _, ctx.scale, ctx.needs = inputs
    ctx.save_for_backward(grad_output, *terms)


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple:
    found = differentiate_twice(
        lambda *terms: reference.global_attention(*terms, ctx.scale),  # type: ignore[call-arg]
        ctx.saved_tensors,
        ctx.needs,
        ctx.needs_input_grad[:7],
        grads,
    )
    return (*found, None, None, None, None)


Shape = tuple[int, ...]


def _products(
    query_shape: Shape | None, value_shape: Shape, row_shape: Shape | None, column_shape: Shape | None
) -> tuple[int, int]:
    """Operations of one content GEMM and of one value GEMM."""
    B, M, Hk, Wk, dv = value_shape
    shapes = [s for s in (query_shape, row_shape, column_shape) if s is not None]
    Hq, Wq = (max(s[i] for s in shapes) for i in (2, 3))
    pairs = 2 * B * M * Hq * Wq * Hk * Wk
    return (0 if query_shape is None else pairs * query_shape[4]), pairs * dv


def _flops(query, key, value, row_logits, column_logits, *args, out_shape=None, **kwargs):
    """Two per multiply-add of both matrix products."""
    return sum(_products(query, value, row_logits, column_logits))


def _flops_backward(grad_output, query, key, value, row_logits, column_logits, *args, out_shape=None, **kwargs):
    """Recomputed logits, gradients of query and key; gradients of weights and value."""
    content, mixing = _products(query, value, row_logits, column_logits)
    return 3 * content + 2 * mixing


_TERMS = "Tensor? query, Tensor? key, Tensor value, Tensor? row_logits, Tensor? column_logits, Tensor? key_logits"
define(
    "global_attention",
    f"({_TERMS}, float scale) -> (Tensor output, Tensor log_sum_exp)",
    _forward,
    _fake_forward,
    _differentiate,
    _setup_context,
    _flops,
)
define(
    "global_attention_backward",
    # Gradients that are not needed come back empty.
    f"(Tensor grad_output, {_TERMS}, Tensor output, Tensor log_sum_exp, float scale, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_row_logits, "
    "Tensor grad_column_logits, Tensor grad_key_logits)",
    _backward,
    _fake_backward,
    _differentiate_twice,
    _setup_context_double,
    _flops_backward,
)
