"""Multi-scale deformable attention with its projections (Zhu et al. 2021, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.arguments import broadcasts
from ...core.axes import unflatten
from ...ops import deformable_attention
from ...ops.deformable_attention.deformable_attention import policy_of_grid_sample, shapes_on_host
from ...terms.saliency import sampled_saliency
from ..common.checks import check_fits, check_heads, check_padding_mask, check_tensor, positive


class SampledAttention(nn.Module):
    """Mixin with the forward of multi-scale deformable attention and the parameters of ε3.

    ``SampledAttention.attend(layer, …)`` computes mmcv's layer as well, which has the same attributes but ε3's.
    """

    embed_dims: int
    num_heads: int
    num_levels: int
    num_points: int
    batch_first: bool
    sampling_offsets: Any
    attention_weights: Any
    value_proj: Any
    output_proj: Any
    dropout: Any
    key_saliency: nn.Linear | None
    gate: nn.Parameter | None

    def make_saliency(self, wanted: bool, **factory: Any) -> None:
        """Create ``key_saliency``, u·key of every head, and its gate, or set both to None."""
        width, heads = self.embed_dims, self.num_heads
        self.key_saliency = nn.Linear(width, heads, bias=False, **factory) if wanted else None
        self.gate = nn.Parameter(torch.empty(heads, **factory)) if wanted else None

    def reset_saliency(self) -> None:
        """Draw u·key by Glorot initialization and zero the gate."""
        if self.key_saliency is not None and self.gate is not None:
            nn.init.xavier_uniform_(self.key_saliency.weight)
            nn.init.zeros_(self.gate)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint without the parameters of ε3 strictly, leaving these parameters unchanged."""
        if self.key_saliency is not None and self.gate is not None:
            own = self.state_dict().items()
            added = {prefix + name: kept for name, kept in own if name.split(".")[0] in ("gate", "key_saliency")}
            if added.keys().isdisjoint(state_dict):
                state_dict.update(added)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def attend(
        self,
        query: Tensor,
        value: Tensor | None,
        identity: Tensor | None,
        query_pos: Tensor | None,
        key_padding_mask: Tensor | None,
        reference_points: Tensor | None,
        spatial_shapes: Tensor | Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Run :meth:`MultiScaleDeformableAttention.forward`."""
        value = query if value is None else value
        for name, tokens, child in (("query", query, self.sampling_offsets), ("value", value, self.value_proj)):
            check_tensor(name, tokens)
            width = getattr(child, "in_features", self.embed_dims)
            if tokens.dim() != 3 or tokens.shape[2] != width:
                axes = "B, ·" if self.batch_first else "·, B"
                raise ValueError(f"{name} must have shape ({axes}, {width}), got {tuple(tokens.shape)}")
            check_fits(name, tokens, child)
        check_tensor("reference_points", reference_points)
        assert reference_points is not None
        if spatial_shapes is None:
            raise TypeError("spatial_shapes must be a Tensor or a sequence of (H, W), got NoneType")
        identity = query if identity is None else identity
        if query_pos is not None:
            query = query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        shapes = shapes_on_host(spatial_shapes)
        B, Q, _ = query.shape
        M, L = self.num_heads, self.num_levels
        if len(shapes) != L:
            raise ValueError(f"spatial_shapes must have num_levels = {L} levels, got {len(shapes)}")
        if not any(broadcasts(reference_points, (B, Q, L, numbers), 3) for numbers in (2, 4)):
            raise ValueError(
                f"reference_points must have shape {(B, Q, L)} + (2,) for points or (4,) for boxes, "
                f"got {tuple(reference_points.shape)}"
            )
        values = self.value_proj(value)
        if key_padding_mask is not None:
            S = values.shape[1]
            if isinstance(key_padding_mask, Tensor) and broadcasts(torch.atleast_2d(key_padding_mask), (B, S), 2):
                key_padding_mask = key_padding_mask.expand(B, S)
            check_padding_mask(key_padding_mask, B, S, values.device)
            values = values.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
        locations, weights = SampledAttention.samples(
            self, query, value, key_padding_mask, reference_points, spatial_shapes
        )
        policy = policy_of_grid_sample(values)
        output = deformable_attention(unflatten(values, 2, (M, -1)), shapes, locations, weights, nan_policy=policy)
        output = self.output_proj(output)
        if not self.batch_first:
            output = output.transpose(0, 1)
        return self.dropout(output) + identity

    def samples(
        self,
        query: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        reference_points: Tensor,
        spatial_shapes: Tensor | Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """Compute the sampling locations and the weight of every point.

        Args:
            query: (B, Q, C), including its position.
            value: (B, S, C).
            key_padding_mask: (B, S), bool.
            reference_points: (B, Q, L, 2) or boxes (B, Q, L, 4).
            spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)).

        Returns:
            Locations (B, Q, M, L, K, 2) as (x, y), 0 to 1 on the map, and weights (B, Q, M, L, K).
        """
        B, Q, _ = query.shape
        M, L, K = self.num_heads, self.num_levels, self.num_points
        # Half precision cannot resolve half a pixel on a wide map.
        places = torch.float64 if query.dtype == torch.float64 else torch.float32
        offsets = self.sampling_offsets(query).to(places).view(B, Q, M, L, K, 2)
        points = reference_points.to(places)[:, :, None, :, None]
        if reference_points.shape[3] == 2:
            sizes = torch.as_tensor(spatial_shapes, device=query.device).flip(-1).to(places)  # (W, H)
            locations = points + offsets / sizes.view(L, 1, 2)
        else:
            locations = points[..., :2] + offsets / K * points[..., 2:] * 0.5
        logits = self.attention_weights(query).view(B, Q, M, L * K)
        key_saliency = getattr(self, "key_saliency", None)
        if key_saliency is not None:
            saliency = key_saliency(value) * self.gate
            if key_padding_mask is not None:
                saliency = saliency.masked_fill(key_padding_mask.unsqueeze(-1), 0.0)
            logits = logits + sampled_saliency(saliency, shapes_on_host(spatial_shapes), locations).flatten(3)
        return locations, logits.softmax(-1, dtype=places).view(B, Q, M, L, K)


class MultiScaleDeformableAttention(SampledAttention):
    """Attention from every query to a few points near its reference point, on feature maps of several sizes.

    ::

        weights = softmax(attention_weights(query) [+ gate * ε3])  # over levels and points, of every head
        locations = reference_point + sampling_offsets(query)    # offsets are in pixels of each map
        output = output_proj(sum of weights * value_proj(value) at locations) + identity

    ``key_saliency`` adds ε3 of Zhu et al. (2019), Eq. 2, to the logits: u·key at the sampled point, independent of the
    query, where u·key is a linear map of ``value`` for each head. Its ``gate`` (M) is initially 0, and a checkpoint
    without these parameters loads strictly.

    NaN and infinite offsets give NaN on CPUs and read 0 on CUDA, as in mmcv's layer.

    Arguments, defaults, initialization and ``state_dict`` keys are those of mmcv's class of the same name. The class in
    Deformable DETR's code has the same keys and is always ``batch_first``.

    Args:
        embed_dims: C.
        num_heads: M, which divides C.
        num_levels: L.
        num_points: K, the number of points per query and level.
        im2col_step: Ignored; accepted for compatibility with mmcv.
        dropout: Dropout probability of the output, before ``identity`` is added.
        batch_first: Whether the batch is the first axis of query, value and output instead of the second.
        value_proj_ratio: Width of the values, as a fraction of C.
        key_saliency: Whether to add ε3 to the logits.

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        value_proj_ratio: float = 1.0,
        key_saliency: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(embed_dims=embed_dims)
        check_heads(embed_dims, num_heads, dropout)
        positive(num_levels=num_levels, num_points=num_points, im2col_step=im2col_step)
        width = int(embed_dims * value_proj_ratio)
        if width < 1 or width % num_heads:
            raise ValueError(
                f"value_proj_ratio must give a width that num_heads = {num_heads} divides, got {value_proj_ratio!r} "
                f"of {embed_dims}"
            )
        options: dict[str, Any] = dict(device=device, dtype=dtype)
        self.embed_dims, self.num_heads = embed_dims, num_heads
        self.num_levels, self.num_points = num_levels, num_points
        self.im2col_step, self.batch_first = im2col_step, batch_first
        samples = num_heads * num_levels * num_points
        self.dropout = nn.Dropout(dropout)
        self.sampling_offsets = nn.Linear(embed_dims, 2 * samples, **options)
        self.attention_weights = nn.Linear(embed_dims, samples, **options)
        self.value_proj = nn.Linear(embed_dims, width, **options)
        self.output_proj = nn.Linear(width, embed_dims, **options)
        self.make_saliency(key_saliency, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the projections; head m samples in direction 2 pi m / M, with point k at k pixels' distance."""
        angles = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        directions = torch.stack((angles.cos(), angles.sin()), -1)
        directions = directions / directions.abs().amax(-1, keepdim=True)  # on the border of a square
        distances = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        offsets = directions.view(-1, 1, 1, 2) * distances.view(-1, 1)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(offsets.expand(-1, self.num_levels, -1, -1).flatten())
        for zeros in (self.sampling_offsets.weight, self.attention_weights.weight, self.attention_weights.bias):
            nn.init.zeros_(zeros)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)
        self.reset_saliency()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | Sequence[Sequence[int]] | None = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend from ``query`` to ``value``.

        Args:
            query: (Q, B, C), or (B, Q, C) with ``batch_first``, which also applies to the arguments below.
            key: Ignored: weights and locations depend on the query alone.
            value: (S, B, C), the maps of all levels row by row, one after another; None for ``query``.
            identity: (Q, B, C), added to the result; None for ``query``.
            query_pos: (Q, B, C), added to ``query`` before it predicts weights and offsets.
            key_padding_mask: (B, S), bool; True for padding, whose values are set to 0.
            reference_points: (B, Q, L, 2) as (x, y), 0 to 1 on the map; or boxes (B, Q, L, 4) as (x, y, w, h), whose
                half sizes, divided by K, are the unit of the offsets. B, Q and L may be 1, as may B and S of the mask.
            spatial_shapes: ((H_1, W_1), ..., (H_L, W_L)), or an integer Tensor (L, 2).
            level_start_index: Ignored: it follows from ``spatial_shapes``.
            **kwargs: Ignored; mmcv's transformer layers pass arguments of other attention modules.

        Returns:
            (Q, B, C), or (B, Q, C) with ``batch_first``.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: A required argument is None, or query or value does not have the module's dtype.
        """
        return self.attend(query, value, identity, query_pos, key_padding_mask, reference_points, spatial_shapes)

    def extra_repr(self) -> str:
        text = f"{self.embed_dims}, {self.num_heads}, num_levels={self.num_levels}, num_points={self.num_points}"
        return text + (", key_saliency=True" if self.key_saliency is not None else "")
