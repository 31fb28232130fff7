"""Calls of deformable convolution, with offsets that reach beyond the map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.operator_checks import relative_error
from tests.ops.contract_examples import Example, deform_conv2d

ALL = "input offset weight bias mask"
GEOMETRIES: dict[str, dict[str, Any]] = {
    "square": dict(C=4, map=(6, 6), out=3, groups=1, D=1),
    "wide": dict(B=1, map=(5, 9), D=3),
    "tall, stride, dilation": dict(C=4, map=(11, 6), kernel=(3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2)),
    "groups cut offset groups": dict(B=1, C=12, map=(4, 5), out=6, kernel=(1, 3), padding=(0, 1), groups=3),
    "depthwise": dict(C=5, map=(4, 4), out=10, stride=(2, 2), groups=5, D=5),
    "one pixel": dict(B=3, C=2, map=(1, 1), out=2, groups=1, D=1),
    "one row": dict(C=3, map=(1, 7), out=2, kernel=(1, 3), padding=(0, 1), groups=1, D=1),
    "odd channels": dict(B=1, C=37, map=(3, 4), out=5, groups=1, D=1),
    "many pixels": dict(C=70, map=(33, 41), out=8, groups=1),
}


def drawn(name: str, dtype=torch.float64, device="cpu", *, names: str = ALL, far: float = 2, **extents) -> Example:
    return deform_conv2d(names)("small", far=far, **{**GEOMETRIES.get(name, {}), **extents}).to(device, dtype)


def same_where_finite(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    """Return whether the same numbers are finite, and equal; an infinite factor gives inf or NaN."""
    finite = b.isfinite()
    return torch.equal(a.isfinite(), finite) and relative_error(a[finite], b[finite]) < bound
