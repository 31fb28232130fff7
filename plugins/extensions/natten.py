"""Modules of ``natten`` up to 0.19 with their names, arguments and checkpoints, on all devices (Hassani et al. 2023).

It stands in for ``natten`` where none is installed. An installed NATTEN from 0.20 on lacks the names of older code:
``import attn_plugins.extensions.natten`` adds :mod:`.natten_functional`'s to ``natten.functional``.

Shapes: B batch, C channels, M heads, L positions of a sequence or (H, W) of a map, K taps along an axis.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.axes import unflatten
from ..import_hooks import after_import
from ..modules.common.attention import attend
from ..modules.common.checks import check_heads, pair, positive
from ..modules.maps.neighborhood import neighborhood
from . import natten_functional
from .natten_functional import Size, na1d, na2d

__all__ = ["NeighborhoodAttention1D", "NeighborhoodAttention2D", "has_fused_na", "na1d", "na2d"]


class NeighborhoodAttention2D(nn.Module):
    """Neighborhood attention over a map, (B, H, W, C) -> (B, H, W, C), computed by ``window_attention``.

    Args:
        dim: C.
        num_heads: M.
        kernel_size: K, of both axes or of each. A smaller map is padded with zeros, which take part, as up to 0.15.
        dilation: Distance of neighboring taps; None for 1.
        is_causal: Must be False.
        rel_pos_bias: Whether there is a table ``rpb`` of biases by relative position.
        qkv_bias: Whether ``qkv`` has biases.
        qk_scale: Factor of the products; None for (C / M)^-½.
        attn_drop: Dropout probability of the weights, which are then held in memory.
        proj_drop: Dropout probability of the output.
        bias: The name of ``rel_pos_bias`` up to 0.15, where it was True by default.

    Raises:
        ValueError: An argument is out of range.
        NotImplementedError: ``is_causal`` is True.
    """

    axes = 2

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kernel_size: Size,
        dilation: Size | None = 1,
        is_causal: bool = False,
        rel_pos_bias: bool = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        *,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads, attn_drop)
        if is_causal:
            raise NotImplementedError("attn_plugins stands in for natten, and has no causal windows: install natten")
        if self.axes == 1:
            positive(kernel_size=kernel_size, dilation=dilation or 1)  # type: ignore[arg-type]
        lone = (1,) * (2 - self.axes)
        kernel, steps = pair("kernel_size", kernel_size), pair("dilation", dilation or 1)
        self.kernel_size, self.dilation = lone + kernel[: self.axes], lone + steps[: self.axes]
        self.num_heads, self.scale = num_heads, qk_scale or (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.rpb: nn.Parameter | None = None
        if rel_pos_bias if bias is None else bias:
            self.rpb = nn.Parameter(torch.zeros(num_heads, *(2 * n - 1 for n in self.kernel_size[-self.axes :])))
            nn.init.trunc_normal_(self.rpb, std=0.02)
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(attn_drop), nn.Linear(dim, dim), nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module: (B, H, W, C) -> (B, H, W, C)."""
        if x.dim() != 4:
            raise ValueError(f"x must have shape (B, H, W, C), got {tuple(x.shape)}")
        return self._attend(x)

    def _attend(self, x: Tensor) -> Tensor:
        H, W = x.shape[1:3]
        beyond = [max(0, taps * step - n) for taps, step, n in zip(self.kernel_size, self.dilation, (H, W))]
        x = F.pad(x, (0, 0, 0, beyond[1], 0, beyond[0])) if any(beyond) else x
        query, key, value = unflatten(self.qkv(x), 3, (3, self.num_heads, -1)).permute(3, 0, 4, 1, 2, 5).unbind()
        table = self.rpb.unsqueeze(1) if self.rpb is not None and self.axes == 1 else self.rpb
        logits = neighborhood(query, key, value, table, self.kernel_size, self.dilation, self.scale)
        drop = self.attn_drop if self.attn_drop.training and self.attn_drop.p > 0 else 0.0
        attended = attend(logits, drop)[:, :, :H, :W]
        return self.proj_drop(self.proj(attended.permute(0, 2, 3, 1, 4).flatten(3)))

    def extra_repr(self) -> str:
        sizes = f"kernel_size={self.kernel_size[-self.axes :]}, dilation={self.dilation[-self.axes :]}"
        return f"num_heads={self.num_heads}, {sizes}, rel_pos_bias={self.rpb is not None}"


class NeighborhoodAttention1D(NeighborhoodAttention2D):
    """:class:`NeighborhoodAttention2D` over a sequence, (B, L, C) -> (B, L, C), with an int for K."""

    axes = 1

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module: (B, L, C) -> (B, L, C)."""
        if x.dim() != 3:
            raise ValueError(f"x must have shape (B, L, C), got {tuple(x.shape)}")
        return self._attend(x.unsqueeze(1)).squeeze(1)


def has_fused_na() -> bool:
    """Return True: ``na1d`` and ``na2d`` store no weights."""
    return True


def when_offered() -> None:
    """Make ``natten.functional`` an attribute, as the package does."""
    importlib.import_module("natten.functional")


def _complete(module: ModuleType) -> None:
    """Add the names that an installed ``natten.functional`` lacks."""
    for name in natten_functional.__all__:
        if not hasattr(module, name):
            setattr(module, name, getattr(natten_functional, name))


after_import("natten.functional", _complete)
