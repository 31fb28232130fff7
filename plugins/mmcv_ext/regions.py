"""Pooling of regions of interest.

Shapes: ``rois`` (R, 5) of (image, x1, y1, x2, y2) in pixels of the picture, scaled by ``spatial_scale`` to the map;
outputs (R, C, h, w). Except for average RoIAlign, which is torchvision's, samples are gathered in blocks of regions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torchvision  # noqa: F401  defines torch.ops.torchvision
from torch import Tensor

from .calls import check, check_floats, check_shape, operator, widened, write
from .maps import gradients

MAX, AVERAGE = 0, 1
BLOCK = 1 << 24  # values gathered at once


def check_rois(input: Tensor, rois: Tensor, height: int, width: int, scale: float, aligned: bool = False) -> None:
    """Check what kernels would read out of bounds; values of ``rois`` only on CPUs, to spare GPUs a synchronization."""
    check_shape("input", input, "B", "C", "H", "W")
    check_shape("rois", rois, "R", 5)
    check_floats("input", input=input, rois=rois)
    check(height > 0 and width > 0, f"the output size must be positive, got {(height, width)}")
    if rois.device.type != "cpu" or not len(rois):
        return
    low, high = rois[:, 0].min().item(), rois[:, 0].max().item()
    check(low >= 0 and high < len(input), f"rois must name images from 0 to {len(input) - 1}, got {low:g} to {high:g}")
    far = ~(scale * rois[:, 1:].double().abs() < 1e37).all(1)  # NaN as well; sums stay finite in float32
    check(not far.any(), f"rois must be finite and below 1e37, got {rois[far][:1].tolist()}")
    if aligned:
        negative = ~(rois[:, 3:] >= rois[:, 1:3]).all(1)
        check(not negative.any(), f"rois must have x1 <= x2 and y1 <= y2, got {rois[negative][:1].tolist()}")


# --- samples ------------------------------------------------------------------------------------------------------


def _neighbors(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two neighboring indices along an axis and the weight of the second, by the rule of RoIAlign.

    Between -1 and 0, and from ``size`` - 1 on, the value is that of the border; the derivative there is that of the
    first interval, and 0.
    """
    position = position + (position.clamp(min=0) - position).detach()
    low = position.detach().floor().clamp(max=size - 1)
    part = torch.where(low >= size - 1, torch.zeros_like(position), position - low)
    return low.long(), (low + 1).clamp(max=size - 1).long(), part


