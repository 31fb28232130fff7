"""Region "criss-cross": attention to the keys in the row and in the column of each query.

Criss-cross attention (CCNet) and bilateral criss-cross attention are this operator, without and with position
logits. It is batched matrix products around one softmax, on every device (``products``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_dim, check_tensors
from ..operator import by_reference, define, differentiate_twice, under_autocast
from . import products, reference
from .products import Terms


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

    with an absent term 0. The query's own position, in both, counts once: in the row. Its entry in the column, number
    h, is read as -inf and gets no gradient. A logit of -inf masks; a query whose keys are all masked gets zeros.
    The memory beyond arguments and results is that of the weights, H + W numbers per query and head, kept for the
    gradient, which needs as much again; half inputs add a map of weights in float32. Strided views are read without
    a copy where the last axis is contiguous; on the CPU, half inputs are copied to float32.

    Args:
        query: (B, M, H, W, d); None, together with ``key``, for position logits alone.
        key: (B, M, H, W, d).
        value: (B, M, H, W, dv).
        position_logits: (B, M, H, W, H + W), of size 1 where it does not depend on batch or head: first of the H rows
            of the query's column, then of the W columns of its row; None for content alone.
        scale: Factor of the content term.

    Returns:
        (B, M, H, W, dv), heads innermost in memory but for the width; may be changed in place.

    Raises:
        ValueError: a shape or a device does not fit, or the map has no position.
        TypeError: the tensors are not floating or not of one dtype.
    """
    terms = (query, key, value, position_logits)
    _check(*terms)
    return under_autocast(lambda *cast: _attend(cast, float(scale)), terms, value.device.type)


def _attend(terms: Terms, scale: float) -> Tensor:
    if by_reference():
        return reference.criss_cross_attention(*terms, scale)
    return torch.ops.attn_plugins.criss_cross_attention(*terms, scale)[0]


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
        fits = position_logits.shape[2:] == shape[2:]
        if not fits or any(n not in (1, m) for n, m in zip(position_logits.shape[:2], shape[:2])):
            raise ValueError(
                f"position_logits must have shape {shape}, H + W logits per query, or size 1 in either of the first "
                f"two axes, got {tuple(position_logits.shape)}"
            )


# --- the operators: kernels, fake functions, gradients, FLOPs -----------------------------------------------------


def _empty(like: Tensor, width: int) -> Tensor:
    """Uninitialised (B, M, H, W, width), heads innermost but for the width as a projection wants them.

    Not a view: its owner may add to it in place.
    """
    B, M, H, W, _ = like.shape
    return like.new_empty_strided((B, M, H, W, width), (H * W * M * width, width, W * M * width, M * width, 1))


def _outputs(value: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output and weights."""
    _, _, H, W, dv = value.shape
    return _empty(value, dv), _empty(value, products.aligned(H) + products.aligned(W))


def _gradients(terms: Terms, needs: Sequence[bool]) -> list[Tensor]:
    """Uninitialised gradients, empty where not needed; laid out as the terms where these have a contiguous width."""
    value = terms[2]

    def gradient(term: Tensor) -> Tensor:
        return torch.empty_like(term) if term.stride(-1) == 1 else _empty(term, term.shape[-1])

    return [gradient(t) if t is not None and need else value.new_empty(0) for t, need in zip(terms, needs)]


def _forward(query, key, value, position_logits, scale):
    output, weights = _outputs(value)
    with torch.autocast(value.device.type, enabled=False):
        if output.numel() == 0:
            weights.zero_()
        else:
            products.forward((query, key, value, position_logits), scale, output, weights)
    return output, weights


def _backward(grad_output, query, key, value, position_logits, weights, scale, needs):
    terms = query, key, value, position_logits
    results = _gradients(terms, needs)
    with torch.autocast(value.device.type, enabled=False):
        if grad_output.numel() == 0:
            for grad in results:
                grad.zero_()
        else:
            grads = [g if t is not None and need else None for t, g, need in zip(terms, results, needs)]
            products.backward(grad_output, terms, weights, scale, grads)
    return tuple(results)


def _fake_forward(query, key, value, position_logits, scale):
    return _outputs(value)


def _fake_backward(grad_output, query, key, value, position_logits, weights, scale, needs):
    return tuple(_gradients((query, key, value, position_logits), needs))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *terms, ctx.scale = inputs
    ctx.save_for_backward(*terms, output[1])


def _differentiate(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple:
    *terms, weights = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    if grad_output is None:
        return (None,) * 5
    grads = torch.ops.attn_plugins.criss_cross_attention_backward(grad_output, *terms, weights, ctx.scale, needs)
    return (*(grad if need else None for grad, need in zip(grads, needs)), None)


def _setup_context_double(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad_output, *terms, _, ctx.scale, ctx.needs = inputs
    ctx.save_for_backward(grad_output, *terms)


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple:
    found = differentiate_twice(
        lambda *terms: reference.criss_cross_attention(*terms, ctx.scale),  # type: ignore[call-arg]
        ctx.saved_tensors,
        ctx.needs,
        ctx.needs_input_grad[:5],
        grads,
    )
    return (*found, None, None, None)


Shape = tuple[int, ...]


def _operations(query_shape: Shape | None, value_shape: Shape) -> tuple[int, int]:
    """Of one content product and of one value product; the own position counts in both parts."""
    B, M, H, W, dv = value_shape
    pairs = 2 * B * M * H * W * (H + W)
    return (0 if query_shape is None else pairs * query_shape[4]), pairs * dv


def _flops(query, key, value, *args, out_shape=None, **kwargs):
    """Two per multiply-add of both products."""
    return sum(_operations(query, value))


def _flops_backward(grad_output, query, key, value, *args, out_shape=None, **kwargs):
    """Gradients of query and key; gradients of weights and value."""
    content, mixing = _operations(query, value)
    return 2 * content + 2 * mixing


_TERMS = "Tensor? query, Tensor? key, Tensor value, Tensor? position_logits"
define(
    "criss_cross_attention",
    f"({_TERMS}, float scale) -> (Tensor output, Tensor weights)",
    _forward,
    _fake_forward,
    _differentiate,
    _setup_context,
    _flops,
)
define(
    "criss_cross_attention_backward",
    # Gradients that are not needed come back empty.
    f"(Tensor grad_output, {_TERMS}, Tensor weights, float scale, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_position_logits)",
    _backward,
    _fake_backward,
    _differentiate_twice,
    _setup_context_double,
    _flops_backward,
)
