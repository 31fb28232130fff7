"""Multi-scale deformable attention as the extensions of Deformable DETR and of Grounding DINO offer it.

Both functions run without autograd and autocast, as compiled ones do, inside a ``torch.autograd.Function`` of the
project. Shapes: value (B, S, M, d); spatial_shapes (L, 2) of (H, W); sampling_locations (B, Q, M, L, K, 2) of (x, y), 0
to 1 on the map; attention_weights (B, Q, M, L, K). ``level_start_index`` follows from the shapes, and ``im2col_step``
has no meaning here: both are ignored. Tensors need not be contiguous, may be in half precision and may differ in dtype.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.deformable_attention.without_autograd import attend, gradients, without_autograd

__all__ = ["ms_deform_attn_backward", "ms_deform_attn_forward"]


def ms_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    im2col_step: int,
) -> Tensor:
    """Return (B, Q, M * d): :func:`attn_plugins.ops.deformable_attention`, which raises its errors."""
    with without_autograd(value):
        return attend(value, spatial_shapes, sampling_loc, attn_weight)


def ms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
    im2col_step: int,
) -> list[Tensor]:
    """Return the gradients of value, locations and weights for that of the output, (B, Q, M * d)."""
    with without_autograd(value):
        return gradients(grad_output, value, spatial_shapes, sampling_loc, attn_weight)
