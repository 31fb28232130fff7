"""Region "sampled": attention to a few points per query, on maps of several sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.arguments import (
    FLOATS,
    LARGEST,
    arithmetic_dtype,
    autocast_dtype,
    check_dim,
    check_tensors,
    expand,
    integer,
    is_size,
)
from ...core.gradients import is_compiling
from ...core.operator import Operator
from . import cpu, cuda, eager, onnx, reference, triton
from .operands import Options, Terms

NanPolicy = Literal["zero", "propagate"]
NAN_POLICIES = get_args(NanPolicy)


def deformable_attention(
    value: Tensor,
    spatial_shapes: Tensor | Sequence[Sequence[int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points: Sequence[int] | None = None,
    *,
    nan_policy: NanPolicy = "zero",
) -> Tensor:
    """Compute multi-scale deformable attention (Zhu et al. 2021, Eq. 3), without its projections.

    ::

        output[b, q, m] = sum_lk attention_weights[b, q, m, l, k] * value_l(sampling_locations[b, q, m, l, k])

    where ``value_l`` is interpolated bilinearly at (x, y) and is 0 outside the map. Pixel i of W spans x = i / W to
    (i + 1) / W, as in ``torch.nn.functional.grid_sample(align_corners=False)``. At pixel centres, where the
    interpolation has a kink, the derivative is the one-sided derivative to the right.

    Locations and weights have the value's dtype. They may be float32 if the value is in half precision or under
    autocast, which casts only the value. Interpolation and sums are computed in float32, or in float64 for float64
    values.

    Under ``torch.use_deterministic_algorithms(True)``, two runs have equal bits. The CUDA kernels then sum the value's
    gradient in integers: with 22,323 queries and 4 points a level, each term errs by at most 2^-41 times the largest
    weight and the largest gradient. PyTorch computes float64's backward there, and that of calls which Triton serves.

    Args:
        value: (B, S, M, d): the pixels of L maps, one map after another in row-major order, S = sum of H_l * W_l.
        spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), or an integer Tensor (L, 2), which is copied to the host. For a
            Tensor, ``torch.compile`` breaks the graph, unless ``torch._dynamo.config.capture_scalar_outputs`` is set.
        sampling_locations: (B, Q, M, L, K, 2) as (x, y), from 0 to 1 on the map; (B, Q, M, P, 2) with ``points``.
        attention_weights: (B, Q, M, L, K); (B, Q, M, P) with ``points``. They need not sum to 1.
        points: How many of the P points lie on each level, if levels differ; None if each has K.
        nan_policy: What a location reads whose x or y is NaN or infinite. ``'zero'``: 0, as in mmcv's kernels and in
            ``grid_sample`` on CUDA. ``'propagate'``: NaN, as in ``grid_sample`` on CPUs, so that the output is NaN,
            and so are the gradients of its weight and of the other coordinate; the value gets none from it.

    Returns:
        (B, Q, M * d), in the value's dtype.

    Raises:
        ValueError: A shape or a device does not match, or ``nan_policy`` is unknown.
        TypeError: An argument is not a Tensor or has an unsupported dtype.
    """
    if nan_policy not in NAN_POLICIES:
        raise ValueError(f"nan_policy must be one of {', '.join(NAN_POLICIES)}, got {nan_policy!r}")
    check_tensors("value", value=value)
    check_dim("value", value, "(B, S, M, d)")
    _check_matches("sampling_locations", sampling_locations, value)
    _check_matches("attention_weights", attention_weights, value)
    shapes = shapes_on_host(spatial_shapes)
    B, S, M, d = value.shape
    pixels = sum(h * w for h, w in shapes)
    if is_compiling():  # symbols of a Tensor's values allow no condition
        torch._check(pixels == S)
    elif pixels != S:
        raise ValueError(f"spatial_shapes must have as many pixels as value has keys, {S}, got {shapes}")
    L = len(shapes)
    Q = attention_weights.shape[1] if attention_weights.dim() > 1 else 0
    if points is None:
        check_dim("attention_weights", attention_weights, "(B, Q, M, L, K)")
        check_dim("sampling_locations", sampling_locations, "(B, Q, M, L, K, 2)")
        counts: tuple[int, ...] = (attention_weights.shape[4],) * L
        expected: tuple[int, ...] = (B, Q, M, L, counts[0])
    else:
        counts = expand("points", list(points) if isinstance(points, Sequence) else points, L, 0)
        check_dim("attention_weights", attention_weights, "(B, Q, M, P)")
        check_dim("sampling_locations", sampling_locations, "(B, Q, M, P, 2)")
        expected = (B, Q, M, sum(counts))
    if attention_weights.shape != expected:
        raise ValueError(
            f"attention_weights must have shape {expected}: batch and heads as in value, {L} levels as in "
            f"spatial_shapes, got {tuple(attention_weights.shape)}"
        )
    if sampling_locations.shape != (*expected, 2):
        raise ValueError(
            f"sampling_locations must have shape {(*expected, 2)}, one (x, y) for each of attention_weights, "
            f"got {tuple(sampling_locations.shape)}"
        )
    sizes: list[Any] = [size for shape in shapes for size in shape]  # symbols while tracing
    return ATTEND(
        Terms(value, sampling_locations, attention_weights), Options(sizes, list(counts), nan_policy == "propagate")
    )


def policy_of_grid_sample(tensor: Tensor) -> NanPolicy:
    """Return what ``grid_sample`` does on a tensor's device: it propagates NaN on CPUs alone.

    Layers of other packages compute deformable attention by ``grid_sample`` on CPUs, and by kernels or by it on CUDA.
    """
    return "propagate" if tensor.device.type == "cpu" else "zero"


def shapes_on_host(spatial_shapes: Any) -> list[tuple[int, int]]:
    """Return ``spatial_shapes`` as numbers; a Tensor is copied from a GPU once for all layers of a model.

    On a GPU, a change by other means than PyTorch's operations, such as ``.data``, is not noticed.

    Raises:
        ValueError: It does not hold (H, W) of at least one level.
    """
    if isinstance(spatial_shapes, Tensor):
        # NumPy may change what is on the host; tensors of inference mode have no version.
        counted = not (is_compiling() or spatial_shapes.is_cpu or spatial_shapes.is_inference())
        version, shapes = _COPIED.get(spatial_shapes, (None, [])) if counted else (None, [])
        if counted and version == spatial_shapes._version:
            return shapes
        if spatial_shapes.dtype.is_floating_point or spatial_shapes.dtype == torch.bool or spatial_shapes.dim() != 2:
            raise ValueError(
                f"spatial_shapes must be an integer Tensor (L, 2), got {spatial_shapes.dtype} of shape "
                f"{tuple(spatial_shapes.shape)}"
            )
        numbers = spatial_shapes.tolist()
        shapes = shapes_on_host(numbers) if is_compiling() else _of_numbers(tuple(map(tuple, numbers)))
        if counted:
            _COPIED[spatial_shapes] = spatial_shapes._version, shapes
        return shapes
    if not isinstance(spatial_shapes, Sequence) or not spatial_shapes:
        raise ValueError(f"spatial_shapes must hold (H, W) of at least one level, got {spatial_shapes!r}")
    sized = _checked_size if is_compiling() else _size
    shapes = [sized(*shape) if _is_pair(shape) else None for shape in spatial_shapes]
    if None in shapes:
        raise ValueError(
            f"spatial_shapes must hold (H, W), two ints of at least 1, for each level, got {spatial_shapes!r}"
        )
    return shapes


@lru_cache(maxsize=1024)
def _of_numbers(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    return shapes_on_host(shapes)


def _is_pair(shape: Any) -> bool:
    return isinstance(shape, Sequence) and len(shape) == 2


def _size(*shape: Any) -> tuple[int, int] | None:
    """Return two ints of at least 1, or None for anything else."""
    H, W = map(integer, shape)
    return (H, W) if H is not None and W is not None and 1 <= H <= LARGEST and 1 <= W <= LARGEST else None


def _checked_size(H: Any, W: Any) -> tuple[int, int] | None:
    """Return two sizes in a graph, which checks symbols, or None for anything else."""
    if not (is_size(H) and is_size(W)):
        return None
    torch._check(H >= 1)
    torch._check(W >= 1)
    return H, W


_COPIED = WeakTensorKeyDictionary()  # version and shapes of each Tensor that exists


def _check_matches(name: str, tensor: Any, value: Tensor) -> None:
    """Check that locations or weights are dense, on the value's device and of a dtype that its dtype allows."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense Tensor, got one of layout {tensor.layout}")
    if tensor.device != value.device:
        raise ValueError(f"{name} must be on value's device {value.device}, got {tensor.device}")
    if tensor.dtype == value.dtype:
        return
    fitting = {value.dtype, arithmetic_dtype(value.dtype)}
    if autocast_dtype(value.device.type) is not None:
        fitting = set(FLOATS)
    if tensor.dtype not in fitting:
        names = " or ".join(sorted(str(dtype) for dtype in fitting))
        raise TypeError(f"{name} must be {names} for a value of {value.dtype}, got {tensor.dtype}")