def _sample(maps: Tensor, image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Interpolate ``maps`` (B, C, H, W) at P positions for each of N entries: image (N,), y and x (N, P) → (N, P, C).

    Positions more than a pixel outside the map read 0.
    """
    H, W = maps.shape[2:]
    pixels = maps.permute(0, 2, 3, 1)  # (B, H, W, C)
    inside = (y >= -1) & (y <= H) & (x >= -1) & (x <= W)
    top, bottom, down = _neighbors(torch.where(inside, y, 0), H)
    left, right, across = _neighbors(torch.where(inside, x, 0), W)
    image, down, across = image[:, None], down[..., None], across[..., None]
    upper = pixels[image, top, left] * (1 - across) + pixels[image, top, right] * across
    lower = pixels[image, bottom, left] * (1 - across) + pixels[image, bottom, right] * across
    return (upper * (1 - down) + lower * down) * inside[..., None]


def _grids(rois: Tensor, size: tuple[int, int], scale: float, ratio: int, aligned: bool) -> tuple[Tensor, Tensor]:
    """Return the regions (R, 4) on the map, and the number of samples per bin in rows and columns (R, 2)."""
    boxes = rois[:, 1:] * scale - (0.5 if aligned else 0)
    extent = boxes[:, 2:] - boxes[:, :2]
    if not aligned:
        extent = extent.clamp(min=1)
        boxes = torch.cat((boxes[:, :2], boxes[:, :2] + extent), 1)
    if ratio > 0:
        return boxes, torch.full((len(rois), 2), ratio, device=rois.device)
    return boxes, (extent.flip(1) / extent.new_tensor(size)).ceil().long().clamp(min=0)


def _blocks(grids: Tensor, values: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield the regions with one grid size, at most ``BLOCK`` values at once, with that size."""
    for gh, gw in grids.unique(dim=0).tolist():
        regions = ((grids[:, 0] == gh) & (grids[:, 1] == gw)).nonzero()[:, 0]
        for block in regions.split(max(1, BLOCK // max(1, values * gh * gw))):
            yield block, gh, gw


def _positions(boxes: Tensor, size: tuple[int, int], gh: int, gw: int) -> tuple[Tensor, Tensor]:
    """Return rows (R, h, gh) and columns (R, w, gw) of the samples of all bins."""
    axes = []
    for low, high, bins, grid in ((boxes[:, 1], boxes[:, 3], size[0], gh), (boxes[:, 0], boxes[:, 2], size[1], gw)):
        step = ((high - low) / bins)[:, None, None]
        bin = torch.arange(bins, device=boxes.device)[:, None]
        axes.append(low[:, None, None] + bin * step + (torch.arange(grid, device=boxes.device) + 0.5) * step / grid)
    return axes[0], axes[1]


# --- RoIAlign -----------------------------------------------------------------------------------------------------


@operator
def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Write the average (``pool_mode`` 1) or maximum (0) of the samples in every bin (He et al. 2017).

    Args:
        input: (B, C, H, W).
        rois: (R, 5).
        output: (R, C, h, w).
        argmax_y: (R, C, h, w), the row of the maximum; empty for averages.
        argmax_x: Likewise the column.
        aligned_height: h.
        aligned_width: w.
        spatial_scale: Size of the map over that of the picture.
        sampling_ratio: Samples per bin and axis; 0: one for every pixel of the bin.
        pool_mode: 0 or 1.
        aligned: Shift regions by half a pixel, so that pixel centres are at integers.
    """
    size = (aligned_height, aligned_width)
    check_rois(input, rois, *size, spatial_scale, aligned)
    check_shape("output", output, len(rois), input.shape[1], *size)
    maps = widened(input)  # torchvision has no kernel for bfloat16, nor on CPUs for float16
    regions = rois.to(maps.dtype)
    if pool_mode == AVERAGE:
        pooled = torch.ops.torchvision.roi_align(maps, regions, spatial_scale, *size, sampling_ratio, aligned)
        write(output, pooled)
        return
    boxes, grids = _grids(regions, size, spatial_scale, sampling_ratio, aligned)
    for block, gh, gw in _blocks(grids, size[0] * size[1] * input.shape[1]):
        if not gh * gw:  # mmcv's answer for a region without area; at -2, beyond what is read, it has no gradient
            output[block], argmax_y[block], argmax_x[block] = -10000, -2, -2
            continue
        ys, xs = _positions(boxes[block], size, gh, gw)
        shape = (len(block), size[0], size[1], gh, gw)
        y = ys[:, :, None, :, None].expand(shape).flatten(1)
        x = xs[:, None, :, None, :].expand(shape).flatten(1)
        samples = _sample(maps, regions[block, 0].long(), y, x).view(len(block), *size, gh * gw, -1)
        best, place = samples.movedim(-1, 1).max(-1)  # (R, C, h, w)
        output[block] = best.to(output)
        for target, positions in ((argmax_y, y), (argmax_x, x)):
            choices = positions.view(len(block), 1, *size, gh * gw).expand(*best.shape, -1)
            target[block] = choices.gather(-1, place[..., None])[..., 0].to(target)


@operator
def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Add the gradient of the input of :func:`roi_align_forward`."""
    check_rois(grad_input, rois, aligned_height, aligned_width, spatial_scale, aligned)
    if pool_mode == AVERAGE:
        grad = widened(grad_output)
        geometry = (spatial_scale, aligned_height, aligned_width, *grad_input.shape, sampling_ratio, aligned)
        grad_input += torch.ops.torchvision._roi_align_backward(grad, rois.to(grad.dtype), *geometry)
        return
    B, C, H, W = grad_input.shape
    planes = rois[:, 0].long()[:, None] * C + torch.arange(C, device=rois.device)  # a plane per region and channel
    bins = aligned_height * aligned_width
    places = [widened(a).view(-1, bins) for a in (argmax_y, argmax_x)]

    def pick(maps: Tensor) -> Tensor:
        return _sample(maps.view(B * C, 1, H, W), planes.flatten(), *places)

    grad_input += gradients(pick, (widened(grad_input),), grad_output.reshape(-1, bins, 1))[0]


# --- RoIPool ------------------------------------------------------------------------------------------------------


@operator
def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Write the maximum of every bin and its place in the map, -1 for an empty bin (Girshick 2015).

    Unlike torchvision's, mmcv's bins are not rounded to pixels before they are divided.
    """
    check_rois(input, rois, pooled_height, pooled_width, spatial_scale)
    H, W = input.shape[2:]
    corners = widened(rois)
    boxes = torch.cat((corners[:, 1:3], corners[:, 3:] + 1), 1) * spatial_scale
    columns, rows = (
        _bins(boxes[:, axis], boxes[:, axis + 2], bins, limit)
        for axis, bins, limit in ((0, pooled_width, W), (1, pooled_height, H))
    )
    empty = (boxes[:, 2:] <= boxes[:, :2]).any(1).tolist()
    for n, image in enumerate(rois[:, 0].long().tolist()):
        if empty[n]:
            continue
        for i, (top, bottom) in enumerate(rows[n]):
            for j, (left, right) in enumerate(columns[n]):
                if bottom <= top or right <= left:
                    argmax[n, :, i, j] = -1
                    continue
                best, place = input[image, :, top:bottom, left:right].flatten(1).max(1)
                output[n, :, i, j] = best
                argmax[n, :, i, j] = (top + place // (right - left)) * W + left + place % (right - left)


def _bins(low: Tensor, high: Tensor, bins: int, limit: int) -> list[list[list[int]]]:
    """Return first and last pixel of all bins, (R, bins, 2)."""
    step = ((high - low) / bins)[:, None]
    number = torch.arange(bins + 1, device=low.device)
    edges = number * step + low[:, None]
    return torch.stack((edges[:, :-1].floor(), edges[:, 1:].ceil()), 2).clamp(0, limit).long().tolist()


@operator
def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """Add the gradient of the input of :func:`roi_pool_forward`."""
    check_rois(grad_input, rois, pooled_height, pooled_width, spatial_scale)
    B, C, H, W = grad_input.shape
    planes = (rois[:, 0].long()[:, None] * C + torch.arange(C, device=rois.device))[..., None, None].expand_as(argmax)
    pooled = argmax >= 0
    places = planes[pooled], argmax[pooled].long()
    grad = torch.zeros_like(widened(grad_input)).view(B * C, H * W)
    grad_input += grad.index_put_(places, grad_output[pooled].to(grad.dtype), accumulate=True).view_as(grad_input)


# --- deformable RoIPool -------------------------------------------------------------------------------------------


def _pool_deformed(
    input: Tensor, rois: Tensor, offset: Tensor, size: tuple[int, int], scale: float, ratio: int, gamma: float
) -> Tensor:
    """Average samples of bins, displaced by gamma * offset times the region's size (Dai et al. 2017, Eq. 6)."""
    boxes, grids = _grids(rois, size, scale, ratio, aligned=True)
    extent = boxes[:, 2:] - boxes[:, :2]
    numbers, parts = [], []
    for block, gh, gw in _blocks(grids, size[0] * size[1] * input.shape[1]):
        ys, xs = _positions(boxes[block], size, gh, gw)
        shape = (len(block), size[0], size[1], gh, gw)
        y, x = ys[:, :, None, :, None].expand(shape), xs[:, None, :, None, :].expand(shape)
        if offset.numel():
            moved = gamma * extent[block][:, :, None, None] * offset[block]  # columns, then rows
            x, y = x + moved[:, 0, :, :, None, None], y + moved[:, 1, :, :, None, None]
        samples = _sample(input, rois[block, 0].long(), y.flatten(1), x.flatten(1))
        samples = samples.view(len(block), *size, gh * gw, input.shape[1])
        parts.append((samples.sum(3) / max(1, gh * gw)).movedim(-1, 1))
        numbers.append(block)
    pooled = torch.cat(parts) if parts else input.new_zeros(0, input.shape[1], *size)
    return pooled[torch.cat(numbers).argsort()] if parts else pooled


@operator
def deform_roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    output: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    """Write the averages of displaced bins into ``output``; ``offset`` is (R, 2, h, w), columns first, or empty."""
    size = (pooled_height, pooled_width)
    check_rois(input, rois, *size, spatial_scale)
    if offset.numel():
        check_shape("offset", offset, len(rois), 2, *size)
        check_floats("input", input=input, offset=offset)
    x, regions, displaced = widened(input), widened(rois), widened(offset)
    write(output, _pool_deformed(x, regions, displaced, size, spatial_scale, sampling_ratio, gamma))


@operator
def deform_roi_pool_backward(
    grad_output: Tensor,
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    """Add the gradients of input and offset."""
    size = (pooled_height, pooled_width)

    def pool(input: Tensor, *offsets: Tensor) -> Tensor:
        (displaced,) = offsets or (offset,)
        return _pool_deformed(input, widened(rois), displaced, size, spatial_scale, sampling_ratio, gamma)

    terms = [widened(input), *([widened(offset)] if offset.numel() else [])]
    if not len(rois):
        return
    for target, grad in zip((grad_input, grad_offset), gradients(pool, terms, grad_output)):
        target += grad
