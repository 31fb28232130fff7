"""Deformable convolution layers with a built-in offset predictor (Zhu et al. 2019, Eq. 4; Dai et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.arguments import expand
from ...core.axes import unflatten
from ...ops import deform_conv1d, deform_conv2d
from ..common.checks import check_convolved, check_tensor, positive
from ..common.sequence_cache import SequenceCache, check_cache
from ..common.tracing import Unscriptable, one_node
from .parts.zero_conv import ZeroConv1d, ZeroConv2d


class _DeformableConv(Unscriptable, nn.Module):
    """Base of the 1-D and 2-D layers; subclasses define the convolution and the operator."""

    _dims: int
    _components: int  # offset components per tap
    _predictor: Any  # ZeroConv1d or ZeroConv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        offset_groups: int = 1,
        bias: bool = True,
        modulated: bool = False,
        *,
        offset_scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < offset_scale < math.inf:
            raise ValueError(f"offset_scale must be positive, got {offset_scale!r}")
        positive(in_channels=in_channels, out_channels=out_channels, groups=groups, offset_groups=offset_groups)
        for name, value in (("groups", groups), ("offset_groups", offset_groups)):
            if in_channels % value:
                raise ValueError(f"{name} must divide in_channels {in_channels}, got {value}")
        if out_channels % groups:
            raise ValueError(f"out_channels must be a multiple of groups {groups}, got {out_channels}")
        self.kernel_size = expand("kernel_size", kernel_size, self._dims, 1)
        self.stride = expand("stride", stride, self._dims, 1)
        self.padding = expand("padding", padding, self._dims, 0)
        self.dilation = expand("dilation", dilation, self._dims, 1)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.groups = groups
        self.offset_groups = offset_groups
        self.modulated = modulated
        self.offset_scale = float(offset_scale)
        self.transposed = False  # an attribute of torch's convolutions that weight initializers of toolkits read
        self.output_padding = (0,) * self._dims
        options: dict[str, Any] = dict(device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size, **options))
        self.bias = nn.Parameter(torch.empty(out_channels, **options)) if bias else None
        per_tap = self._components + int(modulated)
        self.conv_offset = self._predictor(
            in_channels,
            offset_groups * per_tap * math.prod(self.kernel_size),
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            **options,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Conv2d`` does, and zero the bias and the predictor."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for parameter in self.conv_offset.parameters():
            nn.init.zeros_(parameter)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Predict the operator's offsets and, if modulated, its masks."""
        predicted = self.conv_offset(x)
        if not self.modulated:
            return self._scaled(predicted), None
        samples = predicted.shape[1] // (len(self.kernel_size) + 1)  # a component per axis, and the mask
        offset, mask = predicted.split((predicted.shape[1] - samples, samples), dim=1)
        return self._scaled(offset), mask.sigmoid()

    def _scaled(self, offset: Tensor) -> Tensor:
        return offset if self.offset_scale == 1.0 else offset * self.offset_scale

    def _check(self, x: Tensor) -> None:
        check_convolved(x, self.in_channels, self.weight, self.kernel_size, self.padding, self.dilation)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"offset_groups={self.offset_groups}, bias={self.bias is not None}, modulated={self.modulated}"
        )


class DeformableConv2d(_DeformableConv):
    """A 2-D convolution with learned sampling locations, a drop-in replacement for ``nn.Conv2d``.

    Equation 4 of Zhu et al. (2019): tap m of query q reads the map at ``q + p_m + w_m x_q`` by bilinear
    interpolation. The offsets come from ``conv_offset``, a zero-initialized convolution of the same shape, so the layer
    initially equals ``nn.Conv2d`` with the same weight. Train ``conv_offset`` at 0.1 times the learning rate (the
    paper's footnote 2).

    The state_dict is that of mmcv's ``DCN`` pack, or of its ``DCNv2`` pack with ``modulated``.

    Args:
        in_channels: Channels C of the input.
        out_channels: Channels of the output.
        kernel_size: Kh, Kw or one int for both, as for the next three arguments.
        stride: Distance between neighboring output pixels.
        padding: Zeros around the input.
        dilation: Distance between neighboring taps.
        groups: Number of channel groups with separate weights.
        offset_groups: Number of channel groups with separate offsets.
        bias: Whether to add a bias, initially zero.
        modulated: Deformable convolution v2: every sample is weighted by a sigmoid mask, initially 1/2, so that the
            layer initially equals half a convolution.
        offset_scale: Factor of the predicted offsets. With optimizers whose steps do not depend on the gradient's size
            (Adam, Adafactor, LAMB), 0.1 has the effect of 0.1 times the learning rate, without a parameter group.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shapes:
        (B, C, H, W) -> (B, out_channels, Ho, Wo)

    Raises:
        ValueError: An argument or the input's shape is invalid.
        TypeError: The input is not floating-point or does not have the weight's dtype.
    """

    _dims, _components, _predictor = 2, 2, ZeroConv2d

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        offset, mask = self.predict(x)
        return deform_conv2d(x, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)


