"""Rotary position embedding in two dimensions: rotated queries and keys, whose product depends on relative positions.

A head of width d has d/2 pairs of channels. Each pair of a query or key is rotated by an angle that is linear in its
position, so that the product of a rotated query and a rotated key depends on the difference of their positions
(Su et al. 2021, Eq. 14 to 16). There are three steps, each with variants:

    1. positions of rows and columns   index_positions, pixel_positions, centred_positions
    2. angles (N, d/2)                 axial_angles of frequencies, mixed_angles of learned ones
    3. rotate(query, rotation(angles)), and likewise for the key

timm's classes in these steps:

    RotaryEmbeddingCat, in_pixels=False   index_positions; axis_frequencies; axial_angles (EVA-02: ``reference``)
    RotaryEmbeddingCat, in_pixels=True    pixel_positions; pixel_frequencies; axial_angles
    RotaryEmbeddingMixed                  index_positions; draw_mixed_frequencies; mixed_angles
    RotaryEmbeddingDinoV3                 centred_positions; centred_frequencies or period_frequencies; axial_angles;
                                          ``halves=True``

Shapes: B batch, M heads, H rows, W columns, N = H * W positions row by row, d width of a head. Positions, frequencies
and angles are float32 or float64, as half precision cannot resolve large angles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .map_size import check_size

Normalise = Literal["separate", "min", "max"]


class Positions(NamedTuple):
    """Positions of the rows and columns of a map.

    Attributes:
        rows: (H,), float32.
        columns: (W,), float32.
    """

    rows: Tensor
    columns: Tensor


class Rotation(NamedTuple):
    """Sines and cosines of all angles, which layers with the same rotation share.

    Attributes:
        sin: (..., N, d/2).
        cos: (..., N, d/2).
    """

    sin: Tensor
    cos: Tensor


def index_positions(
    size: Sequence[int],
    *,
    reference: Sequence[int] | None = None,
    offset: float = 0.0,
    device: torch.device | str | None = None,
) -> Positions:
    """Return positions 0, 1, 2 ... of rows and columns, in patches.

    Args:
        size: (H, W).
        reference: Size of the map in pretraining. Positions are scaled to its range, by reference / size (EVA-02).
        offset: Added to all indices before scaling.
        device: Device of the result.

    Raises:
        ValueError: ``size`` or ``reference`` is not two ints of at least 1.
    """
    axes = [torch.arange(s, device=device).float() + offset for s in check_size("size", size)]
    return _scaled(axes, size, reference)


def pixel_positions(
    size: Sequence[int], *, reference: Sequence[int] | None = None, device: torch.device | str | None = None
) -> Positions:
    """Return positions from -1 at the first row or column to 1 at the last; arguments as :func:`index_positions`."""
    axes = [torch.linspace(-1.0, 1.0, s, device=device, dtype=torch.float32) for s in check_size("size", size)]
    return _scaled(axes, size, reference)


def centred_positions(
    size: Sequence[int],
    *,
    offset: float = 0.0,
    normalise: Normalise = "separate",
    device: torch.device | str | None = None,
) -> Positions:
    """Return patch centres on a map from -1 to 1: 2 (i + 1/2 + offset) / s - 1 (Siméoni et al. 2025, DINOv3).

    Args:
        size: (H, W).
        offset: Added to the indices.
        normalise: s is each axis's size (``'separate'``), or the smaller (``'min'``) or larger (``'max'``) size for
            both axes, which keeps the patches square.
        device: Device of the result.

    Raises:
        ValueError: ``size`` is not two ints of at least 1, or ``normalise`` is not one of the three.
    """
    H, W = check_size("size", size)
    if normalise not in get_args(Normalise):
        raise ValueError(f"normalise must be one of {', '.join(get_args(Normalise))}, got {normalise!r}")
    lengths = (H, W) if normalise == "separate" else (min(H, W),) * 2 if normalise == "min" else (max(H, W),) * 2
    axes = [
        2.0 * ((torch.arange(s, device=device).float() + 0.5 + offset) / length) - 1.0
        for s, length in zip((H, W), lengths)
    ]
    return Positions(axes[0], axes[1])


def axis_frequencies(width: int, temperature: float = 10000.0, *, device: torch.device | str | None = None) -> Tensor:
    """Return one axis's angles per unit of position: temperature^(-4i / d), i = 0 ... d/4 - 1 (Su et al., Eq. 15).

    Args:
        width: d, the width of a head: a multiple of 4, as each axis rotates half of the pairs.
        temperature: Wavelengths increase from 2π towards ``temperature`` * 2π.
        device: Device of the result.

    Returns:
        (d/4,), float32, decreasing from 1.

    Raises:
        ValueError: ``width`` is not a positive multiple of 4.
    """
    return temperature ** -(_ranks(width, device) / (width // 4))


def centred_frequencies(width: int, temperature: float = 100.0, *, device: torch.device | str | None = None) -> Tensor:
    """Return 2π * :func:`axis_frequencies`, so that the first pair turns twice from -1 to 1 (DINOv3)."""
    return 2 * math.pi * axis_frequencies(width, temperature, device=device)


def period_frequencies(
    width: int, shortest: float, longest: float, *, device: torch.device | str | None = None
) -> Tensor:
    """Return 2π / period for d/4 periods from ``shortest`` to ``longest`` in geometric steps, float32 (DINOv3).

    Raises:
        ValueError: ``width`` is not a positive multiple of 4, or a period is not positive.
    """
    if not (shortest > 0 and longest > 0):
        raise ValueError(f"shortest and longest must be positive periods, got {shortest} and {longest}")
    steps = torch.linspace(0, 1, _ranks(width, device).shape[0], device=device, dtype=torch.float32)
    return 2 * math.pi / (shortest * (longest / shortest) ** steps)


def pixel_frequencies(
    width: int, resolution: float = 224.0, linear: bool = False, *, device: torch.device | str | None = None
) -> Tensor:
    """Return frequencies from π to π * resolution / 2 for positions from -1 to 1, at most half a turn per pixel.

    Args:
        width: d, the width of a head: a multiple of 4.
        resolution: Number of pixels of an axis, at least 2.
        linear: Equal steps between frequencies; else equal ratios.
        device: Device of the result.

    Returns:
        (d/4,), float32, ascending.

    Raises:
        ValueError: ``width`` is not a positive multiple of 4, or ``resolution`` is below 2.
    """
    if not resolution >= 2:
        raise ValueError(f"resolution must be at least 2 pixels, got {resolution}")
    steps = _ranks(width, device).shape[0]
    if linear:
        return math.pi * torch.linspace(1.0, resolution / 2, steps, device=device, dtype=torch.float32)
    return math.pi * 2 ** torch.linspace(0, math.log2(resolution) - 1, steps, device=device, dtype=torch.float32)


def axial_angles(positions: Positions, frequencies: Tensor, *, columns_first: bool = False) -> Tensor:
    """Compute angles of which the first half depends on the row and the second half on the column.

    Args:
        positions: Positions of the map's rows (H,) and columns (W,).
        frequencies: (d/4,), angle per unit of position.
        columns_first: Put the columns' half first, as timm's ``grid_indexing='xy'``.

    Returns:
        (N, d/2), in radians.
    """
    rows, columns = (axis.to(frequencies.device).unsqueeze(-1) * frequencies for axis in positions)
    H, W, n = rows.shape[0], columns.shape[0], frequencies.shape[0]
    halves = [rows.unsqueeze(1).expand(H, W, n), columns.unsqueeze(0).expand(H, W, n)]
    return torch.cat(halves[::-1] if columns_first else halves, -1).flatten(0, 1)


def mixed_angles(positions: Positions, frequencies: Tensor, *, columns_first: bool = True) -> Tensor:
    """Compute angles that are a learned linear function of both coordinates (Heo et al. 2024).

    Args:
        positions: Positions of the map's rows (H,) and columns (W,).
        frequencies: (2, ..., d/2): θ of the columns and θ of the rows, e.g. (2, M, d/2) for a layer.
        columns_first: Whether ``frequencies[0]`` is that of the columns, as in timm by default; else of the rows.

    Returns:
        (..., N, d/2), in radians, float32 for half precision frequencies.

    Raises:
        ValueError: ``frequencies`` does not have shape (2, ..., d/2).
    """
    if frequencies.dim() < 2 or frequencies.shape[0] != 2:
        raise ValueError(f"frequencies must have shape (2, ..., d/2), got {tuple(frequencies.shape)}")
    if frequencies.dtype in (torch.float16, torch.bfloat16):
        frequencies = frequencies.float()
    rows, columns = (axis.to(frequencies.device, frequencies.dtype) for axis in positions)
    of_columns, of_rows = frequencies if columns_first else frequencies.flip(0)
    by_rows = rows.unsqueeze(-1) * of_rows.unsqueeze(-2)
    by_columns = columns.unsqueeze(-1) * of_columns.unsqueeze(-2)
    return (by_rows.unsqueeze(-2) + by_columns.unsqueeze(-3)).flatten(-3, -2)


def draw_mixed_frequencies(
    width: int,
    heads: int,
    temperature: float = 10.0,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw initial frequencies for :func:`mixed_angles`: axial ones, rotated by a random angle for each head.

    Args:
        width: d, the width of a head: a multiple of 4.
        heads: M.
        temperature: See :func:`axis_frequencies`.
        generator: Generator of the random angles.
        device: Device of the result.

    Returns:
        (2, M, d/2), float32.

    Raises:
        ValueError: ``width`` is not a positive multiple of 4.
    """
    lengths = axis_frequencies(width, temperature, device=device)
    turn = torch.rand(heads, 1, generator=generator, device=device) * 2 * math.pi
    directions = torch.stack((turn, turn + math.pi / 2), -1)  # each head's two perpendicular axes, (M, 1, 2)
    along = [(f(directions).transpose(1, 2) * lengths).flatten(1) for f in (torch.cos, torch.sin)]
    return torch.stack(along)


