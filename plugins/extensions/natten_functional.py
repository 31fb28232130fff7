"""Functions of ``natten.functional`` under the names that NATTEN 0.20 dropped (Hassani et al. 2023), on all devices.

``natten2dqkrpb``, ``na2d_qk`` and the like write out logits or read weights, (B, M, H, W, K²), and otherwise store
nothing for each tap; ``na1d`` and ``na2d`` store none of them. All have gradients of any order. Windows are moved
inward at the border; causal ones and strides are not served.

Shapes: B batch, M heads, L positions of a sequence or (H, W) of a map, d width of a head, K taps along an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import arithmetic_dtype
from ..modules.common.checks import pair
from ..ops import window_attention
from ..ops.window_attention.eager import add, at, taps
from ..ops.window_attention.operands import Options
from ..terms.neighborhood import neighborhood_logits

__all__ = [
    "na1d", "na1d_av", "na1d_qk", "na2d", "na2d_av", "na2d_qk",
    "natten1dav", "natten1dqk", "natten1dqkrpb", "natten2dav", "natten2dqk", "natten2dqkrpb",
]  # fmt: skip
Size = int | Sequence[int]


def natten2dqk(query: Tensor, key: Tensor, kernel_size: Size, dilation: Size = 1) -> Tensor:
    """Return the products of queries and the keys of their windows, (B, M, H, W, d) -> (B, M, H, W, K²).

    Raises:
        ValueError: A shape does not fit, or a map is smaller than the window.
    """
    return natten2dqkrpb(query, key, None, kernel_size, dilation)


def natten2dqkrpb(query: Tensor, key: Tensor, rpb: Tensor | None, kernel_size: Size, dilation: Size = 1) -> Tensor:
    """Return :func:`natten2dqk` plus biases by relative position, ``rpb`` (M, 2K - 1, 2K - 1)."""
    if key.shape != query.shape:
        raise ValueError(f"key must have query's shape {tuple(query.shape)}, got {tuple(key.shape)}")
    options = _options(query, "query", kernel_size, dilation)
    logits = _Products.apply(query, key, options)
    if rpb is None:
        return logits
    shape = query.shape[1], *(2 * n - 1 for n in options.kernel_size)
    if rpb.shape != shape:
        raise ValueError(f"rpb must have shape {shape}, heads of query and offsets, got {tuple(rpb.shape)}")
    biases = neighborhood_logits(rpb, query.shape[2:4], options.kernel_size, options.dilation)
    return logits + biases.to(logits.dtype)


def natten2dav(attn: Tensor, value: Tensor, kernel_size: Size, dilation: Size = 1) -> Tensor:
    """Return sums of values by the weights ``attn``, (B, M, H, W, K²) and (B, M, H, W, d) -> (B, M, H, W, d).

    Raises:
        ValueError: A shape does not fit, or a map is smaller than the window.
    """
    options = _options(value, "value", kernel_size, dilation)
    shape = *value.shape[:-1], options.kernel_size[0] * options.kernel_size[1]
    if attn.shape != shape:
        raise ValueError(f"attn must have shape {shape}, positions of value and taps, got {tuple(attn.shape)}")
    return _Sums.apply(attn, value, options)


def natten1dqk(query: Tensor, key: Tensor, kernel_size: int, dilation: int = 1) -> Tensor:
    """Return :func:`natten2dqk` of sequences, (B, M, L, d) -> (B, M, L, K)."""
    return natten1dqkrpb(query, key, None, kernel_size, dilation)


def natten1dqkrpb(query: Tensor, key: Tensor, rpb: Tensor | None, kernel_size: int, dilation: int = 1) -> Tensor:
    """Return :func:`natten2dqkrpb` of sequences, with ``rpb`` (M, 2K - 1)."""
    rpb = rpb if rpb is None else rpb.unsqueeze(1)
    return natten2dqkrpb(query.unsqueeze(2), key.unsqueeze(2), rpb, (1, kernel_size), (1, dilation)).squeeze(2)


def natten1dav(attn: Tensor, value: Tensor, kernel_size: int, dilation: int = 1) -> Tensor:
    """Return :func:`natten2dav` of sequences, (B, M, L, K) and (B, M, L, d) -> (B, M, L, d)."""
    return natten2dav(attn.unsqueeze(2), value.unsqueeze(2), (1, kernel_size), (1, dilation)).squeeze(2)


def na2d_qk(
    query: Tensor, key: Tensor, kernel_size: Size, dilation: Size = 1, *, rpb: Tensor | None = None, **others: Any
) -> Tensor:
    """Return :func:`natten2dqkrpb`, as NATTEN 0.17 to 0.19 call it; ``others`` are refused as by :func:`na2d`."""
    _refuse(**others)
    return natten2dqkrpb(query, key, rpb, kernel_size, dilation)


def na2d_av(attn: Tensor, value: Tensor, kernel_size: Size, dilation: Size = 1, **others: Any) -> Tensor:
    """Return :func:`natten2dav`, likewise."""
    _refuse(**others)
    return natten2dav(attn, value, kernel_size, dilation)


def na1d_qk(
    query: Tensor, key: Tensor, kernel_size: int, dilation: int = 1, *, rpb: Tensor | None = None, **others: Any
) -> Tensor:
    """Return :func:`natten1dqkrpb`, likewise."""
    _refuse(**others)
    return natten1dqkrpb(query, key, rpb, kernel_size, dilation)


def na1d_av(attn: Tensor, value: Tensor, kernel_size: int, dilation: int = 1, **others: Any) -> Tensor:
    """Return :func:`natten1dav`, likewise."""
    _refuse(**others)
    return natten1dav(attn, value, kernel_size, dilation)


def _refuse(is_causal: bool | Sequence[bool] = False, stride: Size = 1, **others: Any) -> None:
    """Raise NotImplementedError for options that would change the result."""
    causal = any(is_causal) if isinstance(is_causal, Sequence) else is_causal
    given = [name for name, option in others.items() if option is not None]
    if causal or pair("stride", stride) != (1, 1) or given:
        raise NotImplementedError(
            "attn_plugins stands in for natten, and has no causal windows, strides or other options of its functions: "
            f"got is_causal={is_causal}, stride={stride}{''.join(f', {name}' for name in given)}. Install natten"
        )


def na2d(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: Size, *, stride: Size = 1, dilation: Size = 1,
    is_causal: bool | Sequence[bool] = False, rpb: Tensor | None = None, scale: float | None = None, **others: Any,
) -> Tensor:  # fmt: skip
    """Return neighborhood attention, (B, H, W, M, d) -> (B, H, W, M, d), by ``window_attention``.

    Args:
        query, key, value: (B, H, W, M, d).
        kernel_size: K, of both axes or of each.
        stride: Must be 1.
        dilation: Distance of neighboring taps.
        is_causal: Must be False.
        rpb: (M, 2K - 1, 2K - 1), biases by relative position.
        scale: Factor of the products; None for d^-½.
        **others: Choices of kernels; those that are not None are refused, as they may change the result.

    Raises:
        ValueError: A shape does not fit, or a map is smaller than the window.
        NotImplementedError: An option is not served.
    """
    _refuse(is_causal, stride, **others)
    q, k, v = (t.movedim(-2, 1) for t in (query, key, value))
    kernel, step = pair("kernel_size", kernel_size), pair("dilation", dilation)
    position = None if rpb is None else neighborhood_logits(rpb, v.shape[2:4], kernel, step).to(query.dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return window_attention(q, k, v, position, kernel, dilation=step, scale=scale, border="inside").movedim(1, -2)


def na1d(query: Tensor, key: Tensor, value: Tensor, kernel_size: Size, **options: Any) -> Tensor:
    """Return :func:`na2d` of sequences, (B, L, M, d) -> (B, L, M, d), with ``rpb`` (M, 2K - 1)."""
    rows: dict[str, Any] = {
        name: (1, *option) if isinstance(option, Sequence) else (1, option)
        for name, option in dict(kernel_size=kernel_size, **options).items()
        if name in ("kernel_size", "dilation", "stride")
    }
    if (rpb := options.get("rpb")) is not None:
        rows["rpb"] = rpb.unsqueeze(1)
    return na2d(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), **{**options, **rows}).squeeze(1)


def _options(tensor: Tensor, name: str, kernel_size: Size, dilation: Size) -> Options:
    """Check a map and return the geometry of its windows."""
    kernel, step = pair("kernel_size", kernel_size), pair("dilation", dilation)
    if tensor.dim() != 5:
        raise ValueError(f"{name} must have shape (B, M, H, W, d), or (B, M, L, d), got {tuple(tensor.shape)}")
    if any(n < taps * d for n, taps, d in zip(tensor.shape[2:4], kernel, step)):
        raise ValueError(
            f"{name} must have at least kernel_size * dilation positions along each axis, got a map of "
            f"{tuple(tensor.shape[2:4])} for kernel_size {kernel} and dilation {step}"
        )
    return Options(kernel, (1, 1), (0, 0), step, "inside", 1.0)


# --- products, sums, and sums by keys, of which each has the others as its gradients ----------------------------------


class _Products(torch.autograd.Function):
    """Products of queries and the keys of their taps, (B, M, H, W, taps)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, options: Options) -> Tensor:
        a, b = _saved(ctx, query, key, options)
        return torch.stack([(a * at(b, keys)).sum(-1) for keys in _taps(query, options)], -1).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        return _gradients(ctx, lambda of: _Sums.apply(grad, key, of), lambda of: _Spread.apply(grad, query, of))