# --- the operator -------------------------------------------------------------------------------------------------


def _results(terms: Terms, options: Options) -> tuple[Tensor]:
    """Return an uninitialized output."""
    B, _, M, d = terms.value.shape
    return (terms.value.new_empty(B, terms.weights.shape[1], M * d),)


def _gradient(name: str, term: Tensor) -> Tensor:
    """Return an uninitialized gradient, contiguous for the kernels."""
    return term.new_empty(term.shape)


def _operations(terms: Any, options: Options) -> int:
    """Count 4 multiply-adds for interpolation and 1 for the sum: the factor 5 of Zhu et al. (2021), section 4.1."""
    return 2 * 5 * math.prod(terms.weights) * terms.value[3]


def _backward_operations(terms: Any, options: Options, needs: Sequence[bool]) -> int:
    """Count products of the gradient with four pixels per sample, and the addition of its share to each of them."""
    return 2 * 4 * (int(needs[1] or needs[2]) + int(needs[0])) * math.prod(terms.weights) * terms.value[3]


ATTEND = Operator(
    "deformable_attention",
    Terms,
    Options,
    ("output",),
    fake=_results,
    fake_gradient=_gradient,
    reference=reference.deformable_attention,
    table=[cpu.BACKEND, cuda.BACKEND, triton.BACKEND, eager.BACKEND],
    operations=_operations,
    backward_operations=_backward_operations,
    onnx=onnx.node,
    cast=("value",),
)
