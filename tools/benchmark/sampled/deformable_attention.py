"""Deformable attention against mmcv's (on CPUs, mmcv's composition of ``grid_sample``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_plugins.ops import deformable_attention

from .. import compiled_mmcv
from ..case import Case, Run, forward, forward_backward

M, D, K = 8, 32, 4  # heads, width of a head, points
DETR = ((100, 134), (50, 67), (25, 34), (13, 17))  # for an image of 800 x 1072
MASK2FORMER = ((128, 128), (64, 64), (32, 32))  # for 1024 x 1024, without the finest level
# shapes, queries (None: every pixel of every level), goals for forward and for forward + backward
ROWS = {
    "encoder, DETR's four levels": (DETR, None, (10.0, 12.0)),
    "encoder, Mask2Former's three levels": (MASK2FORMER, None, (8.0, 8.0)),
    "decoder, 300 queries": (DETR, 300, (1.5, 2.0)),
    "decoder, 1100 queries": (DETR, 1100, (1.5, 2.0)),
}
HALF = ("encoder, DETR's four levels", "decoder, 300 queries")  # also measured with bfloat16 values


def operands(shapes: tuple, queries: int | None, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Return value, locations and weights, with samples about two pixels from the query's reference points."""
    S, L = sum(h * w for h, w in shapes), len(shapes)
    make = dict(device=device)
    if queries is None:
        points = [
            torch.cartesian_prod((torch.arange(h, **make) + 0.5) / h, (torch.arange(w, **make) + 0.5) / w).flip(-1)
            for h, w in shapes
        ]
        reference = torch.cat(points)
    else:
        reference = torch.rand(queries, 2, **make)
    Q = len(reference)
    sizes = torch.tensor([(w, h) for h, w in shapes], **make).view(L, 1, 2)
    locations = reference.view(1, Q, 1, 1, 1, 2) + 2 * torch.randn(1, Q, M, L, K, 2, **make) / sizes
    weights = torch.rand(1, Q, M, L * K, **make).softmax(-1).view(1, Q, M, L, K)
    return torch.randn(1, S, M, D, dtype=dtype, **make), locations, weights


def ours(shapes: tuple) -> Callable[..., Tensor]:
    return lambda value, locations, weights: deformable_attention(value, shapes, locations, weights)


def mmcv(shapes: tuple, device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return mmcv's function, which casts locations and weights to the value's dtype; CUDA has a compiled one."""
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    compiled = device == "cuda" and dtype != torch.bfloat16
    function = compiled_mmcv.operators().multi_scale_deform_attn.MultiScaleDeformableAttnFunction if compiled else None
    sizes = torch.tensor(shapes, device=device)
    starts = torch.cat((sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]))

    def run(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        locations, weights = locations.to(value.dtype), weights.to(value.dtype)
        if function is None:
            return multi_scale_deformable_attn_pytorch(value, sizes, locations, weights)
        return function.apply(value, sizes, starts, locations, weights, 64)

    return run


def mmcv_plain(shapes: tuple) -> Callable[..., Tensor]:
    """Return mmcv's function in plain PyTorch, which needs no binary; it takes numbers, and need not wait for them."""
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    def run(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return multi_scale_deformable_attn_pytorch(value, shapes, locations.to(value.dtype), weights.to(value.dtype))

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
    found = []
    for name, (shapes, queries, goals) in ROWS.items():
        for dtype in (torch.float32, torch.bfloat16):
            if dtype == torch.bfloat16 and name not in HALF:
                continue
            for (passes, build), goal in zip((("forward", forward), ("forward+backward", forward_backward)), goals):

                def prepare(
                    make: Callable, shapes=shapes, queries=queries, dtype=dtype, build=build
                ) -> Callable[[], Run]:
                    return lambda: build(make(), *operands(shapes, queries, dtype, device))

                peers = {"mmcv": prepare(lambda shapes=shapes, dtype=dtype: mmcv(shapes, device, dtype))}
                if device == "cuda":
                    peers["mmcv, plain PyTorch"] = prepare(lambda shapes=shapes: mmcv_plain(shapes))
                    peers["grid_sample"] = prepare(lambda shapes=shapes: grid_sample(shapes))
                Q = sum(h * w for h, w in shapes) if queries is None else queries
                found.append(
                    Case(
                        f"{name} (Q {Q}, L {len(shapes)}, K {K}, {M} x {D}), {str(dtype)[6:]}, {passes}",
                        prepare(lambda shapes=shapes: ours(shapes)),
                        peers,
                        goal,
                        heavy=queries is None and device == "cpu",
                    )
                )
    return found