class _Sums(torch.autograd.Function):
    """Sums over taps of weights and of the values of keys, (B, M, H, W, d)."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, options: Options) -> Tensor:
        a, b = _saved(ctx, weights, value, options)
        total = torch.zeros_like(b)
        for t, keys in enumerate(_taps(value, options)):
            total.addcmul_(a[..., t, None], at(b, keys))
        return total.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, value = ctx.saved_tensors
        return _gradients(ctx, lambda of: _Products.apply(grad, value, of), lambda of: _Spread.apply(weights, grad, of))


class _Spread(torch.autograd.Function):
    """Sums, for every key, over the queries that see it, of weights and of what queries have, (B, M, H, W, d)."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, source: Tensor, options: Options) -> Tensor:
        a, b = _saved(ctx, weights, source, options)
        total = torch.zeros_like(b)
        for t, keys in enumerate(_taps(source, options)):
            add(total, keys, a[..., t, None] * b)
        return total.to(source.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, source = ctx.saved_tensors
        return _gradients(ctx, lambda of: _Products.apply(source, grad, of), lambda of: _Sums.apply(weights, grad, of))


def _saved(ctx: Any, a: Tensor, b: Tensor, options: Options) -> list[Tensor]:
    """Keep the operands for the backward, and return them in the dtype of the arithmetic."""
    ctx.save_for_backward(a, b)
    ctx.options = options
    dtype = arithmetic_dtype(torch.promote_types(a.dtype, b.dtype))
    return [a.to(dtype), b.to(dtype)]


def _gradients(ctx: Any, *of: Callable[[Options], Tensor]) -> tuple[Tensor | None, ...]:
    found = zip(of, ctx.saved_tensors, ctx.needs_input_grad)
    return (*(grad(ctx.options).to(t.dtype) if needed else None for grad, t, needed in found), None)


def _taps(tensor: Tensor, options: Options) -> list[tuple]:
    size = tensor.shape[2:4]
    return [keys for *_, keys in taps(size, size, options)]
