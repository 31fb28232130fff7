"""The non-local block with its four pairwise functions, without a matrix of all pairs (Wang et al. 2018).

Shapes: B batch, C channels, d width of the embeddings, (H, W) the map, N = H * W queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common.checks import check_map, one_of
from ..common.logits import MapLogits
from ..common.tracing import one_node
from .parts.memory_format import in_format_of, to_channels_last
from .parts.non_local_block import Mode, NonLocalBlock, check_block
from .parts.relative_tables import Position, RelativeTables
from .parts.zero_conv import ZeroConv2d


class NonLocal2d(NonLocalBlock, RelativeTables):
    """``x + conv_out(y)``, y_i = 1 / C(x) Σ_j f(x_i, x_j) g(x_j) over all positions j.

    Source: Wang et al. (2018), Eq. 1 to 6; numerics, defaults and checkpoints are those of mmcv's ``NonLocal2d``.
    ``conv_out`` starts at 0, so inserting the layer does not change a trained network's output.

    ====================== ==================================== ============ ==================== ===============
    mode                   f(x_i, x_j)                          C(x)         operations           memory
    ====================== ==================================== ============ ==================== ===============
    ``gaussian``           exp(x_i·x_j)                         Σ_j f        O(N K (C + d))       O(N (C + d))
    ``embedded_gaussian``  exp(θ(x_i)·φ(x_j) / √d)              Σ_j f        O(N K d)             O(N d)
    ``dot_product``        θ(x_i)·φ(x_j)                        K            O(N d²)              O(N d)
    ``concatenation``      ReLU(w·[θ(x_i), φ(x_j)])             K            O(N (d + log K))     O(N d)
    ====================== ==================================== ============ ==================== ===============

    without the projections. The Gaussian modes run on ``ops.global_attention``. A dot product needs no pairs, as
    (θ φᵀ) g = θ (φᵀ g). Concatenation needs none either: ReLU(a_i + b_j) is a_i + b_j for keys with b_j > -a_i and 0
    for the others, so every query's result follows from prefix sums over the keys, sorted by b.

    ``position='relative'`` adds q_i·(r_W[j_x - i_x] + r_H[j_y - i_y]) to the logits of a Gaussian mode, scaled like the
    content: "NL+RPE" of the thesis' Table 3.2, which follows Bello et al. (2019), Eq. 2 to 4.

    Args:
        in_channels: C.
        reduction: d = C / reduction, at least 1.
        mode: f, see above.
        use_scale: Whether ``embedded_gaussian`` has the factor 1 / √d; ``gaussian`` never has it.
        sub_sample: Whether to max-pool keys and values by 2 × 2, K = ⌊H / 2⌋ ⌊W / 2⌋, except along an axis of one
            pixel. The relative position of a pooled key is that of its first pixel.
        position: ``'none'`` or, for the Gaussian modes, ``'relative'``.
        input_size: (H, W) of the module's input, which determines the size of the relative tables.
        resize_tables: Whether to interpolate the tables if a map or a loaded state_dict has another size than
            ``input_size``; otherwise this is an error.
        norm_layer: Callable that creates a normalization of C channels after ``conv_out``, or None. With it,
            ``conv_out`` has no bias, and the normalization starts at 0 instead of ``conv_out``.

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    conv, zero_conv, sub_sampling = nn.Conv2d, ZeroConv2d, (2, 2)
    pool = staticmethod(F.max_pool2d)

    def __init__(
        self,
        in_channels: int,
        reduction: int = 2,
        mode: Mode = "embedded_gaussian",
        use_scale: bool = True,
        sub_sample: bool = False,
        position: Position = "none",
        input_size: int | Sequence[int] | None = None,
        *,
        resize_tables: bool = True,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_block(in_channels, reduction, mode)
        one_of(Position, position=position)
        if position == "relative" and "gaussian" not in mode:
            raise ValueError(f"position 'relative' needs mode 'gaussian' or 'embedded_gaussian', got mode {mode!r}")
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        compared = in_channels if mode == "gaussian" else max(in_channels // reduction, 1)
        super().__init__()
        self.make_tables(position, input_size, compared, resize_tables, **factory)
        self.reset_tables()  # a first draw, so that a seed gives the weights that it has always given
        self.make(in_channels, reduction, mode, use_scale, sub_sample, norm_layer, factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw embeddings with deviation 0.01, and zero ``conv_out`` or the normalization after it, as mmcv does."""
        super().reset_parameters()
        self.reset_tables()

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C, H, W) -> (B, C, H, W).

        Raises:
            ValueError: The shape does not match, or needs tables of another size while ``resize_tables`` is False.
        """
        attended = self.attended(self._embeddings(x)).squeeze(1).permute(0, 3, 1, 2)
        return x + in_format_of(x, self.out(attended))

    def _logits(self, x: Tensor) -> MapLogits:
        self.check_gaussian()
        return self._embeddings(x)

    def _embeddings(self, x: Tensor) -> MapLogits:
        """Compute queries (B, 1, H, W, ·), keys and values (B, 1, Hk, Wk, ·), and the logits of rows and columns."""
        check_map(x, self.in_channels, self.g)
        self.check_size(x)
        query, key, value = (t.permute(0, 2, 3, 1).unsqueeze(1) for t in self.projected(to_channels_last(x)))
        tables = self.table_logits(query, self.scale, key.shape[2:4], self.key_stride(query.shape[2:4]))
        return MapLogits(query, key, value, *tables, scale=self.scale)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, reduction={self.reduction}, mode={self.mode!r}, position={self.position!r}"
        text += "" if self.input_size is None else f", input_size={self.input_size}"
        text += "" if self.use_scale else ", use_scale=False"
        return text + (", sub_sample=True" if self.sub_sample else "")
