"""Region "window": attention to the keys around each query, of sequences and of maps.

Local bilateral attention, dynamic convolution, stand-alone local attention and range-limited generalized attention
use this operator with different logits. Compiled kernels (``csrc/window_attention``) compute it on CPUs and on CUDA,
Triton's on CUDA where none are compiled; elsewhere it is computed in plain PyTorch, tap by tap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from ...core.arguments import broadcasts, check_tensors, expand, finite
from ...core.attention import check_query_and_key, counts_of_products, empty_results
from ...core.operator import Operator
from . import cpu, cuda, eager, reference, triton
from .operands import Options, Terms

Border = Literal["exclude", "zero", "inside"]


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
    border: Border = "exclude",
) -> Tensor:
    """Attend from every position to the keys of a window around it (Thesis, Eq. 4.9; Zhu et al. 2019, section 3).

    The weight of tap t for query q, whose key is k = q * stride - padding + t * dilation, is the softmax over the
    window's taps of

        scale * query[q]·key[k] + position_logits[q, t]

    where an absent term counts as 0. Taps are in row-major order. Sequences have one spatial axis, maps have two.
    Nothing is unfolded: the only extra memory is packed copies of queries, keys and values and, in the backward, the
    weights of one or more heads. Second derivatives hold all windows.

    Args:
        query: (B, M, *spatial_q, d); None, together with ``key``, for position logits alone.
        key: (B, M, *spatial, d).
        value: (B, M, *spatial, dv).
        position_logits: (B, M, *spatial_q, taps), or size 1 in the first two axes to share logits between images or
            heads; None for content alone.
        kernel_size: Taps along each axis.
        dilation: Distance between neighboring taps, in keys.
        scale: Factor of the content term.
        stride: Distance between neighboring queries, in keys.
        padding: How many keys before the map the first tap of the first query lies. None centres the windows, which
            needs an odd ``kernel_size`` unless they stay inside the map; ``dilation * (kernel_size - 1)`` makes a
            sequence causal.
        border: ``'exclude'`` gives keys outside the map no weight. ``'zero'`` counts them as zero keys with zero
            values: they take part in the softmax with their position logit, as in fairseq's dynamic convolution.
            ``'inside'`` moves windows inward, by multiples of the dilation, until all their taps are on the map, as in
            neighborhood attention (Hassani et al. 2023; Hassani and Shi 2022): with n keys at multiples of the
            dilation from a query, the query itself at place i of them, its window starts at place
            min(max(i - kernel_size // 2, 0), n - kernel_size). Tap t is then the t-th key of the window, whatever its
            distance; :func:`attn_plugins.terms.neighborhood.neighborhood_logits` looks up biases by distance.
            ``stride`` must be 1, ``padding`` None, and ``kernel_size * dilation`` at most the map's size.

    Returns:
        (B, M, *spatial_q, dv); 0 if every key of a window is outside the map or has the logit -inf.

    Raises:
        ValueError: A shape, a device or a number does not match, or the map is empty.
        TypeError: The tensors are not floating-point or do not share one dtype.
    """
    terms = Terms(query, key, value, position_logits)
    check_tensors("value", **terms._asdict())
    if value.dim() not in (4, 5):
        raise ValueError(f"value must have shape (B, M, T, dv) or (B, M, H, W, dv), got {tuple(value.shape)}")
    if 0 in value.shape[2:-1]:
        raise ValueError(f"value must have at least one key, got shape {tuple(value.shape)}")
    axes = value.dim() - 3
    spatial = "T" if axes == 1 else "H, W"
    check_query_and_key(query, key, value, f"(B, M, {spatial}, d)")
    if position_logits is not None and position_logits.dim() != value.dim():
        raise ValueError(
            f"position_logits must have shape (B, M, {spatial}, taps), as many axes as value, "
            f"got {tuple(position_logits.shape)}"
        )
    options = _options(axes, kernel_size, stride, padding, dilation, border, finite("scale", scale))
    _check(terms, options)
    if border == "inside":
        _check_inside(terms, options, axes, padding)
    if axes == 2:
        return ATTEND(terms, options)
    return ATTEND(Terms(*(t if t is None else t.unsqueeze(2) for t in terms)), options).squeeze(2)  # type: ignore[arg-type]


def _options(
    axes: int, kernel_size: Any, stride: Any, padding: Any, dilation: Any, border: str, scale: float
) -> Options:
    if border not in get_args(Border):
        raise ValueError(f"border must be one of {', '.join(get_args(Border))}, got {border!r}")
    kernel = expand("kernel_size", kernel_size, axes, 1)
    dilations = expand("dilation", dilation, axes, 1)
    if padding is None:
        if border != "inside" and 0 in [size % 2 for size in kernel]:
            raise ValueError(
                f"kernel_size must be odd if padding is None, which centres the window, got {kernel_size!r}"
            )
        paddings = tuple([size // 2 * step for size, step in zip(kernel, dilations)])
    else:
        paddings = expand("padding", padding, axes, 0)
    lone, none = (1,) * (2 - axes), (0,) * (2 - axes)
    strides = expand("stride", stride, axes, 1)
    return Options(lone + kernel, lone + strides, none + paddings, lone + dilations, border, scale)


def _check(terms: Terms, options: Options) -> None:
    query, _, value, position_logits = terms
    B, M = value.shape[:2]
    if query is None and position_logits is None:
        raise ValueError("query or position_logits must be given: without both there are no queries")
    if position_logits is not None:
        taps = options.kernel_size[0] * options.kernel_size[1]
        grid = position_logits.shape[2:-1] if query is None else query.shape[2:-1]
        shape = (B, M, *grid, taps)
        of_query = "" if query is None else ", positions of query"
        if not broadcasts(position_logits, shape, 2):
            raise ValueError(
                f"position_logits must have shape {shape}, batch and heads of value{of_query} and {taps} taps of "
                f"kernel_size, or size 1 in either of the first two axes, got {tuple(position_logits.shape)}"
            )


def _check_inside(terms: Terms, options: Options, axes: int, padding: Any) -> None:
    if padding is not None or max(options.stride) > 1:
        raise ValueError(
            f"stride must be 1 and padding None if border is 'inside', got {options.stride[2 - axes :]} and {padding}"
        )
    query, _, value, position_logits = terms
    leader: Any = position_logits if query is None else query
    size, grid = value.shape[2:-1], leader.shape[2:-1]
    if grid != size:
        raise ValueError(
            f"{'position_logits' if query is None else 'query'} must have the positions of value, {tuple(size)}, if "
            f"border is 'inside', got {tuple(grid)}"
        )
    for keys, taps, step in zip(size, options.kernel_size[2 - axes :], options.dilation[2 - axes :]):
        if taps * step > keys:
            raise ValueError(
                f"value must have at least kernel_size * dilation = {taps * step} keys along each axis if border is "
                f"'inside', got {tuple(size)}"
            )


# --- the operator -------------------------------------------------------------------------------------------------


def _results(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    leader: Any = terms.position_logits if terms.query is None else terms.query
    return empty_results(terms.value, *leader.shape[2:4])


def _products(terms: Any, options: Options) -> tuple[int, int]:
    """Count the operations of one content and of one value product, including taps outside the map."""
    query, _, value, position_logits = terms
    leader = query or position_logits
    pairs = 2 * value[0] * value[1] * leader[2] * leader[3] * options.kernel_size[0] * options.kernel_size[1]
    return (0 if query is None else pairs * query[4]), pairs * value[4]


ATTEND = Operator(
    "window_attention",
    Terms,
    Options,
    ("output", "log_sum_exp"),
    fake=_results,
    reference=lambda terms, options: reference.window_attention(*terms, *options),
    table=[cpu.BACKEND, cuda.BACKEND, triton.BACKEND, eager.BACKEND],
    **counts_of_products(_products),
)
