"""Deformable attention in Triton, where no CUDA binary serves; see :mod:`.triton_kernels`.

Numbers of any precision are read as they are, multiplied and summed in float32. The value's gradient is added up in
float32 by atomic operations, in an order that varies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import library, triton_launch
from ...core.backends import Backend, Gradients
from ...core.triton_launch import launch, power_of_two
from .operands import Options, Terms

_LONGEST = 2**31 - 1  # offset within an image


class Block(NamedTuple):
    """Numbers in a program's block of queries and channels, the most channels of it, and how it is compiled."""

    size: int
    channels: int
    warps: int


FORWARD, BACKWARD = Block(1024, 128, 2), Block(256, 128, 1)  # without spills; not timed
RDNA_FORWARD = Block(256, 128, 2)  # on AMD's devices with warps of 32 threads; not run


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why the kernels do not compute, or None."""
    value, locations, weights = terms
    if reason := triton_launch.refusal(value):
        return reason
    if torch.float64 in (locations.dtype, weights.dtype):
        return "its kernels take no float64"
    B, S, M, d = value.shape
    Q, P = weights.shape[1], sum(options.points)
    largest = max(S * M * d, Q * M * max(d, 2 * P), B * M * Q * -(-d // FORWARD.channels))
    if largest > _LONGEST:
        return f"an image or a grid has {largest} numbers, and its kernels count to {_LONGEST}"
    return None


def _launches(terms: Terms, options: Options, block: Block) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield arguments and constants of launches, each for as many levels as a kernel takes."""
    from .triton_kernels import MOST_LEVELS

    value, locations, weights = (term.contiguous() for term in terms)
    _, S, M, d = value.shape
    levels, pixels, points = options.levels(), 0, 0
    sizes = dict(value=value, locations=locations, weights=weights, S=S, M=M, Q=weights.shape[1], P=sum(options.points))
    width = min(power_of_two(d, 4), block.channels)
    for first in range(0, len(levels), MOST_LEVELS):
        some = levels[first : first + MOST_LEVELS]
        arguments = dict(sizes, pixels=pixels, points=points)
        for n in range(MOST_LEVELS):
            rows, columns, count = some[n] if n < len(some) else (None, None, None)
            arguments |= {f"rows_{n}": rows, f"columns_{n}": columns, f"points_{n}": count}
        yield arguments, dict(
            D=d, BLOCK_D=width, QUERIES=block.size // width, LEVELS=len(some), PROPAGATES_NAN=options.propagates_nan,
            num_warps=block.warps,
        )  # fmt: skip
        pixels += sum(rows * columns for rows, columns, _ in some)
        points += sum(count for _, _, count in some)


def _programs(terms: Terms, constants: dict[str, Any]) -> int:
    B, _, M, _ = terms.value.shape
    return B * M * -(-terms.weights.shape[1] // constants["QUERIES"])


def forward(terms: Terms, options: Options) -> Tensor:
    """Return the output (B, Q, M * d)."""
    from . import triton_kernels

    block = RDNA_FORWARD if triton_launch.rdna(terms.value) else FORWARD
    launches = list(_launches(terms, options, block))
    (B, _, M, d), dtype = terms.value.shape, terms.value.dtype
    output = terms.value.new_empty(  # the sum of several launches is rounded once
        B, terms.weights.shape[1], M * d, dtype=dtype if len(launches) == 1 else torch.float32
    )
    for number, (arguments, constants) in enumerate(launches):
        parts = -(-constants["D"] // constants["BLOCK_D"])
        counts = [count for name, count in arguments.items() if name.startswith("points_") and count is not None]
        launch(
            triton_kernels.attend, (_programs(terms, constants) * parts,), dict(arguments, output=output), **constants,
            PARTS=parts, UNROLL=math.gcd(4, *counts), ADD=number > 0,
        )  # fmt: skip
    return output if len(launches) == 1 else output.to(dtype)


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    """Return the gradients that are needed."""
    from . import triton_kernels

    value, locations, weights = terms
    of_value = value.new_zeros(value.shape, dtype=torch.float32) if needs["value"] else None
    of_locations = locations.new_empty(locations.shape) if needs["locations"] else None
    of_weights = weights.new_empty(weights.shape) if needs["weights"] else None
    targets = dict(
        grad_output=grad_output.contiguous(), grad_value=of_value, grad_locations=of_locations, grad_weights=of_weights
    )
    for arguments, constants in _launches(terms, options, BACKWARD):
        launch(triton_kernels.gradients, (_programs(terms, constants),), arguments | targets, **constants)
    of_value = None if of_value is None else of_value.to(value.dtype)
    return dict(value=of_value, locations=of_locations, weights=of_weights)


BACKEND = Backend(
    triton_launch.NAME, cannot, forward, backward, library.refuses_determinism, prefers_not=triton_launch.prefers_not
)