def rotation(angles: Tensor) -> Rotation:
    """Compute the sines and cosines of angles (..., N, d/2)."""
    return Rotation(angles.sin(), angles.cos())


def rotate(x: Tensor, turned: Rotation, *, halves: bool = False, prefix_tokens: int = 0) -> Tensor:
    """Rotate every pair (a, b) of channels by its angle: (a cos - b sin, b cos + a sin) (Su et al. 2021, Eq. 34).

    The arithmetic is in the wider dtype of ``x`` and the rotation.

    Args:
        x: Queries or keys, (B, M, P + N, d); (B, M, H, W, d) with a rotation of (..., H, W, d/2).
        turned: Rotation (..., N, d/2), broadcast against ``x``: (N, d/2), or (M, N, d/2) if heads differ.
        halves: Pair i is channels i and i + d/2, as in DINOv3; else channels 2i and 2i + 1, as in EVA-02.
        prefix_tokens: P, the number of leading tokens without a position, such as cls tokens and registers.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: the positions or the width of ``x`` differ from the rotation's.
    """
    sin, cos = turned
    positions, width = sin.shape[-2], 2 * sin.shape[-1]
    if prefix_tokens < 0 or x.dim() < 2 or x.shape[-2] != prefix_tokens + positions or x.shape[-1] != width:
        raise ValueError(
            f"x must have shape (..., {prefix_tokens} + {positions}, {width}) for prefix_tokens {prefix_tokens} and "
            f"a rotation of {tuple(sin.shape)}, got {tuple(x.shape)}"
        )
    prefix, tokens = x[..., :prefix_tokens, :], x[..., prefix_tokens:, :]
    a, b = tokens.chunk(2, -1) if halves else tokens.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (a * cos - b * sin, b * cos + a * sin)
    out = torch.cat(pairs, -1) if halves else torch.stack(pairs, -1).flatten(-2)
    out = out.to(x.dtype)
    return torch.cat((prefix, out), -2) if prefix_tokens else out


def _scaled(axes: list[Tensor], size: Sequence[int], reference: Sequence[int] | None) -> Positions:
    """Scale positions on a map of ``size`` to a map of ``reference``."""
    if reference is not None:
        axes = [axis / s * r for axis, s, r in zip(axes, size, check_size("reference", reference))]
    return Positions(axes[0], axes[1])


def _ranks(width: int, device: torch.device | str | None) -> Tensor:
    """Return 0 ... d/4 - 1, float32."""
    if width < 4 or width % 4:
        raise ValueError(f"width must be a positive multiple of 4 (two axes of pairs), got {width}")
    return torch.arange(width // 4, device=device).float()
