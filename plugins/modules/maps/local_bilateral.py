"""Local bilateral attention as a replacement for convolution, with iterative refinement (Thesis, chapter 4).

Shapes: B batch, M heads, d = out_channels / M, (H, W) the input's map, (Hq, Wq) the output's, taps of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..common.attention import MapAttention, attend
from ..common.checks import check_map, check_window, odd_pair, one_of, pair, positive
from ..common.logits import WindowLogits
from ..common.tracing import one_node
from .parts.memory_format import in_format_of, map_heads, to_channels_last

Activation = Literal["none", "relu"]


class Projection(nn.Sequential):
    """A 1×1 convolution; if normalized, with ``bias``, followed by BatchNorm and an activation."""

    def __init__(
        self, in_channels: int, out_channels: int, bias: bool, norm: bool, activation: Activation, **factory: Any
    ) -> None:
        layers: list[nn.Module] = [nn.Conv2d(in_channels, out_channels, 1, bias=bias and norm, **factory)]
        if norm:
            layers.append(nn.BatchNorm2d(out_channels, **factory))
        if norm and activation == "relu":
            layers.append(nn.ReLU())
        super().__init__(*layers)


class LocalBilateralConv2d(MapAttention):
    """A replacement for ``nn.Conv2d``: attention over the k × k window around each position.

    Source: Thesis, Eq. 4.6 to 4.9. With v_i = W_σ x_i the logit of position j in i's window, in every head, is

        v_i·W_φ x_j + W_γ[j - i]·v_i

    (the content and the geometric part), and the output is W_M applied to the weighted sum of W_β x_j. Refinement
    (Algorithm 1) repeats the following ``iterations`` - 1 times for the content part: the weighted sum of the window's
    keys is squashed to u_i, and u_i·W_φ x_j is added to the logits; that is, u_i is added to the content's query.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output, queries, keys and values; a multiple of ``num_heads``.
        kernel_size: Height and width of the window, odd.
        stride: Stride, as in a convolution.
        padding: None for ``dilation * (kernel_size - 1) / 2``, which preserves the size. Larger values are invalid, as
            every window's centre must be on the map. Positions outside the map are masked.
        dilation: Distance between neighboring positions of a window.
        groups: Must be 1; accepted because convolutions have it.
        bias: Whether the normalized projections have biases.
        num_heads: M.
        content: Whether the logits have the content part.
        geometric: Whether the logits have the geometric part.
        iterations: 1 for no refinement; more require ``content``.
        shared: Whether to use one normalized projection W_φ = W_σ = W_β for queries, keys and values. The output
            projection and the geometric layer then have no bias and no BatchNorm (the thesis' parameter counts).
        activation: ``'none'`` for linear projections (Eq. 4.4), or ``'relu'`` after every BatchNorm except that of the
            geometric logits, which reproduces the GFLOPs of Table 4.2.

    Shapes:
        (B, in_channels, H, W) -> (B, out_channels, Hq, Wq), the size of a convolution with these arguments

    Raises:
        ValueError: An argument is out of range or inconsistent with the others, or the map is too small.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int] = 3,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        num_heads: int = 8,
        content: bool = True,
        geometric: bool = True,
        iterations: int = 1,
        shared: bool = False,
        activation: Activation = "none",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(in_channels=in_channels, out_channels=out_channels, num_heads=num_heads, iterations=iterations)
        one_of(Activation, activation=activation)
        if out_channels % num_heads:
            raise ValueError(f"out_channels must be a multiple of num_heads = {num_heads}, got {out_channels}")
        if groups != 1:
            raise ValueError(f"groups must be 1: attention has heads instead, got {groups!r}")
        if not content and not geometric:
            raise ValueError("content or geometric must be True, got False for both")
        if iterations > 1 and not content:
            raise ValueError(f"iterations must be 1 without content, got {iterations}")
        self.in_channels, self.out_channels, self.num_heads = in_channels, out_channels, num_heads
        self.kernel_size = odd_pair("kernel_size", kernel_size)
        self.stride, self.dilation = pair("stride", stride), pair("dilation", dilation)
        centre = tuple(k // 2 * step for k, step in zip(self.kernel_size, self.dilation))
        self.padding = centre if padding is None else pair("padding", padding, minimum=0)
        if any(p > c for p, c in zip(self.padding, centre)):
            raise ValueError(
                f"padding must be at most {centre}, dilation * (kernel_size - 1) / 2, so that a window's centre is on "
                f"the map, got {padding!r}"
            )
        self.window: dict[str, Any] = dict(
            kernel_size=self.kernel_size, dilation=self.dilation, stride=self.stride, padding=self.padding
        )
        self.first_centre = centre[0] - self.padding[0], centre[1] - self.padding[1]
        self.groups, self.iterations, self.shared = groups, iterations, shared
        self.content, self.geometric, self.activation = content, geometric, activation
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.query = Projection(in_channels, out_channels, bias, True, activation, **factory)
        self.key: Projection | None = None
        self.value: Projection | None = None
        if not shared:
            if content:
                self.key = Projection(in_channels, out_channels, bias, True, activation, **factory)
            self.value = Projection(in_channels, out_channels, bias, True, activation, **factory)
        self.position: Projection | None = None
        if geometric:
            taps = self.kernel_size[0] * self.kernel_size[1]
            self.position = Projection(out_channels, num_heads * taps, bias, not shared, "none", **factory)
        self.output = Projection(out_channels, out_channels, bias, not shared, activation, **factory)

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, in_channels, H, W) -> (B, out_channels, Hq, Wq)."""
        attended = attend(self._logits(x))
        return in_format_of(x, self.output(attended.permute(0, 1, 4, 2, 3).flatten(1, 2)))

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return (Hq, Wq) for an input of ``size`` (H, W)."""
        k, s, p, d = self.kernel_size, self.stride, self.padding, self.dilation
        return (size[0] + 2 * p[0] - d[0] * (k[0] - 1) - 1) // s[0] + 1, (
            size[1] + 2 * p[1] - d[1] * (k[1] - 1) - 1
        ) // s[1] + 1

    def attention_logits(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the refined ``content`` logits and the ``geometric`` logits, -inf outside the windows."""
        logits = super().attention_logits(x, queries)
        return {"geometric" if name == "position" else name: part for name, part in logits.items()}

    def _logits(self, x: Tensor) -> WindowLogits:
        """Compute refined queries, keys, values, and geometric logits (B, M, Hq, Wq, taps)."""
        check_map(x, self.in_channels, self.query)
        check_window("x", x, self.kernel_size, self.padding, self.dilation)
        x = to_channels_last(x)
        projected = self.query(x)
        M = self.num_heads
        value = map_heads(projected if self.value is None else self.value(x), M)
        key = map_heads(projected if self.key is None else self.key(x), M) if self.content else None
        centres = self._centres(projected)
        position_logits: Tensor | None = None
        if self.position is not None:
            position_logits = map_heads(self.position(centres), M)
        if key is None:
            return WindowLogits(None, None, value, position_logits, **self.window)
        query = map_heads(centres, M)
        for _ in range(self.iterations - 1):
            query = query + squash(attend(WindowLogits(query, key, key, None, **self.window)))
        return WindowLogits(query, key, value, position_logits, **self.window)

    def _centres(self, x: Tensor) -> Tensor:
        """Return the centre of every window."""
        if self.stride == (1, 1) and self.first_centre == (0, 0):
            return x
        Hq, Wq = self.attention_size(x.shape[2:])
        top, left = self.first_centre
        down, right = self.stride
        x = x[:, :, top : top + (Hq - 1) * down + 1 : down, left : left + (Wq - 1) * right + 1 : right]
        return to_channels_last(x)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, num_heads={self.num_heads}"
        for name, default in (
            ("stride", (1, 1)), ("dilation", (1, 1)), ("content", True), ("geometric", True), ("iterations", 1),
            ("shared", False), ("activation", "none"),
        ):  # fmt: skip
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text


def squash(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute |x|² / (1 + |x|²) · x / |x| over the last axis (Thesis, 4.3.2); ``eps`` keeps the slope finite at 0."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    square = wide.square().sum(-1, keepdim=True)
    return (wide * ((square + eps).sqrt() / (1 + square))).to(x.dtype)
