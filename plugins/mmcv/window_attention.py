"""``forward`` of ``ShiftWindowMSA``, Swin's window attention in mmdet and mmsegmentation, on this package's operator.

Each toolkit has its own class of this name, which its backbone refers to directly instead of using a registry.
:mod:`attn_plugins.mmcv.drop_in` replaces the ``forward`` of each imported class now, and of the others when they are
imported; it imports no toolkit. ``WindowMSA`` keeps its ``forward``, which is used when attention weights are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..import_hooks import after_import
from ..modules.common.untouched import untouched
from ..modules.tokens.window_speed import stock_is_faster
from ..modules.tokens.windows import TableAttention, in_windows, needs_weights
from ..terms.position_table import table_logits

MODULES = ("mmdet.models.backbones.swin", "mmseg.models.backbones.swin")
LAYER = "ShiftWindowMSA"


def shift_window_forward(stock: Callable[..., Tensor], inner: type[Any]) -> Callable[..., Tensor]:
    """Create the ``forward`` that replaces ``stock``.

    Args:
        stock: The toolkit's ``forward``, used for dropout of weights, and if the inner layer is another one, or it or a
            part of it has hooks or its own ``forward``; in ``torch.jit.trace``; and on CUDA where it was measured to be
            faster.
        inner: The toolkit's ``WindowMSA``.
    """

    def forward(self: Any, query: Tensor, hw_shape: Sequence[int]) -> Tensor:
        """Attend within windows; tokens are (B, H * W, C) with ``hw_shape`` (H, W)."""
        attn: Any = self.w_msa
        if torch.jit.is_tracing() or needs_weights(attn, inner) or stock_is_faster("Swin", query, attn):
            return stock(self, query, hw_shape)
        if not all(untouched(part, type(part)) for part in attn.children()):
            return stock(self, query, hw_shape)
        B, L, C = query.shape
        H, W = hw_shape
        assert L == H * W, "input feature has wrong size"  # the toolkit's message
        n, shift = self.window_size, self.shift_size
        x = F.pad(query.view(B, H, W, C), (0, 0, 0, -W % n, 0, -H % n))  # before the roll, unlike timm
        attend = TableAttention(table_logits(attn.relative_position_bias_table, attn.window_size), attn.scale)
        x = in_windows(x, (n, n), (shift, shift), attn.num_heads, attn.qkv, attend)[:, :H, :W]
        return self.drop(attn.proj_drop(attn.proj(x.reshape(B, L, C))))

    return forward


def check() -> None:
    """Check that each imported layer has its toolkit's ``forward`` or this package's.

    Raises:
        RuntimeError: A layer has another ``forward``.
    """
    for name in MODULES:
        if name in sys.modules:
            _check(sys.modules[name])


def replace() -> None:
    """Replace the ``forward`` of each toolkit's layer now, or when its module is imported."""
    for name in MODULES:
        after_import(name, _replace)


def _check(module: ModuleType) -> None:
    layer = getattr(module, LAYER, None)
    if layer is None:
        return
    forward = layer.__dict__.get("forward")
    owner = getattr(forward, "__module__", None)
    if owner not in (__name__, module.__name__):
        raise RuntimeError(
            f"attn_plugins.mmcv.drop_in replaces the forward of {LAYER}, but {module.__name__} holds {forward} there; "
            "nothing was replaced. Define a subclass with another name instead."
        )


def _replace(module: ModuleType) -> None:
    layer: Any = getattr(module, LAYER, None)
    if layer is not None and layer.forward.__module__ != __name__:
        layer.forward = shift_window_forward(layer.forward, module.WindowMSA)
