"""Deformable convolution against torchvision's and mmcv's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_plugins.ops import deform_conv1d, deform_conv2d

from .. import compiled_mmcv
from ..case import Buffer, Case, Run, forward, forward_backward

# (B, C, H, W, offset groups), all with a 3 x 3 kernel, padding 1, masks and C -> C channels
CPU_SIZES = ((2, 256, 50, 68, 1), (2, 256, 50, 68, 4), (1, 256, 50, 68, 1), (1, 256, 50, 68, 4),
             (2, 256, 100, 152, 1), (16, 256, 25, 34, 1))  # fmt: skip
CUDA_SIZES = ((16, 256, 64, 64, 1), (16, 256, 64, 64, 4), (2, 256, 50, 68, 1))


def ours(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    return deform_conv2d(input, offset, weight, None, 1, 1, 1, mask)


def torchvision() -> Callable[..., Tensor]:
    from torchvision.ops import deform_conv2d as peer

    return lambda input, offset, mask, weight: peer(input, offset, weight, None, 1, 1, 1, mask)


def mmcv() -> Callable[..., Tensor]:
    peer = compiled_mmcv.operators().modulated_deform_conv2d

    def run(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return peer(input, offset, mask, weight, None, 1, 1, 1, 1, offset.shape[1] // (2 * 9))

    return run


def plain_convolution() -> Callable[..., Tensor]:
    """Return the convolution that a deformable one replaces: a lower bound, not a peer."""
    return lambda input, offset, mask, weight: torch.nn.functional.conv2d(input, weight, padding=1)


def operands(size: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    B, C, H, W, D = size
    make = dict(device=device, dtype=dtype)
    return (
        torch.randn(B, C, H, W, **make),
        torch.randn(B, 18 * D, H, W, **make) * 2,
        torch.rand(B, 9 * D, H, W, **make),
        torch.randn(C, C, 3, 3, **make) / (3 * C**0.5),
    )


def cases(device: str) -> list[Case]:
    sizes = CPU_SIZES if device == "cpu" else CUDA_SIZES
    kinds = [("float32", torch.float32, False, (4.0, 8.0))]
    if device == "cuda":
        kinds = [
            ("float32", torch.float32, False, (1.2, 1.2)),
            ("TF32", torch.float32, True, (2.0, 2.0)),
            ("float16", torch.float16, False, (3.0, 3.0)),
            ("bfloat16", torch.bfloat16, False, (5.0, 5.0)),
        ]
    peers = {"torchvision": torchvision, "mmcv": mmcv}
    found = []
    for size in sizes:
        for kind, dtype, tf32, goals in kinds:
            for passes, goal in zip(("forward", "forward+backward"), goals):

                def prepare(function: Callable, passes=passes, size=size, dtype=dtype, tf32=tf32) -> Callable[[], Run]:
                    def run() -> Run:
                        torch.backends.cuda.matmul.allow_tf32 = tf32
                        build = forward if passes == "forward" else forward_backward
                        return build(function() if function is not ours else ours, *operands(size, dtype, device))

                    return run

                B, C, H, W, D = size
                found.append(
                    Case(
                        f"2-D ({B},{C},{H},{W}), {D} offset group{'s' * (D > 1)}, {kind}, {passes}",
                        prepare(ours),
                        {name: prepare(peer) for name, peer in peers.items()},
                        goal,
                        Buffer("column buffer", 9 * B * C * H * W * dtype.itemsize),
                        heavy=B * H * W > 20_000 and device == "cpu",
                    )
                )
    found += one_dimension(device)
    return found


def one_dimension(device: str) -> list[Case]:
    """Return the cases of the 1-D operator, whose only peer is torchvision's 2-D one on a map of one row."""

    def flat(function: Callable) -> Callable[..., Tensor]:
        def run(input: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
            pairs = torch.stack((torch.zeros_like(offset), offset), 2).flatten(1, 2)
            return function(input.unsqueeze(2), pairs.unsqueeze(2), weight.unsqueeze(2), padding=(0, 1)).squeeze(2)

        return run

    def torchvision_flat() -> Callable[..., Tensor]:
        from torchvision.ops import deform_conv2d as peer

        return flat(peer)

    def tensors(dtype: torch.dtype) -> tuple[Tensor, ...]:
        make = dict(device=device, dtype=dtype)
        return torch.randn(8, 512, 128, **make), torch.randn(8, 3, 128, **make), torch.randn(512, 512, 3, **make) / 40

    run_ours = lambda input, offset, weight: deform_conv1d(input, offset, weight, padding=1)  # noqa: E731
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16)  # torchvision has no bfloat16
    return [
        Case(
            f"1-D (8,512,128), {str(dtype).removeprefix('torch.')}, {passes}",
            lambda build=build, dtype=dtype: build(run_ours, *tensors(dtype)),
            {"torchvision": lambda build=build, dtype=dtype: build(torchvision_flat(), *tensors(dtype))},
        )
        for dtype in dtypes
        for passes, build in (("forward", forward), ("forward+backward", forward_backward))
    ]
