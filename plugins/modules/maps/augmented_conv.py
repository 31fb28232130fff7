"""Attention-augmented convolution: convolution in parallel with 2-D relative self-attention (Bello et al. 2019).

Shapes: B batch, F channels, M heads, (H, W) the attention's map, d_k and d_v the total widths of all heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...terms.sine_position import sine_encoding
from ...terms.size_cache import cached
from ..common.attention import attend
from ..common.checks import check_map, one_of, pair, positive
from ..common.logits import MapLogits
from ..common.tracing import one_node
from .parts.memory_format import in_memory_format, is_channels_last, map_heads, to_channels_last
from .parts.relative_tables import RelativeTables

Position = Literal["relative", "none", "sine", "coordconv"]


class AAConv2d(RelativeTables):
    """Concatenation of ``out_channels - dv`` channels of a convolution and ``dv`` of multi-head self-attention.

    Source: Bello et al. (2019), Eq. 1 to 4 and Figure 8. The logit of pixel j for pixel i, in every head, is

        d^-1/2 * q_i·(k_j + r_W[j_x - i_x] + r_H[j_y - i_y])        d = dk / num_heads

    with learned tables r_W (2W - 1, d) and r_H (2H - 1, d) that the heads share. ``dv = out_channels`` gives a fully
    attentional layer, ``dv = 0`` a plain convolution. The attention runs at the output's resolution; with a stride
    its input is averaged over windows of 2 * stride - 1 pixels.

    Args:
        in_channels: F_in.
        out_channels: F_out, total of convolution and attention.
        kernel_size: Kernel size of the convolution, odd.
        dk: Total width of the queries and of the keys of all heads; a multiple of ``num_heads``.
        dv: Total width of the values, and number of attention channels; a multiple of ``num_heads``.
        num_heads: M.
        stride: Stride of the layer.
        padding: None, or the padding that preserves the size: H rows become ⌈H / stride⌉.
        position: ``'relative'`` (above), ``'none'``, ``'sine'`` (sines and cosines of both axes are added to the
            attention's input; ``in_channels`` must be a multiple of 4) or ``'coordconv'`` (x and y from -1 to 1 and
            their distance r from the centre are three more channels of the attention's input; Bello et al., 4.5).
        input_size: (H, W) of the layer's input, which determines the size of the relative tables.
        pool: Whether to average the attention's input once more, 3×3 with stride 2, and to upsample its output by
            bilinear interpolation. This needs a sixteenth of the logits.
        resize_tables: Whether to interpolate the tables if a map or a loaded state_dict has another size than
            ``input_size``; otherwise this is an error.
        dilation: Dilation of the convolution.
        groups: Groups of the convolution.
        bias: Whether the convolution has a bias; the attention's projections have none.

    Shapes:
        (B, in_channels, H, W) -> (B, out_channels, ⌈H / stride⌉, ⌈W / stride⌉)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        dk: int,
        dv: int,
        num_heads: int,
        stride: int = 1,
        padding: int | Sequence[int] | None = None,
        position: Position = "relative",
        input_size: int | Sequence[int] | None = None,
        pool: bool = False,
        *,
        resize_tables: bool = True,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(
            in_channels=in_channels, out_channels=out_channels, num_heads=num_heads, stride=stride, dilation=dilation,
            groups=groups,
        )  # fmt: skip
        one_of(Position, position=position)
        if not isinstance(dv, int) or dv < 0 or dv > out_channels or dv % num_heads:
            raise ValueError(
                f"dv must be a multiple of num_heads = {num_heads} from 0 to out_channels = {out_channels}, got {dv!r}"
            )
        if not isinstance(dk, int) or dk < 0 or (dv and (dk == 0 or dk % num_heads)):
            raise ValueError(f"dk must be a positive multiple of num_heads = {num_heads}, got {dk!r}")
        if dv and position == "sine" and in_channels % 4:
            raise ValueError(f"position 'sine' needs in_channels in multiples of 4, got {in_channels}")
        kernel, same = _same_padding(kernel_size, dilation, padding)
        self.in_channels, self.out_channels, self.kernel_size, self.stride = in_channels, out_channels, kernel, stride
        self.padding, self.dilation, self.groups = same, dilation, groups
        self.dk, self.dv, self.num_heads = dk if dv else 0, dv, num_heads
        self.pool = pool
        self.scale = (self.dk // num_heads) ** -0.5 if dv else 1.0
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.conv: nn.Conv2d | None = None
        if dv < out_channels:
            self.conv = nn.Conv2d(
                in_channels, out_channels - dv, kernel, stride, same, dilation, groups, bias=bias, **factory
            )
        self.qkv: nn.Conv2d | None = None
        self.proj: nn.Conv2d | None = None
        kind = position if dv else "none"
        self.make_tables(kind, input_size, self.dk // num_heads, resize_tables, **factory)
        self.position = position
        if not dv:
            return
        self.qkv = nn.Conv2d(in_channels + 3 * (position == "coordconv"), 2 * dk + dv, 1, bias=False, **factory)
        self.proj = nn.Conv2d(dv, dv, 1, bias=False, **factory)
        self.reset_parameters()

    @classmethod
    def from_ratios(
        cls,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        kappa: float,
        nu: float,
        num_heads: int = 8,
        min_key_dim_per_head: int = 20,
        min_value_dim_per_head: int = 0,
        **options: Any,
    ) -> AAConv2d:
        """Create the layer from the paper's ratios κ = d_k / F_out and υ = d_v / F_out (Bello et al. 2019, 3.2).

        Both widths are rounded down to multiples of ``num_heads``; d_k is at least ``min_key_dim_per_head`` *
        ``num_heads``, and d_v likewise unless υ = 0.

        Args:
            in_channels: F_in.
            out_channels: F_out.
            kernel_size: Kernel size of the convolution, odd.
            kappa: κ, at least 0.
            nu: υ, from 0 (a plain convolution) to 1 (fully attentional).
            num_heads: M.
            min_key_dim_per_head: 20 in the paper's ResNets and Wide-ResNet; 0 for no minimum.
            min_value_dim_per_head: 1 in the paper's MnasNets, else 0.
            options: Further arguments of the class.

        Raises:
            ValueError: For the reasons of the class; or a ratio is out of range, or too small for one channel per head.
        """
        return cls(
            in_channels,
            out_channels,
            kernel_size,
            *widths(out_channels, kappa, nu, num_heads, min_key_dim_per_head, min_value_dim_per_head),
            num_heads,
            **options,
        )

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the size of the map on which attention runs for an input of ``size`` (H, W)."""
        H, W = -(-size[0] // self.stride), -(-size[1] // self.stride)
        return (-(-H // 2), -(-W // 2)) if self.pool else (H, W)

    def reset_parameters(self) -> None:
        """Draw projections by Glorot uniform initialization, tables with deviation d^-1/2 (Bello et al., Figure 8).

        The convolution initializes itself, as ``nn.Conv2d`` does.
        """
        for projection in (self.qkv, self.proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
        self.reset_tables()

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, in_channels, H, W) -> (B, out_channels, ⌈H / stride⌉, ⌈W / stride⌉).

        Raises:
            ValueError: The shape does not match, or needs tables of another size while ``resize_tables`` is False.
        """
        if self.qkv is None:
            self._check(x)
            assert self.conv is not None
            return self.conv(x)
        attended, channels_last = self._attend(x), is_channels_last(x)
        attended = in_memory_format(attended, channels_last)
        if self.conv is None:
            return attended
        # Of two single channels, cat forgets that they are channels-last.
        return in_memory_format(torch.cat((self.conv(x), attended), 1), channels_last)

    def _attend(self, x: Tensor) -> Tensor:
        """Compute the attention channels, (B, dv, ⌈H / stride⌉, ⌈W / stride⌉), in any memory format."""
        attended = attend(self._logits(x)).permute(0, 1, 4, 2, 3).flatten(1, 2)
        if self.proj is not None:
            attended = self.proj(attended)
        if self.pool:
            size = [(n + self.stride - 1) // self.stride for n in x.shape[2:]]  # ONNX cuts off negative quotients
            return F.interpolate(attended, size, mode="bilinear", align_corners=False)
        return attended

    def _logits(self, x: Tensor) -> MapLogits:
        """Compute queries, keys and values, and the logits of rows and columns."""
        self._check(x)
        if not self.dv:
            raise ValueError("dv is 0: a plain convolution has no attention")
        if self.stride > 1:
            window = 2 * self.stride - 1
            x = F.avg_pool2d(x, window, self.stride, window // 2, count_include_pad=False)
        if self.pool:
            x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        if self.position == "sine":
            x = x + _sine_map(x.shape[1], x.shape[2], x.shape[3], x.device, x.dtype)
        elif self.position == "coordconv":
            places = _coordinates(x.shape[2], x.shape[3], x.device, x.dtype)
            x = torch.cat((x, places.expand(x.shape[0], -1, -1, -1)), 1)
        assert self.qkv is not None
        qkv = self.qkv(to_channels_last(x))
        query, key, value = (map_heads(part, self.num_heads) for part in qkv.split((self.dk, self.dk, self.dv), 1))
        tables = self.table_logits(query, self.scale, query.shape[2:4])
        return MapLogits(query, key, value, *tables, scale=self.scale)

    def _check(self, x: Tensor) -> None:
        if self.qkv is not None:
            check_map(x, self.in_channels, self.qkv)
        elif self.conv is not None:
            check_map(x, self.in_channels, self.conv)
        self.check_size(x)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, dk={self.dk}, dv={self.dv}"
        text += f", num_heads={self.num_heads}, stride={self.stride}, position={self.position!r}"
        if self.input_size is not None:
            text += f", input_size={self.input_size}"
        return text + (", pool=True" if self.pool else "")


def widths(
    out_channels: int,
    kappa: float,
    nu: float,
    num_heads: int = 8,
    min_key_dim_per_head: int = 20,
    min_value_dim_per_head: int = 0,
) -> tuple[int, int]:
    """Return d_k and d_v of an augmented convolution; see :meth:`AAConv2d.from_ratios`."""
    positive(num_heads=num_heads)
    if not kappa >= 0:
        raise ValueError(f"kappa must be at least 0, got {kappa!r}")
    if not 0 <= nu <= 1:
        raise ValueError(f"nu must be from 0 to 1, got {nu!r}")

    def multiple(ratio: float) -> int:
        # Round first: 0.29 * 100 is 28.999..., but means 29.
        return math.floor(round(ratio * out_channels, 6)) // num_heads * num_heads

    if nu == 0:
        return 0, 0
    dk = max(multiple(kappa), min_key_dim_per_head * num_heads)
    dv = max(multiple(nu), min_value_dim_per_head * num_heads)
    if dv == 0:
        raise ValueError(f"nu = {nu} of {out_channels} channels is less than one value channel of {num_heads} heads")
    if dk == 0:
        raise ValueError(
            f"kappa = {kappa} of {out_channels} channels is less than one key channel of {num_heads} heads"
        )
    return dk, dv


def _same_padding(
    kernel_size: int | Sequence[int], dilation: int, padding: int | Sequence[int] | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    kernel = pair("kernel_size", kernel_size)
    if any(k % 2 == 0 for k in kernel):
        raise ValueError(f"kernel_size must be odd, so that convolution and attention align, got {kernel_size!r}")
    same = (dilation * (kernel[0] - 1) // 2, dilation * (kernel[1] - 1) // 2)
    if padding is not None and pair("padding", padding, minimum=0) != same:
        raise ValueError(f"padding must be None or {same}, which keeps the size as attention does, got {padding!r}")
    return kernel, same


@cached
def _sine_map(C: int, H: int, W: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the encoding (1, C, H, W), of rows in the first half of the channels, of columns in the second."""
    rows = sine_encoding(torch.arange(H, device=device), C // 2).t().unsqueeze(2).expand(-1, -1, W)
    columns = sine_encoding(torch.arange(W, device=device), C // 2).t().unsqueeze(1).expand(-1, H, -1)
    return torch.cat((rows, columns)).unsqueeze(0).to(dtype)


@cached
def _coordinates(H: int, W: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return coordinates (3, H, W): x and y, both from -1 to 1, and r = (x² + y²)^1/2."""
    rows = _from_the_centre(H, device, dtype).view(H, 1).expand(H, W)
    columns = _from_the_centre(W, device, dtype).expand(H, W)
    return torch.stack((columns, rows, (columns.square() + rows.square()).sqrt()))


def _from_the_centre(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return (size,) coordinates from -1 to 1, or 0 for a single position."""
    if size == 1:
        return torch.zeros(1, device=device, dtype=dtype)
    return torch.linspace(-1, 1, size, device=device, dtype=dtype)
