"""Non-local blocks for sequences and clips: ``NonLocal2d`` with one and with three axes (Wang et al. 2018).

Shapes: B batch, C channels, L positions of a sequence, (T, H, W) a clip's frames, rows and columns; N queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.axes import unflatten
from ..common.checks import check_fits, check_tensor
from ..common.logits import MapLogits
from ..common.tracing import one_node
from ..common.weights import map_weights
from .parts.non_local_block import Mode, NonLocalBlock, check_block
from .parts.zero_conv import ZeroConv1d, ZeroConv3d


class _NonLocalTokens(NonLocalBlock):
    """Base of blocks without position logits, whose positions are flattened to one row for the operator."""

    axes: ClassVar[str]

    def __init__(
        self,
        in_channels: int,
        reduction: int = 2,
        mode: Mode = "embedded_gaussian",
        use_scale: bool = True,
        sub_sample: bool = False,
        *,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_block(in_channels, reduction, mode)
        super().__init__()
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.make(in_channels, reduction, mode, use_scale, sub_sample, norm_layer, factory)
        self.reset_parameters()

    @one_node
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, C, *size) -> (B, C, *size).

        Raises:
            ValueError: The shape does not match.
            TypeError: ``x`` is not a Tensor, or does not have the module's dtype.
        """
        attended = self.attended(self._embeddings(x))
        attended = unflatten(attended.flatten(1, 3).transpose(1, 2), 2, x.shape[2:])
        return x + self.out(attended)

    @torch.no_grad()
    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute the attention weights of a Gaussian mode for inspection, in O(N K) memory without ``queries``.

        Args:
            x: As in :meth:`forward`.
            queries: (Q, axes) positions, (t, y, x) for a clip; None for all.

        Returns:
            (B, 1, *size, *key_size), queries before keys, or (B, 1, Q, *key_size) with ``queries``.

        Raises:
            ValueError: As in :meth:`forward`; a query lies outside ``x``; or the mode has no attention weights.
        """
        self.check_gaussian()
        logits, size = self._embeddings(x), x.shape[2:]
        chosen = None if queries is None else _in_a_row(queries, size, x.device)
        maps = map_weights(logits, (1, size.numel()), chosen)
        key_size = [n // stride for n, stride in zip(size, self.key_stride(size))]
        return maps.reshape(x.shape[0], 1, *(size if queries is None else (len(queries),)), *key_size)

    def _embeddings(self, x: Tensor) -> MapLogits:
        """Compute queries, keys and values, (B, 1, 1, ·, d)."""
        check_tensor("x", x)
        if x.dim() != 2 + len(self.sub_sampling) or x.shape[1] != self.in_channels or 0 in x.shape[2:]:
            raise ValueError(
                f"x must have shape (B, {self.in_channels}, {self.axes}) with at least one position, got "
                f"{tuple(x.shape)}"
            )
        check_fits("x", x, self.g)
        query, key, value = map(_tokens, self.projected(x))
        return MapLogits(query, key, value, scale=self.scale)


class NonLocal1d(_NonLocalTokens):
    """``x + conv_out(y)`` on sequences, y_i = 1 / C(x) Σ_j f(x_i, x_j) g(x_j) over all positions j.

    Source: Wang et al. (2018), Eq. 1 to 6; numerics, defaults and checkpoints are those of mmcv's ``NonLocal1d``. The
    pairwise functions f, their C(x) and their cost are those of :class:`NonLocal2d`. ``conv_out`` starts at 0, so
    inserting the layer does not change a trained network's output.

    Args:
        in_channels: C.
        reduction: d = C / reduction, at least 1.
        mode: ``'gaussian'``, ``'embedded_gaussian'``, ``'dot_product'`` or ``'concatenation'``.
        use_scale: Whether ``embedded_gaussian`` has the factor 1 / √d; ``gaussian`` never has it.
        sub_sample: Whether to max-pool keys and values by 2, K = ⌊L / 2⌋, unless L = 1.
        norm_layer: Callable that creates a normalization of C channels after ``conv_out``, or None. With it,
            ``conv_out`` has no bias, and the normalization starts at 0 instead of ``conv_out``.

    Shapes:
        (B, C, L) -> (B, C, L)

    Raises:
        ValueError: An argument is out of range.
    """

    conv, zero_conv, sub_sampling, axes = nn.Conv1d, ZeroConv1d, (2,), "L"
    pool = staticmethod(F.max_pool1d)


class NonLocal3d(_NonLocalTokens):
    """``x + conv_out(y)`` on clips, y_i = 1 / C(x) Σ_j f(x_i, x_j) g(x_j) over all positions j of all frames.

    Source: Wang et al. (2018), Eq. 1 to 6, in space-time; numerics, defaults and checkpoints are those of mmcv's
    ``NonLocal3d``. The pairwise functions f, their C(x) and their cost are those of :class:`NonLocal2d`, with
    N = T H W. ``conv_out`` starts at 0, so inserting the layer does not change a trained network's output.

    Args:
        in_channels: C.
        reduction: d = C / reduction, at least 1.
        mode: ``'gaussian'``, ``'embedded_gaussian'``, ``'dot_product'`` or ``'concatenation'``.
        use_scale: Whether ``embedded_gaussian`` has the factor 1 / √d; ``gaussian`` never has it.
        sub_sample: Whether to max-pool keys and values of each frame by 2 × 2, K = T ⌊H / 2⌋ ⌊W / 2⌋, except along an
            axis of one pixel.
        norm_layer: Callable that creates a normalization of C channels after ``conv_out``, or None. With it,
            ``conv_out`` has no bias, and the normalization starts at 0 instead of ``conv_out``.

    Shapes:
        (B, C, T, H, W) -> (B, C, T, H, W), in the memory format of the input

    Raises:
        ValueError: An argument is out of range.
    """

    conv, zero_conv, sub_sampling, axes = nn.Conv3d, ZeroConv3d, (1, 2, 2), "T, H, W"
    pool = staticmethod(F.max_pool3d)


def _tokens(x: Tensor) -> Tensor:
    """Flatten (B, d, *size) to (B, 1, 1, N, d), with a contiguous last axis."""
    return x.flatten(2).transpose(1, 2).contiguous().unsqueeze(1).unsqueeze(1)


def _in_a_row(queries: Tensor, size: Sequence[int], device: torch.device) -> Tensor:
    """Convert positions (Q, axes) on a map of ``size`` to (Q, 2) on a map with one row."""
    if queries.dim() != 2 or queries.shape[1] != len(size) or queries.is_floating_point():
        raise ValueError(
            f"queries must be whole numbers of shape (Q, {len(size)}), got {queries.dtype} {tuple(queries.shape)}"
        )
    limits = torch.tensor(size, device=device)
    queries = queries.to(device)
    if ((queries < 0) | (queries >= limits)).any():
        raise ValueError(f"queries must lie on a map of {tuple(size)}, got {queries.tolist()}")
    index = torch.zeros_like(queries[:, 0])
    for n, number in enumerate(size):
        index = index * number + queries[:, n]
    return torch.stack([torch.zeros_like(index), index], 1)
