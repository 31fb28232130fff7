"""Deformable attention against mmcv's (on CPUs, mmcv's composition of ``grid_sample``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_plugins.ops import deformable_attention

from .. import compiled_mmcv
from ..case import Case, Maker, problem

M, D, K = 8, 32, 4  # heads, width of a head, points
DETR = ((100, 134), (50, 67), (25, 34), (13, 17))  # for an image of 800 x 1072
MASK2FORMER = ((128, 128), (64, 64), (32, 32))  # for 1024 x 1024, without the finest level
BOTH = ("float32", "bfloat16")
# shapes, queries (None: every pixel of every level), dtypes of values
ROWS = {
    "encoder, DETR's four levels": (DETR, None, BOTH),
    "encoder, Mask2Former's three levels": (MASK2FORMER, None, BOTH[:1]),
    "decoder, 300 queries": (DETR, 300, BOTH),
    "decoder, 1100 queries": (DETR, 1100, BOTH[:1]),
}


def operands(
    shapes: tuple, queries: int | None, batch: int = 1, M: int = M, D: int = D, K: int = K
) -> Callable[[torch.dtype], list[Tensor]]:
    """Return a function that draws value, float32 locations about two pixels from reference points, and weights."""
    S, L = sum(h * w for h, w in shapes), len(shapes)

    def draw(dtype: torch.dtype) -> list[Tensor]:
        points = [
            torch.cartesian_prod((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w).flip(-1) for h, w in shapes
        ]
        reference = torch.cat(points) if queries is None else torch.rand(queries, 2)
        Q = len(reference)
        sizes = torch.tensor([(w, h) for h, w in shapes]).view(L, 1, 2)
        locations = reference.view(1, Q, 1, 1, 1, 2) + 2 * torch.randn(batch, Q, M, L, K, 2) / sizes
        weights = torch.rand(batch, Q, M, L * K).softmax(-1).view(batch, Q, M, L, K)
        return [torch.randn(batch, S, M, D, dtype=dtype), locations, weights]

    return draw


def mmcv(shapes: tuple, compiled: bool, numbers: bool = False) -> Callable[..., Tensor]:
    """Return mmcv's function, which casts locations and weights to the value's dtype.

    CUDA has a compiled one. The one in plain PyTorch need not wait for the sizes if they are ``numbers``.
    """
    from mmcv.ops import multi_scale_deform_attn as peer

    if compiled:
        compiled_mmcv.extension()
    sizes = torch.tensor(shapes)
    starts = torch.cat((sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]))

    def run(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        locations, weights = locations.to(value.dtype), weights.to(value.dtype)
        if compiled:
            return peer.MultiScaleDeformableAttnFunction.apply(value, sizes, starts, locations, weights, 64)
        return peer.multi_scale_deformable_attn_pytorch(value, shapes if numbers else sizes, locations, weights)

    return run


def grid_sample(shapes: tuple) -> Callable[..., Tensor]:
    """Return PyTorch's sampling level by level, for use without mmcv."""

    def run(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        locations, weights = locations.to(value.dtype), weights.to(value.dtype)
        samples = []
        for level, (part, (h, w)) in enumerate(zip(value.split([h * w for h, w in shapes], 1), shapes)):
            maps = part.permute(0, 2, 3, 1).reshape(-1, D, h, w)
            grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
            samples.append(torch.nn.functional.grid_sample(maps, grid, align_corners=False))
        weighted = torch.cat(samples, 3) * weights.transpose(1, 2).flatten(0, 1).flatten(2).unsqueeze(1)
        return weighted.sum(3).view(len(value), M * D, -1).transpose(1, 2)

    return run


def cases(device: str) -> list[Case]:
    rows = []
    for name, (shapes, queries, kinds) in ROWS.items():

        def ours(shapes: tuple = shapes) -> Callable[..., Tensor]:
            return lambda value, locations, weights: deformable_attention(value, shapes, locations, weights)

        Q = sum(h * w for h, w in shapes) if queries is None else queries
        for kind in kinds:
            compiled = device == "cuda" and kind != "bfloat16"
            peers: dict[str, Maker] = {"mmcv": lambda s=shapes, c=compiled: mmcv(s, c)}
            if device == "cuda":
                peers["mmcv, plain PyTorch"] = lambda s=shapes: mmcv(s, False, True)
                peers["grid_sample"] = lambda s=shapes: grid_sample(s)
            rows += problem(
                f"{name} (Q {Q}, L {len(shapes)}, K {K}, {M} x {D})",
                device,
                operands(shapes, queries),
                ours,
                peers,
                kinds=(kind,),
                heavy=queries is None and device == "cpu",
                main=shapes is DETR and queries != 1100,
            )
    return rows
