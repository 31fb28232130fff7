"""Several 1×1 convolutions of one map as one.

Shapes: B batch, C channels, M heads, d width per head, (H, W) the map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....core.arguments import without_autocast
from ....core.axes import unflatten
from ....core.gradients import traced
from ...common.bypass import has_global_hooks, untouched


def project(x: Tensor, convs: dict[str, nn.Module], vector: Tensor | None = None) -> dict[str, Tensor]:
    """Apply 1×1 convolutions without a bias to ``x``, (B, C, H, W), as one convolution where nobody can notice.

    They are called one by one where they are of another class (quantized, adapted, normalized), have hooks, or have
    weights that are not plain, and while PyTorch compiles or traces, as exporters then name each of them.

    Args:
        x: (B, C, H, W).
        convs: Convolutions by name.
        vector: (M, d), to compute as ``'saliency'``, (B, M, H, W), the products of the map named ``'key'`` with it.
            They are computed without that map, or, where the convolutions are called one by one, not at all.

    Returns:
        The maps by name.
    """
    if len(convs) == 1 or not may_leave_out(*convs.values()):
        return {name: conv(x) for name, conv in convs.items()}
    weights: dict[str, Tensor] = {name: conv.weight for name, conv in convs.items()}  # type: ignore[misc]
    if vector is not None and (key := weights.pop("key", None)) is not None:
        by_head = unflatten(key, 0, vector.shape).flatten(2)
        with without_autocast(x.device.type):  # cast once, by the convolution
            products = torch.bmm(vector.unsqueeze(1), by_head)  # (M, 1, C)
        weights["saliency"] = products.mT.unsqueeze(3)
    maps = F.conv2d(x, torch.cat([*weights.values()])).split([weight.shape[0] for weight in weights.values()], 1)
    return dict(zip(weights, maps))


def may_leave_out(*convs: nn.Module) -> bool:
    """Return whether nobody can notice that the weights of convolutions are read instead of calling them."""
    return not traced() and not has_global_hooks() and all(map(_is_plain, convs))


def _is_plain(conv: nn.Module) -> bool:
    if not untouched(conv, nn.Conv2d):
        return False
    weight: Any = conv.weight
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.device.type != "meta"
