"""Operators as users call them on CUDA: eager, with the host's time, beside a CUDA graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attn_plugins.ops import deformable_attention

from ..case import OWN, Case, Maker, Run, problem
from . import criss_cross, deform_conv, global_attention, sequence_attention, vision_transformers, window_attention
from . import deformable_attention as attention

KINDS = ("float16", "float32", "TF32", "bfloat16")
CONVOLUTIONS = (2, 256, 50, 68, 1), (16, 256, 64, 64, 1)
LEVELS = (100, 168), (50, 84), (25, 42), (13, 21)
DETERMINISTIC = f"{OWN}sums of integers"  # of the deformable operators' gradients on CUDA
# Rows of other benchmarks that are called in this way as well.
OTHERS = {
    window_attention: r"(content|content and position|dynamic convolution), .* 7x7",
    sequence_attention: r"band, .* T 1024, k 21",
    global_attention: r"all terms",
    criss_cross: r"content,",
    vision_transformers: r"Swin's windows, shifted",
}


def deformops_conv() -> Callable[..., Tensor]:
    """Return deformops' convolution, which takes maps in channels-last order and offsets by group and tap."""
    from deformops import registry

    def run(input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        places = offset.unflatten(1, (-1, 9, 2)).permute(0, 4, 5, 1, 2, 3)
        factors = mask.unflatten(1, (-1, 9)).permute(0, 3, 4, 1, 2)
        maps = input.permute(0, 2, 3, 1)
        return registry.conv(maps, places, weight, None, factors, 1, 1, 1).permute(0, 3, 1, 2)

    return run


def deformops_attention() -> Callable[..., Tensor]:
    from deformops import registry

    sizes = torch.tensor(LEVELS)
    starts = torch.cat((sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]))
    return lambda value, locations, weights: registry.msda(value, sizes, starts, locations, weights)


def in_deterministic_mode(prepared: Callable[[], Run]) -> Callable[[], Run]:
    """Return a preparation of the same run in torch's deterministic mode."""

    def make() -> Run:
        run = prepared()

        def deterministic() -> object:
            torch.use_deterministic_algorithms(True)
            try:
                return run()
            finally:
                torch.use_deterministic_algorithms(False)

        return deterministic

    return make


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return []
    rows = []
    for size in CONVOLUTIONS:
        peers: dict[str, Maker] = {
            "torchvision": deform_conv.torchvision, "mmcv": deform_conv.mmcv, "deformops": deformops_conv,
        }  # fmt: skip
        title = f"deform_conv2d {str(size[:-1]).replace(' ', '')}"
        rows += problem(title, device, deform_conv.operands(size), lambda: deform_conv.ours, peers, kinds=KINDS)
    for title, queries in (("encoder", None), ("decoder", 300)):
        draw = attention.operands(LEVELS, queries, batch=2)

        def inputs(dtype: torch.dtype, draw: Callable[[torch.dtype], list[Tensor]] = draw) -> list[Tensor]:
            return [tensor.to(dtype) for tensor in draw(dtype)]

        rows += problem(
            f"deformable_attention, {title}, B 2, Q {queries or sum(h * w for h, w in LEVELS)}, L {len(LEVELS)}",
            device,
            inputs,
            lambda: lambda value, locations, weights: deformable_attention(value, LEVELS, locations, weights),
            {
                "mmcv": lambda: attention.mmcv(LEVELS, True),
                "grid_sample": lambda: attention.grid_sample(LEVELS),
                "deformops": deformops_attention,
            },
            kinds=[kind for kind in KINDS if kind != "TF32"],
        )
    for case in rows:
        if case.name.endswith("backward"):
            case.peers[DETERMINISTIC] = in_deterministic_mode(case.ours)
    for module, pattern in OTHERS.items():
        name = module.__name__.rpartition(".")[2]
        for case in module.cases(device):
            if re.match(pattern, case.name):
                peers = {title: peer for title, peer in case.peers.items() if "definition" not in title}
                rows.append(replace(case, name=f"{name}: {case.name}", peers=peers))
    return [replace(case, timing="eager", part=re.split("[ ,:]", case.name)[0], main=True) for case in rows]
