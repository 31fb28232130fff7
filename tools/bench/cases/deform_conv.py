"""Deformable convolution against torchvision's and mmcv's, and in one dimension against torchvision's on one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attn_plugins.ops import deform_conv1d, deform_conv2d

from .. import compiled_mmcv
from ..case import COMPILED, Case, Maker, in_half, problem

# (B, C, H, W, offset groups), all with a 3 x 3 kernel, padding 1, masks and C -> C channels
SIZES = {
    "cpu": ((2, 256, 50, 68, 1), (2, 256, 50, 68, 4), (1, 256, 50, 68, 1), (1, 256, 50, 68, 4), (2, 256, 100, 152, 1),
            (16, 256, 25, 34, 1)),
    "cuda": ((2, 256, 50, 68, 1), (16, 256, 64, 64, 1), (16, 256, 64, 64, 4)),
}  # fmt: skip


def ours(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return deform_conv2d(input, offset, weight, None, 1, 1, 1, mask)


def torchvision() -> Callable[..., Tensor]:
    from torchvision.ops import deform_conv2d as peer

    def run(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        if input.dtype != torch.bfloat16 or input.is_cpu:
            return peer(input, offset, weight, None, 1, 1, 1, mask)
        # torchvision's kernels do not support bfloat16.
        return peer(*(t.float() for t in (input, offset, weight)), None, 1, 1, 1, mask.float()).to(input.dtype)

    return run


def mmcv() -> Callable[..., Tensor]:
    compiled_mmcv.extension()
    from mmcv.ops import modulated_deform_conv2d as peer

    def run(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return peer(input, offset, mask, weight, None, 1, 1, 1, 1, offset.shape[1] // (2 * 9))

    return run


def operands(size: Sequence[int]) -> Callable[[torch.dtype], list[Tensor]]:
    B, C, H, W, D = size

    def draw(dtype: torch.dtype) -> list[Tensor]:
        return [
            torch.randn(B, C, H, W, dtype=dtype),
            torch.randn(B, 18 * D, H, W, dtype=dtype) * 2,
            torch.rand(B, 9 * D, H, W, dtype=dtype),
            torch.randn(C, C, 3, 3, dtype=dtype) / (3 * C**0.5),
        ]

    return draw


def ours_1d(input: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
    return deform_conv1d(input, offset, weight, padding=1)


def torchvision_1d() -> Callable[..., Tensor]:
    from torchvision.ops import deform_conv2d as peer

    def run(input: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
        pairs = torch.stack((torch.zeros_like(offset), offset), 2).flatten(1, 2)
        return peer(input.unsqueeze(2), pairs.unsqueeze(2), weight.unsqueeze(2), padding=(0, 1)).squeeze(2)

    return run


def operands_1d(dtype: torch.dtype) -> list[Tensor]:
    shapes = (8, 512, 128), (8, 3, 128), (512, 512, 3)
    return [torch.randn(*shape, dtype=dtype) / (40 if shape is shapes[2] else 1) for shape in shapes]


def cases(device: str) -> list[Case]:
    rows = []
    peers: dict[str, Maker] = {"torchvision": torchvision, "mmcv": mmcv}
    for size in SIZES[device]:
        B, C, H, W, D = size
        for kind in ("float32",) if device == "cpu" else ("float32", "TF32", "float16", "bfloat16"):
            rows += problem(
                f"2-D ({B},{C},{H},{W}), {D} offset group{'s' * (D > 1)}",
                device,
                operands(size),
                lambda: ours,
                peers,
                kinds=(kind,),
                definitions=COMPILED if B == 16 and D == 1 else (),
                heavy=B * H * W > 20_000 and device == "cpu",
                main=size == SIZES["cuda"][0],
            )
    rows += in_half("2-D (2,256,50,68), 1 offset group", device, operands(SIZES["cpu"][0]), lambda: ours)
    kinds = ("float32",) if device == "cpu" else ("float16", "float32")  # torchvision has no bfloat16
    return rows + problem(
        "1-D (8,512,128)", device, operands_1d, lambda: ours_1d, {"torchvision": torchvision_1d}, kinds=kinds
    )
