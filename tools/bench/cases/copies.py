"""Copies of maps to another memory format against ATen's: ``work`` over time is the bytes a second."""

from __future__ import annotations

import torch

from attn_plugins.modules.maps.parts.memory_format import in_memory_format

from ..case import Case, problem

SHAPES = ((2, 512, 97, 97), (8, 512, 64, 64), (16, 256, 56, 56))


def cases(device: str) -> list[Case]:
    copies = []
    for shape in SHAPES:
        for last, title in ((True, "NCHW to NHWC"), (False, "NHWC to NCHW")):
            to = torch.channels_last if last else torch.contiguous_format
            source = torch.contiguous_format if last else torch.channels_last
            copies += problem(
                f"{title}, {shape}",
                device,
                lambda dtype, shape=shape, source=source: [torch.randn(shape, dtype=dtype).to(memory_format=source)],
                lambda last=last: lambda x: in_memory_format(x, last),
                {"ATen": lambda to=to: lambda x: x.contiguous(memory_format=to)},
                passes=("forward",),
            )
    return copies
