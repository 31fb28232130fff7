"""Region "window": attention to the keys around each query, of sequences and of maps.

Local bilateral attention, dynamic convolution, stand-alone local attention and range-limited generalized attention
are this operator with other logits. Compiled kernels compute it on the CPU (``csrc/window/cpu.cpp``) and on
CUDA (``csrc/window/cuda.cuh``); elsewhere plain PyTorch does, tap by tap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import library
from ..arguments import arithmetic_dtype, check_dim, check_tensors, expand
from ..operator import by_reference, define, differentiate_twice, under_autocast
from . import cpu, cuda, reference, taps
from .geometry import Geometry, Terms

BORDERS = ("exclude", "zero")


def window_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    position_logits: Tensor | None,
    kernel_size: int | Sequence[int],
    *,
    dilation: int | Sequence[int] = 1,
    scale: float = 1.0,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | None = None,
    border: str = "exclude",
) -> Tensor:
    """Attend from every position to the keys of a window around it (Thesis, Eq. 4.9; Zhu et al. 2019, section 3).

    The weight of tap t for query q, whose key is k = q * stride - padding + t * dilation, is the softmax over the
    window's taps of

        scale * query[q]·key[k] + position_logits[q, t]

    with an absent term 0. Taps are in row-major order. Sequences have one spatial axis, maps have two. Nothing is
    unfolded: beyond arguments and results, memory is that of packed copies of queries, keys and values, in the
    gradient also of one or more heads' weights. Second derivatives hold all windows.

    Args:
        query: (B, M, *spatial_q, d); None, together with ``key``, for position logits alone.
        key: (B, M, *spatial, d).
        value: (B, M, *spatial, dv).
        position_logits: (B, M, *spatial_q, taps), of size 1 where it does not depend on batch or head; None for
            content alone.
        kernel_size: Taps along each axis.
        dilation: Distance of neighbouring taps.
        scale: Factor of the content term.
        stride: Distance of neighbouring queries, in keys.
        padding: Keys by which the first query's first tap lies before the map; None centres the windows, which
            needs an odd ``kernel_size``. ``dilation * (kernel_size - 1)`` makes a sequence causal.
        border: ``'exclude'``: keys outside the map have no weight. ``'zero'``: they have their share of the weight,
            by their position logit and a content of 0, and the value 0 (the rule of dynamic convolution in fairseq).

    Returns:
        (B, M, *spatial_q, dv); 0 where every key of a window is outside or has the logit -inf.

    Raises:
        ValueError: a shape, a device or a number does not fit, or the map has no key.
        TypeError: the tensors are not floating or not of one dtype.
    """
    terms = (query, key, value, position_logits)
    check_tensors("value", value=value, query=query, key=key, position_logits=position_logits)
    if value.dim() not in (4, 5):
        raise ValueError(f"value must have shape (B, M, T, dv) or (B, M, H, W, dv), got {tuple(value.shape)}")
    axes = value.dim() - 3
    geometry = _geometry(axes, kernel_size, stride, padding, dilation, border)
    _check(terms, axes, geometry)
    if axes == 1:
        terms = tuple(t if t is None else t.unsqueeze(2) for t in terms)  # type: ignore[assignment]
    output = under_autocast(lambda *cast: _attend(cast, geometry, float(scale)), terms, value.device.type)
    return output.squeeze(2) if axes == 1 else output


def scripted_window_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    position_logits: Tensor | None,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    zero_border: bool,
    scale: float,
) -> Tensor:
    """:func:`window_attention` of maps for TorchScript, which has no keyword-only arguments and compiles no checks."""
    return torch.ops.attn_plugins.window_attention(
        query, key, value, position_logits, kernel_size, stride, padding, dilation, zero_border, scale
    )[0]


def _geometry(axes: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, border: str) -> Geometry:
    if border not in BORDERS:
        raise ValueError(f"border must be one of {', '.join(BORDERS)}, got {border!r}")
    kernel = expand("kernel_size", kernel_size, axes, 1)
    dilations = expand("dilation", dilation, axes, 1)
    if padding is None:
        if any(size % 2 == 0 for size in kernel):
            raise ValueError(f"kernel_size must be odd where padding centres the window, got {kernel_size!r}")
        paddings = tuple(size // 2 * step for size, step in zip(kernel, dilations))
    else:
        paddings = expand("padding", padding, axes, 0)
    lone, none = (1,) * (2 - axes), (0,) * (2 - axes)
    strides = expand("stride", stride, axes, 1)
    return Geometry(lone + kernel, lone + strides, none + paddings, lone + dilations, border == "zero")


def _check(terms: Terms, axes: int, geometry: Geometry) -> None:
    query, key, value, position_logits = terms
    spatial = "T" if axes == 1 else "H, W"
    B, M = value.shape[:2]
    if 0 in value.shape[2:-1]:
        raise ValueError(f"value must have at least one key, got shape {tuple(value.shape)}")
    if (query is None) != (key is None):
        raise ValueError("query and key must be given together, or both be None for position logits alone")
    if query is None and position_logits is None:
        raise ValueError("query or position_logits must be given: without both there are no queries")
    if query is not None and key is not None:
        check_dim("query", query, f"(B, M, {spatial}, d)")
        if query.shape[:2] != (B, M):
            raise ValueError(f"query must have value's batch and heads ({B}, {M}), got shape {tuple(query.shape)}")
        if key.shape != (*value.shape[:-1], query.shape[-1]):
            raise ValueError(
                f"key must have shape {(*value.shape[:-1], query.shape[-1])}, value's axes and query's width, "
                f"got {tuple(key.shape)}"
            )
    if position_logits is not None:
        check_dim("position_logits", position_logits, f"(B, M, {spatial}, taps)")
        taps = geometry.kernel[0] * geometry.kernel[1]
        grid = position_logits.shape[2:-1] if query is None else query.shape[2:-1]
        shape = (B, M, *grid, taps)
        fits = position_logits.shape[2:] == shape[2:]
        if not fits or any(n not in (1, m) for n, m in zip(position_logits.shape[:2], shape[:2])):
            raise ValueError(
                f"position_logits must have shape {shape}, {taps} taps of kernel_size, or size 1 in either of the "
                f"first two axes, got {tuple(position_logits.shape)}"
            )


def _attend(terms: Terms, geometry: Geometry, scale: float) -> Tensor:
    if by_reference():
        return reference.window_attention(*terms, *_flat(geometry), scale)  # type: ignore[arg-type]
    return torch.ops.attn_plugins.window_attention(*terms, *_flat(geometry), scale)[0]


# --- the operators: kernels, fake functions, gradients, FLOPs -----------------------------------------------------


def _flat(geometry: Geometry) -> tuple[list[int], list[int], list[int], list[int], bool]:
    kernel, stride, padding, dilation, zero_border = geometry
    return list(kernel), list(stride), list(padding), list(dilation), zero_border


def _outputs(terms: Terms) -> tuple[Tensor, Tensor]:
    """Uninitialised output, heads innermost but for the width as a projection wants them, and log-sum-exp."""
    query, _, value, position_logits = terms
    leader = position_logits if query is None else query
    assert leader is not None
    B, M, dv = value.shape[0], value.shape[1], value.shape[4]
    Hq, Wq = leader.shape[2:4]
    lse = value.new_empty((B, M, Hq, Wq), dtype=arithmetic_dtype(value.dtype))
    return value.new_empty((B, Hq, Wq, M, dv)).permute(0, 3, 1, 2, 4), lse


def _gradients(terms: Terms, needs: Sequence[bool]) -> list[Tensor]:
    """Uninitialised gradients, laid out as what they are the gradients of; empty where not needed."""
    value = terms[2]
    return [torch.empty_like(t) if t is not None and need else value.new_empty(0) for t, need in zip(terms, needs)]


def _forward(query, key, value, position_logits, kernel_size, stride, padding, dilation, zero_border, scale):
    terms, geometry = (
        (query, key, value, position_logits),
        Geometry(kernel_size, stride, padding, dilation, zero_border),
    )
    output, lse = _outputs(terms)
    with torch.autocast(value.device.type, enabled=False):
        if output.numel() == 0:
            lse.fill_(float("inf"))
        elif not _compiled(value):
            taps.forward(terms, geometry, scale, output, lse)
        elif value.device.type == "cpu":
            cpu.forward(terms, geometry, scale, output, lse)
        elif cuda.serves(terms):
            cuda.forward(terms, geometry, scale, output, lse)
        else:
            taps.forward(terms, geometry, scale, output, lse)
    return output, lse


def _backward(
    grad_output, query, key, value, position_logits, output, lse, kernel_size, stride, padding, dilation, zero_border,
    scale, needs,
):  # fmt: skip
    terms, geometry = (
        (query, key, value, position_logits),
        Geometry(kernel_size, stride, padding, dilation, zero_border),
    )
    results = _gradients(terms, needs)
    grads = [g if t is not None and need else None for t, g, need in zip(terms, results, needs)]
    with torch.autocast(value.device.type, enabled=False):
        if output.numel() == 0:
            for grad in results:
                grad.zero_()
        elif not _compiled(value):
            taps.backward(grad_output, terms, geometry, lse, scale, grads)
        elif value.device.type == "cpu":
            cpu.backward(grad_output, terms, geometry, lse, scale, grads)
        elif cuda.serves(terms):
            cuda.backward(grad_output, terms, geometry, output, lse, scale, grads)
        else:
            taps.backward(grad_output, terms, geometry, lse, scale, grads)
    return tuple(results)


def _compiled(value: Tensor) -> bool:
    return value.device.type in ("cpu", "cuda") and library.serves(value.device.type)


def _fake_forward(query, key, value, position_logits, *geometry):
    return _outputs((query, key, value, position_logits))


def _fake_backward(grad_output, query, key, value, position_logits, output, lse, *arguments):
    return tuple(_gradients((query, key, value, position_logits), arguments[-1]))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.arguments = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *output)


def _differentiate(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple:
    *terms, output, lse = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    if grad_output is None:
        return (None,) * 10
    grads = torch.ops.attn_plugins.window_attention_backward(grad_output, *terms, output, lse, *ctx.arguments, needs)
    return (*(grad if need else None for grad, need in zip(grads, needs)), *(None,) * 6)


def _setup_context_double(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad_output, *terms, _, _ = inputs[:7]
    ctx.arguments, ctx.needs = inputs[7:13], inputs[13]
    ctx.save_for_backward(grad_output, *terms)


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple:
    found = differentiate_twice(
        lambda *terms: reference.window_attention(*terms, *ctx.arguments),
        ctx.saved_tensors,
        ctx.needs,
        ctx.needs_input_grad[:5],
        grads,
    )
    return (*found, *(None,) * 9)


Shape = tuple[int, ...]


def _products(query_shape: Shape | None, value_shape: Shape, position_shape: Shape | None, kernel: Shape) -> tuple:
    """Operations of one content product and of one value product; taps outside the map count."""
    leader = query_shape or position_shape
    assert leader is not None
    pairs = 2 * value_shape[0] * value_shape[1] * leader[2] * leader[3] * kernel[0] * kernel[1]
    return (0 if query_shape is None else pairs * query_shape[4]), pairs * value_shape[4]


def _flops(query, key, value, position_logits, kernel_size, *args, out_shape=None, **kwargs):
    """Two per multiply-add of both products."""
    return sum(_products(query, value, position_logits, kernel_size))


def _flops_backward(
    grad_output, query, key, value, position_logits, output, lse, kernel_size, *args, out_shape=None, **kwargs
):
    """Recomputed logits, gradients of query and key; gradients of weights and value."""
    content, mixing = _products(query, value, position_logits, kernel_size)
    return 3 * content + 2 * mixing


_TERMS = "Tensor? query, Tensor? key, Tensor value, Tensor? position_logits"
_GEOMETRY = "int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool zero_border, float scale"
define(
    "window_attention",
    f"({_TERMS}, {_GEOMETRY}) -> (Tensor output, Tensor log_sum_exp)",
    _forward,
    _fake_forward,
    _differentiate,
    _setup_context,
    _flops,
)
define(
    "window_attention_backward",
    # Gradients that are not needed come back empty.
    f"(Tensor grad_output, {_TERMS}, Tensor output, Tensor log_sum_exp, {_GEOMETRY}, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_position_logits)",
    _backward,
    _fake_backward,
    _differentiate_twice,
    _setup_context_double,
    _flops_backward,
)
