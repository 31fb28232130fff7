"""Deformable convolution in Triton as one implicit GEMM: samples are multiplied where they are blended.

Maps lie channels last: a pixel's channels are contiguous. A *segment* is a run of channels within one group and one
offset group, the longest that divides both. No kernel keeps samples for another one: each blends what it needs, and
the gradients blend it once more. Shapes: D offset groups, G groups, C and O channels of input and output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_math import multiply

# What changes with the map's size or the layer's geometry compiles nothing.
_GEOMETRY = [
    "pixels", "H", "W", "Ho", "Wo", "stride_y", "stride_x", "padding_y", "padding_x", "dilation_y", "dilation_x",
]  # fmt: skip
_ANYWHERE = ["offset", "mask", "bias", "grad_offset", "grad_mask"]  # one element at a time, of any image of a batch


@triton.jit
def _outputs(first, pixels, Ho, Wo, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return number, image, row and column of output pixels from ``first`` on, and whether they exist."""
    pixel = first + tl.arange(0, BLOCK)
    if WIDE:
        pixel = pixel.to(tl.int64)
    row = pixel // Wo
    return pixel, row // Ho, row % Ho, pixel % Wo, pixel < pixels


@triton.jit
def _samples(
    offset, mask, image, row, column, exists, group, tap, H, W, Ho, Wo, stride_y, stride_x, padding_y, padding_x,
    dilation_y, dilation_x, offset_groups, TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
):  # fmt: skip
    """Where a tap of output pixels samples.

    Returns:
        The pixel above and left of the sample, the sample's distance below and right of it, the modulation, and which
        of the four pixels around it exist, row by row: none where the sample lies outside, at NaN, or has no pixel.
    """
    sample = (image * offset_groups + group) * TAPS + tap
    place = row * Wo + column
    vertical = tl.load(offset + (sample * 2 * (Ho * Wo) + place), exists, 0.0).to(tl.float32)
    horizontal = tl.load(offset + ((sample * 2 + 1) * (Ho * Wo) + place), exists, 0.0).to(tl.float32)
    y = (row * stride_y - padding_y + tap // KERNEL_WIDTH * dilation_y).to(tl.float32) + vertical
    x = (column * stride_x - padding_x + tap % KERNEL_WIDTH * dilation_x).to(tl.float32) + horizontal
    inside = exists & (y >= -1) & (y < H) & (x >= -1) & (x < W)
    y = tl.where(inside, y, -2.0)  # also NaN and what would overflow an integer
    x = tl.where(inside, x, -2.0)
    above = tl.floor(y)
    left = tl.floor(x)
    y0 = above.to(tl.int32)
    x0 = left.to(tl.int32)
    top = inside & (y0 >= 0)
    bottom = inside & (y0 < H - 1)
    modulation = tl.full(y.shape, 1.0, tl.float32)
    if mask is not None:
        modulation = tl.load(mask + (sample * (Ho * Wo) + place), exists, 0.0).to(tl.float32)
    corner = (image * H + y0) * W + x0
    has_left = x0 >= 0
    has_right = x0 < W - 1
    return (
        corner, y - above, x - left, modulation,
        top & has_left, top & has_right, bottom & has_left, bottom & has_right,
    )  # fmt: skip


@triton.jit
def _read(pointers, rows, columns, EVEN: tl.constexpr):
    """Elements in float32, 0 where a row or a column does not exist; all columns do if ``EVEN``."""
    exists = rows[:, None]
    if not EVEN:
        exists = exists & columns[None, :]
    return tl.load(pointers, exists, 0.0).to(tl.float32)


@triton.jit
def _blend(
    pointers, right, below, dy, dx, modulation, has00, has01, has10, has11, has_channel, EVEN: tl.constexpr
):  # fmt: skip
    """Modulated samples (BLOCK_PIXELS, BLOCK_CHANNELS) in float32; ``pointers`` are those of the upper left pixels."""
    total = _read(pointers, has00, has_channel, EVEN) * ((1 - dy) * (1 - dx) * modulation)[:, None]
    total += _read(pointers + right, has01, has_channel, EVEN) * ((1 - dy) * dx * modulation)[:, None]
    total += _read(pointers + below, has10, has_channel, EVEN) * (dy * (1 - dx) * modulation)[:, None]
    total += _read(pointers + below + right, has11, has_channel, EVEN) * (dy * dx * modulation)[:, None]
    return total


@triton.jit(do_not_specialize=_GEOMETRY, do_not_specialize_on_alignment=_ANYWHERE)
def convolve(
    input,  # (B, H, W, C)
    offset,  # (B, D, TAPS, 2, Ho, Wo)
    mask,  # (B, D, TAPS, Ho, Wo) or None
    weight,  # (G, TAPS, O / G, C / G)
    bias,  # (O,) or None
    output,  # (B, Ho, Wo, O)
    pixels, H, W, Ho, Wo, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x,
    groups, offset_groups, group_channels, group_outs, segment,
    TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, BLOCK_PIXELS: tl.constexpr, BLOCK_OUTS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, EVEN_OUTS: tl.constexpr, EVEN_CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Convolve BLOCK_PIXELS output pixels into BLOCK_OUTS channels of one group."""
    out_blocks = tl.cdiv(group_outs, BLOCK_OUTS)
    program = tl.program_id(0)
    group = program // out_blocks % groups
    out = program % out_blocks * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    has_out = out < group_outs
    first = program // (out_blocks * groups) * BLOCK_PIXELS
    pixel, image, row, column, exists = _outputs(first, pixels, Ho, Wo, BLOCK_PIXELS, WIDE)
    channels = groups * group_channels
    offset_channels = channels // offset_groups
    total = tl.zeros((BLOCK_PIXELS, BLOCK_OUTS), tl.float32)
    for step in range(group_channels // segment * TAPS):
        tap = step % TAPS
        start = step // TAPS * segment  # of the group's channels
        first_channel = group * group_channels + start
        corner, dy, dx, modulation, has00, has01, has10, has11 = _samples(
            offset, mask, image, row, column, exists, first_channel // offset_channels, tap, H, W, Ho, Wo,
            stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, offset_groups, TAPS, KERNEL_WIDTH,
        )  # fmt: skip
        pointers = input + (corner * channels + first_channel)[:, None]
        weights = weight + (((group * TAPS + tap) * group_outs + out) * group_channels + start)[None, :]
        for block in range(0, segment, BLOCK_CHANNELS):
            channel = block + tl.arange(0, BLOCK_CHANNELS)
            has_channel = channel < segment
            samples = _blend(
                pointers + channel[None, :], channels, W * channels, dy, dx, modulation, has00, has01, has10, has11,
                has_channel, EVEN_CHANNELS,
            )  # fmt: skip
            factors = _factors(weights + channel[:, None], has_channel, has_out, EVEN_CHANNELS, EVEN_OUTS)
            total = multiply(samples.to(weight.dtype.element_ty), factors, total, PRECISION, UPCAST)
    outs = groups * group_outs
    out_channel = group * group_outs + out
    if bias is not None:
        total += tl.load(bias + out_channel, has_out, 0.0).to(tl.float32)[None, :]
    total = total.to(output.dtype.element_ty)
    tl.store(output + (pixel * outs)[:, None] + out_channel[None, :], total, exists[:, None] & has_out[None, :])


@triton.jit
def _factors(pointers, rows, columns, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Return a tile of the weight or of an output's gradient, 0 where a row or a column does not exist."""
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(pointers)
    elif EVEN_ROWS:
        return tl.load(pointers, columns[None, :], 0.0)
    elif EVEN_COLUMNS:
        return tl.load(pointers, rows[:, None], 0.0)
    else:
        return tl.load(pointers, rows[:, None] & columns[None, :], 0.0)


@triton.jit(do_not_specialize=_GEOMETRY, do_not_specialize_on_alignment=_ANYWHERE)
def differentiate_samples(
    grad_output,  # (B, Ho, Wo, O)
    input,  # (B, H, W, C)
    offset,  # (B, D, TAPS, 2, Ho, Wo)
    mask,  # (B, D, TAPS, Ho, Wo) or None
    weight,  # (G, TAPS, C / G, O / G)
    grad_input,  # (B, H, W, C), float32, is added to; or None
    grad_offset,  # as offset, or None
    grad_mask,  # as mask, or None
    pixels, H, W, Ho, Wo, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x,
    groups, offset_groups, group_channels, group_outs, segment,
    TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, BLOCK_PIXELS: tl.constexpr, BLOCK_OUTS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, EVEN_OUTS: tl.constexpr, EVEN_CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Differentiate by one tap's samples of BLOCK_PIXELS output pixels, in all channels of an offset group.

    So that gradients of offset and mask are sums within a program; those of the input are scattered by atomics.
    """
    program = tl.program_id(0)
    tap = program % TAPS
    offset_group = program // TAPS % offset_groups
    first = program // (TAPS * offset_groups) * BLOCK_PIXELS
    pixel, image, row, column, exists = _outputs(first, pixels, Ho, Wo, BLOCK_PIXELS, WIDE)
    corner, dy, dx, modulation, has00, has01, has10, has11 = _samples(
        offset, mask, image, row, column, exists, offset_group, tap, H, W, Ho, Wo,
        stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, offset_groups, TAPS, KERNEL_WIDTH,
    )  # fmt: skip
    channels = groups * group_channels
    outs = groups * group_outs
    blocks = tl.cdiv(segment, BLOCK_CHANNELS)
    below = W * channels
    # The gradient times each of the four pixels, summed over blocks of channels, and at the end within them.
    sum00 = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    sum01 = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    sum10 = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    sum11 = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    parts = channels // offset_groups // segment
    for step in range(parts * blocks):
        in_segment = step % blocks * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        has_channel = in_segment < segment
        first_channel = (offset_group * parts + step // blocks) * segment
        group = first_channel // group_channels
        in_group = first_channel % group_channels + in_segment
        grads = grad_output + (pixel * outs + group * group_outs)[:, None]
        weights = weight + (((group * TAPS + tap) * group_channels + in_group) * group_outs)[None, :]
        grad = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
        for block in range(0, group_outs, BLOCK_OUTS):
            out = block + tl.arange(0, BLOCK_OUTS)
            has_out = out < group_outs
            left = _factors(grads + out[None, :], exists, has_out, False, EVEN_OUTS)
            right = _factors(weights + out[:, None], has_out, has_channel, EVEN_OUTS, EVEN_CHANNELS)
            grad = multiply(left, right, grad, PRECISION, UPCAST)
        places = (corner * channels + first_channel)[:, None] + in_segment[None, :]
        if grad_offset is not None or grad_mask is not None:
            pointers = input + places
            sum00 += grad * _read(pointers, has00, has_channel, EVEN_CHANNELS)
            sum01 += grad * _read(pointers + channels, has01, has_channel, EVEN_CHANNELS)
            sum10 += grad * _read(pointers + below, has10, has_channel, EVEN_CHANNELS)
            sum11 += grad * _read(pointers + below + channels, has11, has_channel, EVEN_CHANNELS)
        if grad_input is not None:
            targets = grad_input + places
            _scatter(targets, grad, (1 - dy) * (1 - dx) * modulation, has00, has_channel, EVEN_CHANNELS)
            _scatter(targets + channels, grad, (1 - dy) * dx * modulation, has01, has_channel, EVEN_CHANNELS)
            _scatter(targets + below, grad, dy * (1 - dx) * modulation, has10, has_channel, EVEN_CHANNELS)
            _scatter(targets + below + channels, grad, dy * dx * modulation, has11, has_channel, EVEN_CHANNELS)
    sum00 = tl.sum(sum00, 1)
    sum01 = tl.sum(sum01, 1)
    sum10 = tl.sum(sum10, 1)
    sum11 = tl.sum(sum11, 1)
    area = Ho * Wo
    sample = (image * offset_groups + offset_group) * TAPS + tap
    place = row * Wo + column
    if grad_offset is not None:
        vertical = ((sum10 - sum00) * (1 - dx) + (sum11 - sum01) * dx) * modulation
        horizontal = ((sum01 - sum00) * (1 - dy) + (sum11 - sum10) * dy) * modulation
        pointers = grad_offset + (sample * 2 * area + place)
        tl.store(pointers, vertical.to(grad_offset.dtype.element_ty), exists)
        tl.store(pointers + area, horizontal.to(grad_offset.dtype.element_ty), exists)
    if grad_mask is not None:
        by_mask = (sum00 * (1 - dx) + sum01 * dx) * (1 - dy) + (sum10 * (1 - dx) + sum11 * dx) * dy
        tl.store(grad_mask + (sample * area + place), by_mask.to(grad_mask.dtype.element_ty), exists)


@triton.jit
def _scatter(pointers, grad, factor, rows, columns, EVEN: tl.constexpr):
    """Add ``grad * factor`` where rows and columns exist."""
    exists = rows[:, None]
    if not EVEN:
        exists = exists & columns[None, :]
    tl.atomic_add(pointers, grad * factor[:, None], mask=exists, sem="relaxed")


@triton.jit(do_not_specialize=[*_GEOMETRY, "split_pixels"], do_not_specialize_on_alignment=_ANYWHERE)
def differentiate_weight(
    grad_output,  # (B, Ho, Wo, O)
    input,  # (B, H, W, C)
    offset,  # (B, D, TAPS, 2, Ho, Wo)
    mask,  # (B, D, TAPS, Ho, Wo) or None
    grad_weight,  # (splits, G, TAPS, C / G, O / G), float32
    pixels, H, W, Ho, Wo, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, split_pixels,
    groups, offset_groups, group_channels, group_outs, segment,
    TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, BLOCK_PIXELS: tl.constexpr, BLOCK_OUTS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr, EVEN_OUTS: tl.constexpr, EVEN_CHANNELS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sum one tap's products in BLOCK_CHANNELS x BLOCK_OUTS channels over a part of the output pixels."""
    channels = groups * group_channels
    outs = groups * group_outs
    blocks = tl.cdiv(segment, BLOCK_CHANNELS)
    out_blocks = tl.cdiv(group_outs, BLOCK_OUTS)
    program = tl.program_id(0)
    out = program % out_blocks * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    has_out = out < group_outs
    program = program // out_blocks
    in_segment = program % blocks * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    has_channel = in_segment < segment
    program = program // blocks
    first_channel = program % (channels // segment) * segment
    program = program // (channels // segment)
    tap = program % TAPS
    split = program // TAPS
    group = first_channel // group_channels
    offset_group = first_channel // (channels // offset_groups)
    total = tl.zeros((BLOCK_CHANNELS, BLOCK_OUTS), tl.float32)
    for first in range(split * split_pixels, tl.minimum((split + 1) * split_pixels, pixels), BLOCK_PIXELS):
        pixel, image, row, column, exists = _outputs(first, pixels, Ho, Wo, BLOCK_PIXELS, WIDE)
        corner, dy, dx, modulation, has00, has01, has10, has11 = _samples(
            offset, mask, image, row, column, exists, offset_group, tap, H, W, Ho, Wo,
            stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, offset_groups, TAPS, KERNEL_WIDTH,
        )  # fmt: skip
        samples = _blend(
            input + (corner * channels + first_channel)[:, None] + in_segment[None, :], channels, W * channels,
            dy, dx, modulation, has00, has01, has10, has11, has_channel, EVEN_CHANNELS,
        )  # fmt: skip
        grads = grad_output + (pixel * outs + group * group_outs)[:, None] + out[None, :]
        grad = _factors(grads, exists, has_out, False, EVEN_OUTS)
        total = multiply(tl.trans(samples.to(grad.dtype)), grad, total, PRECISION, UPCAST)
    in_group = first_channel % group_channels + in_segment
    places = (((split * groups + group) * TAPS + tap) * group_channels + in_group).to(tl.int64) * group_outs
    tl.store(grad_weight + places[:, None] + out[None, :], total, has_channel[:, None] & has_out[None, :])
