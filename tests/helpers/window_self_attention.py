"""Small layers of window attention, and their inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_plugins.modules import WindowSelfAttention

C, M = 12, 3
CASES = [  # map, window, shift
    ((6, 9), (3, 3), (1, 1)),
    ((5, 7), (3, 4), (1, 2)),
    ((2, 9), (4, 3), (2, 0)),
    ((4, 3), (2, 3), (0, 1)),
    ((3, 2), (4, 4), (0, 0)),
]


def layer(dtype=torch.float64, **options) -> WindowSelfAttention:
    torch.manual_seed(0)
    module = WindowSelfAttention(C, M, dtype=dtype, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


def tokens(size, dtype=torch.float64, B=2) -> Tensor:
    return torch.randn(B, *size, C, dtype=dtype, generator=torch.Generator().manual_seed(1))