class DeformableConv1d(_DeformableConv):
    """A 1-D convolution with learned sampling locations: :class:`DeformableConv2d` for sequences.

    Arguments are those of :class:`DeformableConv2d`; offsets have one component per tap.

    Shapes:
        (B, C, L) -> (B, out_channels, L_out)

    Raises:
        ValueError: An argument or the input's shape is invalid.
        TypeError: The input is not floating-point or does not have the weight's dtype.
    """

    _dims, _components, _predictor = 1, 1, ZeroConv1d

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        offset, mask = self.predict(x)
        return deform_conv1d(x, offset, self.weight, self.bias, self.stride[0], self.padding[0], self.dilation[0], mask)


class CausalDeformableConv1d(_DeformableConv):
    """A deformable convolution along a sequence in which no position reads later inputs.

    The taps are -(kernel_size - 1) * dilation ... -dilation, 0, each with an offset that the same inputs predict.
    Sampling locations after the query are clamped to the query; those before the first input read 0. At integer
    locations the interpolation takes the gradient of moving back, as that of moving ahead would read a later input.

    The ``state_dict`` is that of :class:`DeformableConv1d`.

    Args:
        in_channels: Channels C of the input.
        out_channels: Channels of the output.
        kernel_size: Number of taps.
        dilation: Distance between neighboring taps.
        groups: See :class:`DeformableConv2d`, as for all further arguments.

    Shapes:
        (B, C, L) -> (B, out_channels, L)

    Raises:
        ValueError: An argument or the input's shape is invalid.
        TypeError: The input is not floating-point or does not have the weight's dtype.
    """

    _dims, _components, _predictor = 1, 1, ZeroConv1d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        dilation: int = 1,
        groups: int = 1,
        offset_groups: int = 1,
        bias: bool = True,
        modulated: bool = False,
        *,
        offset_scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, 1, 0, dilation, groups, offset_groups, bias, modulated,
            offset_scale=offset_scale, device=device, dtype=dtype,
        )  # fmt: skip
        self.reach = (self.kernel_size[0] - 1) * self.dilation[0]  # distance of the first tap

    def forward(self, x: Tensor, cache: SequenceCache | None = None) -> Tensor:
        """Convolve ``x``.

        Args:
            x: (B, C, L). With ``cache`` one or more next inputs.
            cache: For step-by-step processing: the same one in every step, updated in place; it keeps all inputs.

        Returns:
            (B, out_channels, L).
        """
        check_tensor("input", x)
        padded = F.pad(x, (self.reach, 0))
        self._check(padded)
        if cache is not None:
            return self._step(x, cache)
        offset, mask = self.predict(padded)
        # Reverse time, so that the operator's gradient at integer locations is that of moving back.
        offset = self._per_tap(-offset).flip((2, 3))
        taps = torch.arange(offset.shape[2], device=x.device, dtype=offset.dtype).unsqueeze(1)
        offset = offset.clamp(min=taps * -self.dilation[0]).flatten(1, 2)  # no location is after the query
        mask = None if mask is None else self._per_tap(mask).flip((2, 3)).flatten(1, 2)
        output = deform_conv1d(padded.flip(2), offset, self.weight.flip(2), self.bias, 1, 0, self.dilation[0], mask)
        return output.flip(2)

    def _step(self, x: Tensor, cache: SequenceCache) -> Tensor:
        """Convolve the inputs ``x`` that follow those of ``cache``, gathering only the sampled ones."""
        check_cache(cache, x.shape[0])
        cache.append(None, x.transpose(1, 2).unsqueeze(1), None)
        cache.steps += x.shape[2]
        assert cache.value is not None
        seen = cache.value.squeeze(1)  # (B, S, C)
        length, total = x.shape[2], seen.shape[1]
        recent = seen[:, max(0, total - self.reach - length) :].transpose(1, 2)
        offset, mask = self.predict(F.pad(recent, (self.reach + length - recent.shape[2], 0)))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        query = torch.arange(total - length, total, device=x.device, dtype=dtype)
        taps = torch.arange(-self.reach, 1, self.dilation[0], device=x.device).unsqueeze(1)
        place = (query + taps + self._per_tap(offset)).minimum(query)  # (B, groups, taps, L)
        upper = place.ceil()
        index = torch.stack((upper, upper - 1), 4)
        share = torch.stack((1 - upper + place, upper - place), 4).masked_fill(index < 0, 0)
        if mask is not None:
            share = share * self._per_tap(mask).unsqueeze(4)
        rows = unflatten(seen, 2, (self.offset_groups, -1)).transpose(1, 2)  # (B, groups, S, C / groups)
        index = index.clamp(min=0).long().flatten(2).unsqueeze(3).expand(-1, -1, -1, rows.shape[3])
        samples = unflatten(rows.gather(2, index), 2, share.shape[2:])
        samples = (samples * share.unsqueeze(5)).sum(4).to(x.dtype)  # (B, offset groups, taps, L, C / offset groups)
        # A product for each group, as a convolution would rearrange the weight in every step.
        samples = unflatten(samples.permute(0, 3, 1, 4, 2).flatten(2), 2, (self.groups, -1))
        weight = unflatten(self.weight.flatten(1), 0, (self.groups, -1))
        output = torch.einsum("blgi,goi->bgol", samples, weight).flatten(1, 2)
        return output if self.bias is None else output + self.bias.to(output.dtype).unsqueeze(1)

    def _per_tap(self, predicted: Tensor) -> Tensor:
        """Split (B, groups * taps, L) into (B, groups, taps, L)."""
        return unflatten(predicted, 1, (self.offset_groups, -1))
