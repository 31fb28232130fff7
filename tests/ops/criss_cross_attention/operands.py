"""Random arguments of criss-cross attention."""

from __future__ import annotations

import torch
from torch import Tensor

LOGITS = ["content", "position", "both"]


def operands(
    size=(5, 7), logits="both", *, batch=2, heads=3, d=4, dv=5, dtype=torch.float64, device="cpu", grad=True
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    def draw(width: int) -> Tensor:
        return torch.randn(batch, heads, *size, width, dtype=dtype, device=device, requires_grad=grad)

    content = logits in ("content", "both")
    return (
        draw(d) if content else None,
        draw(d) if content else None,
        draw(dv),
        draw(sum(size)) if logits in ("position", "both") else None,
    )
