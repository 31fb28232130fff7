"""Dynamic convolution: depthwise kernels that are predicted at every position (Zhu et al. 2019, Eq. 5 to 7).

Shapes: B batch, G groups, C channels, (H, W) or T positions, taps of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.axes import unflatten
from ..common.attention import MapAttention, attend
from ..common.checks import check_fits, check_map, check_padding_mask, check_tensor, odd_pair, pair, positive
from ..common.logits import WindowLogits
from ..common.sequence_cache import SequenceCache, check_cache
from ..common.tracing import one_node
from ..common.weights import map_weights
from .parts.memory_format import in_format_of, map_heads, to_channels_last
from .parts.projection_norms import normalize, projections


class DynamicConv2d(MapAttention):
    """``x + gamma * f(x)``, f a gated linear unit, a dynamic convolution and an output projection.

    With v = GLU(W_1 x), each position predicts ``num_groups`` kernels softmax(W_K v), which weight the values v around
    it; channels of a group share a kernel. Taps outside the map read 0 and keep their softmax weight, as in fairseq's
    dynamic convolution. ``gamma`` starts at 0, so inserting the layer does not change a trained network's output.

    Args:
        in_channels: C; a multiple of ``num_groups``.
        kernel_size: Odd; n_k of the papers, 13 to 31 in images.
        num_groups: G.
        dilation: Distance between neighboring taps.
        bias: Whether both linear layers have biases; the kernels' predictor has none.
        residual: Whether to return ``x + gamma * f(x)``; else f(x), without ``gamma``.
        norm_layer: Creates a normalization of a number of channels, such as ``nn.SyncBatchNorm``, after each
            projection; None for none. Zhu et al. have one in their segmentation networks (section 4.1).

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        kernel_size: int | Sequence[int] = 31,
        num_groups: int = 16,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        residual: bool = True,
        *,
        norm_layer: Callable[[int], nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_groups(in_channels, num_groups)
        self.in_channels, self.num_groups = in_channels, num_groups
        self.kernel_size, self.dilation = odd_pair("kernel_size", kernel_size), pair("dilation", dilation)
        self.padding = tuple(k // 2 * step for k, step in zip(self.kernel_size, self.dilation))
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        taps = self.kernel_size[0] * self.kernel_size[1]
        self.input = nn.Conv2d(in_channels, 2 * in_channels, 1, bias=bias, **factory)
        self.kernel = nn.Conv2d(in_channels, num_groups * taps, 1, bias=False, **factory)
        self.output = nn.Conv2d(in_channels, in_channels, 1, bias=bias, **factory)
        self.gamma = nn.Parameter(torch.empty(1, **factory)) if residual else None
        if norm_layer is not None:
            normalize(self, ("input", "kernel", "output"), norm_layer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all layers by Glorot uniform initialization, and zero biases and ``gamma``."""
        for layer in projections(self):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if self.gamma is not None:
            nn.init.zeros_(self.gamma)

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C, H, W) -> (B, C, H, W)."""
        convolved = attend(self._logits(x))
        output = in_format_of(x, self.output(convolved.permute(0, 1, 4, 2, 3).flatten(1, 2)))
        return output if self.gamma is None else x + self.gamma * output

    def _logits(self, x: Tensor) -> WindowLogits:
        """Compute values (B, G, H, W, C / G) and the kernels' logits; taps outside the map take part as zeros."""
        check_map(x, self.in_channels, self.input)
        value = to_channels_last(F.glu(self.input(to_channels_last(x)), 1))
        position_logits = map_heads(self.kernel(value), self.num_groups)
        return WindowLogits(
            None, None, map_heads(value, self.num_groups), position_logits, self.kernel_size, self.dilation,
            padding=self.padding, border="zero",
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.in_channels}, kernel_size={self.kernel_size}, num_groups={self.num_groups}"


class DynamicConv1d(nn.Module):
    """A gated linear unit, a dynamic convolution along the sequence and an output projection.

    Like :class:`DynamicConv2d` without the residual; replaces self-attention in a Transformer (Zhu et al. 2019,
    section 4.1).

    Args:
        in_channels: C; a multiple of ``num_groups``.
        kernel_size: Odd, or any with ``causal``.
        num_groups: G.
        causal: Whether a position reads only itself and the ``kernel_size`` - 1 positions before it.
        bias: Whether both linear layers have biases; the kernels' predictor has none.

    Shapes:
        (B, C, T) -> (B, C, T)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        kernel_size: int = 31,
        num_groups: int = 16,
        causal: bool = False,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_groups(in_channels, num_groups)
        if not isinstance(kernel_size, int) or kernel_size < 1 or (kernel_size % 2 == 0 and not causal):
            raise ValueError(f"kernel_size must be a positive odd int, or any with causal, got {kernel_size!r}")
        self.in_channels, self.num_groups, self.kernel_size, self.causal = in_channels, num_groups, kernel_size, causal
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.input = nn.Linear(in_channels, 2 * in_channels, bias=bias, **factory)
        self.kernel = nn.Linear(in_channels, num_groups * kernel_size, bias=False, **factory)
        self.output = nn.Linear(in_channels, in_channels, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all layers by Glorot uniform initialization, and zero the biases."""
        for layer in (self.input, self.kernel, self.output):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(
        self, x: Tensor, *, key_padding_mask: Tensor | None = None, cache: SequenceCache | None = None
    ) -> Tensor:
        """Convolve along the sequence.

        Args:
            x: (B, C, T). With ``cache`` one or more next tokens.
            key_padding_mask: (B, T) bool, True for padding, which reads as 0 like positions outside the sequence.
            cache: For step-by-step decoding with ``causal``: the same one in every step, updated in place.

        Returns:
            (B, C, T).

        Raises:
            ValueError: A shape, a device or a combination of arguments is invalid.
            TypeError: ``key_padding_mask`` is not bool.
        """
        logits = self._logits(x, key_padding_mask)
        if cache is not None:
            if not self.causal:
                raise ValueError("cache needs causal=True: otherwise new keys would change earlier outputs")
            check_cache(cache, x.shape[0])
            cache.append(None, logits.value.squeeze(2), None)
            assert cache.value is not None
            # Not negative, as the cache keeps at most the kernel's reach.
            ahead = self.kernel_size - 1 - (cache.value.shape[2] - x.shape[2])
            logits = logits._replace(value=cache.value.unsqueeze(2), padding=(0, ahead))
            cache.steps += x.shape[2]
            cache.keep(self.kernel_size - 1)
        convolved = attend(logits).squeeze(2)
        return self.output(convolved.transpose(1, 2).flatten(2)).transpose(1, 2)

    @torch.no_grad()
    def attention_maps(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cache: SequenceCache | None = None,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Lay out the kernels along the sequence for inspection, in O(T²) memory.

        Taps outside the sequence and on padding are left out.

        Args:
            x: As in :meth:`forward`.
            key_padding_mask: As in :meth:`forward`.
            cache: Must be None, as maps are those of whole sequences.
            queries: (Q,), positions; None for all.

        Returns:
            (B, G, T, T), or (B, G, Q, T) with ``queries``.
        """
        if cache is not None:
            raise ValueError("cache must be None: attention_maps takes whole sequences")
        maps = map_weights(self._logits(x, key_padding_mask), (1, x.shape[2]))[:, :, 0, :, 0]
        if key_padding_mask is not None:
            maps = maps.masked_fill(key_padding_mask[:, None, None], 0)
        return maps if queries is None else maps[:, :, queries]

    def _logits(self, x: Tensor, key_padding_mask: Tensor | None) -> WindowLogits:
        """Compute values (B, G, 1, T, C / G), 0 at padding, and the kernels' logits (B, G, 1, T, taps)."""
        check_tensor("x", x)
        if x.dim() != 3 or x.shape[1] != self.in_channels or x.shape[2] == 0:
            raise ValueError(f"x must have shape (B, {self.in_channels}, T) with T > 0, got {tuple(x.shape)}")
        check_fits("x", x, self.input)
        check_padding_mask(key_padding_mask, x.shape[0], x.shape[2], x.device)
        value = F.glu(self.input(x.transpose(1, 2)), -1)
        position_logits = self._grouped(self.kernel(value))
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask.unsqueeze(2), 0)
        ahead = self.kernel_size - 1 if self.causal else self.kernel_size // 2
        return WindowLogits(
            None, None, self._grouped(value), position_logits, (1, self.kernel_size), padding=(0, ahead), border="zero"
        )

    def _grouped(self, projected: Tensor) -> Tensor:
        """View (B, T, G * n) as (B, G, 1, T, n)."""
        return unflatten(projected, 2, (self.num_groups, -1)).transpose(1, 2).unsqueeze(2)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, kernel_size={self.kernel_size}, num_groups={self.num_groups}"
        return text + (", causal=True" if self.causal else "")


def _check_groups(in_channels: int, num_groups: int) -> None:
    positive(in_channels=in_channels, num_groups=num_groups)
    if in_channels % num_groups:
        raise ValueError(f"in_channels must be a multiple of num_groups = {num_groups}, got {in_channels}")
