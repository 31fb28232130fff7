"""Deformable position-sensitive RoI pooling (Dai et al. 2017, section 2.2), of DCNv2 and of mmdetection before 2.4.

mmcv's deformable RoIPool is another function: it has neither groups nor classes, and samples other points. These are
the functions of the extensions ``deform_pool_cuda`` and ``deform_pool_ext``; DCNv2 and maskrcnn-benchmark share them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mmcv_ext.calls import check, check_floats, check_shape, write
from ..mmcv_ext.maps import gradients
from ..mmcv_ext.regions import BLOCK, check_rois
from ..ops.deformable_attention.without_autograd import cast, without_autograd
from .deform_conv import not_served

__all__ = [
    "deform_psroi_pooling_backward",
    "deform_psroi_pooling_cuda_backward",
    "deform_psroi_pooling_cuda_forward",
    "deform_psroi_pooling_forward",
]
__getattr__ = not_served("deform_pool_ext or deform_pool_cuda", __all__)


class Bins(NamedTuple):
    """Numbers of the compiled functions, in their order: P x P bins, each the average of S x S samples."""

    no_trans: bool
    spatial_scale: float
    output_dim: int
    group_size: int
    pooled_size: int
    part_size: int
    sample_per_part: int
    trans_std: float

    @classmethod
    def of(cls, numbers: Sequence[Any]) -> Bins:
        """Read the numbers that follow the tensors."""
        if len(numbers) != len(cls._fields):
            raise TypeError(f"the numbers must be {', '.join(cls._fields)}, got {tuple(numbers)}")
        return cls._make(numbers)


def pool(input: Tensor, rois: Tensor, offset: Tensor, bins: Bins) -> tuple[Tensor, Tensor]:
    """Return the averages and the numbers of their samples, each (R, O, P, P), in the input's dtype.

    Args:
        input: (B, O * G * G, H, W): for each output channel, maps for the G x G groups of bins.
        rois: (R, 5) of (image, x1, y1, x2, y2) in pixels of the picture, which are rounded.
        offset: (R, 2 * K, part_size, part_size), (x, y) of K classes of O / K output channels, times ``trans_std`` in
            units of the region's size; ignored with ``no_trans``. There may be more than R, as in DCNv2's own test.
        bins: The numbers.
    """
    _check(input, rois, offset, bins)
    regions, *terms = _wide(rois, input, offset)
    parts = [_pool(regions[block], bins, *_of(block, bins, *terms)) for block in _blocks(rois, bins)]
    output, count = (torch.cat(tensors) for tensors in zip(*parts))
    return cast(output, input.dtype), cast(count, input.dtype)


def pool_gradients(
    grad_output: Tensor, input: Tensor, rois: Tensor, offset: Tensor, bins: Bins
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and offset; that of an ignored offset is 0."""
    _check(input, rois, offset, bins)
    check_shape("grad_output", grad_output, len(rois), bins.output_dim, bins.pooled_size, bins.pooled_size)
    regions, *terms = _wide(rois, input, offset)
    of_input, of_offset = (torch.zeros_like(term) for term in terms)
    for block in _blocks(rois, bins):
        average = lambda *given: _pool(regions[block], bins, *given)[0]  # noqa: B023, E731  called right here
        grads = gradients(average, _of(block, bins, *terms), grad_output[block])
        of_input += grads[0]
        if not bins.no_trans:
            of_offset[block] = grads[1]
    return cast(of_input, input.dtype), cast(of_offset, offset.dtype)


def deform_psroi_pooling_forward(
    input: Tensor, bbox: Tensor, trans: Tensor, out: Tensor, top_count: Tensor, *bins: Any
) -> None:
    """Write :func:`pool` of these operands and of the numbers of :class:`Bins` into ``out`` and ``top_count``."""
    with without_autograd(input):
        for target, result in zip((out, top_count), pool(input, bbox, trans, Bins.of(bins))):
            check_shape("out and top_count", target, *result.shape)
            write(target, result)


def deform_psroi_pooling_backward(
    out_grad: Tensor,
    input: Tensor,
    bbox: Tensor,
    trans: Tensor,
    top_count: Tensor,
    input_grad: Tensor,
    trans_grad: Tensor,
    *bins: Any,
) -> None:
    """Add :func:`pool_gradients` to ``input_grad`` and ``trans_grad``."""
    with without_autograd(input):
        for target, grad in zip((input_grad, trans_grad), pool_gradients(out_grad, input, bbox, trans, Bins.of(bins))):
            target += grad


# as ``deform_pool_cuda`` calls them
deform_psroi_pooling_cuda_forward = deform_psroi_pooling_forward
deform_psroi_pooling_cuda_backward = deform_psroi_pooling_backward


def _check(input: Tensor, rois: Tensor, offset: Tensor, bins: Bins) -> None:
    P, G, O = bins.pooled_size, bins.group_size, bins.output_dim
    check(min(G, O, bins.sample_per_part, bins.part_size) > 0, f"the numbers of bins must be positive, got {bins}")
    check_rois(input, rois, P, P, bins.spatial_scale)
    check_shape("input", input, "B", O * G * G, "H", "W")
    if not bins.no_trans:
        check_shape("offset", offset[: len(rois)], len(rois), "2 * K", bins.part_size, bins.part_size)
        check_floats("input", input=input, offset=offset)
        K, odd = divmod(offset.shape[1], 2)
        fits = K and not odd and not O % K
        check(bool(fits), f"offset must have 2 * K channels, where K divides output_dim {O}, got {offset.shape[1]}")


def _wide(*operands: Tensor) -> list[Tensor]:
    """Return the operands in one dtype, float32 or wider."""
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in operands), torch.float32)
    return [tensor.to(dtype) for tensor in operands]


def _of(block: slice, bins: Bins, input: Tensor, offset: Tensor) -> list[Tensor]:
    """Return the operands of a block that have gradients."""
    return [input] if bins.no_trans else [input, offset[block]]


def _blocks(rois: Tensor, bins: Bins) -> list[slice]:
    """Return blocks of regions, none of which gathers many values at once."""
    values = bins.output_dim * (bins.pooled_size * bins.sample_per_part) ** 2
    size = max(1, BLOCK // values)
    return [slice(first, min(first + size, len(rois))) for first in range(0, max(1, len(rois)), size)]


def _pool(rois: Tensor, bins: Bins, maps: Tensor, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the averages and the numbers of samples, which are those at most half a pixel outside the map."""
    (H, W), P, O = maps.shape[2:], bins.pooled_size, bins.output_dim
    y, x = _positions(rois, offset, bins)  # (R, K, P, P, S, S)
    inside = (x >= -0.5) & (x <= W - 0.5) & (y >= -0.5) & (y <= H - 0.5)
    y, x, inside = (t[:, :, None] for t in (torch.where(inside, y, 0), torch.where(inside, x, 0), inside))
    y, x = y.clamp(0, H - 1), x.clamp(0, W - 1)
    top, left = y.detach().floor(), x.detach().floor()
    down, across = y - top, x - left
    rows, columns = ((top.long(), y.detach().ceil().long()), (left.long(), x.detach().ceil().long()))
    image = rois[:, 0].long().view(-1, *[1] * 6)
    channel = _channels(bins, maps.device).view(1, x.shape[1], -1, P, P, 1, 1)
    upper, lower = (
        maps[image, channel, row, columns[0]] * (1 - across) + maps[image, channel, row, columns[1]] * across
        for row in rows
    )
    samples = torch.where(inside, upper * (1 - down) + lower * down, 0)  # (R, K, O / K, P, P, S, S)
    count = inside.sum((-2, -1))
    shape = len(rois), O, P, P
    averages = samples.sum((-2, -1)) / count.clamp(min=1)
    return averages.view(shape), count.to(maps.dtype).expand(averages.shape).reshape(shape)


def _channels(bins: Bins, device: torch.device) -> Tensor:
    """Return the channel that each bin of each output channel reads, (O, P, P)."""
    group = torch.arange(bins.pooled_size, device=device) * bins.group_size // bins.pooled_size
    output = torch.arange(bins.output_dim, device=device)[:, None, None]
    return (output * bins.group_size + group[:, None]) * bins.group_size + group


def _positions(rois: Tensor, offset: Tensor | None, bins: Bins) -> tuple[Tensor, Tensor]:
    """Return rows and columns of all samples on the map, (R, K, P, P, S, S) of K classes, 1 without offsets."""
    corners = rois[:, 1:]
    corners = corners.trunc() + (corners.frac().abs() >= 0.5) * corners.sign()  # C's round: away from 0
    low, high = corners[:, :2] * bins.spatial_scale - 0.5, (corners[:, 2:] + 1) * bins.spatial_scale - 0.5
    extent = (high - low).clamp(min=0.1)  # (R, 2) of (x, y)
    bin, sample = (
        torch.arange(n, dtype=rois.dtype, device=rois.device) for n in (bins.pooled_size, bins.sample_per_part)
    )
    steps = (bin[:, None] + sample / bins.sample_per_part) / bins.pooled_size  # (P, S)
    grid = low[..., None, None] + extent[..., None, None] * steps  # (R, 2, P, S)
    y, x = grid[:, 1, None, :, None, :, None], grid[:, 0, None, None, :, None, :]
    if offset is not None:
        part = (bin / bins.pooled_size * bins.part_size).floor().long()
        moves = offset.unflatten(1, (-1, 2))[..., part[:, None], part]  # (R, K, 2, P, P)
        moves = (moves * bins.trans_std * extent[:, None, :, None, None])[..., None, None]
        y, x = y + moves[:, :, 1], x + moves[:, :, 0]
    y, x = torch.broadcast_tensors(y, x)
    return y, x
