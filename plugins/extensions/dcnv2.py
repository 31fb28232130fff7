"""Functions of DCNv2's extension ``_ext``, of CenterNet, FairMOT, YOLACT++ and others (Zhu et al. 2019).

They allocate their results and run without autograd and autocast, as compiled ones do. Shapes: input (B, C, H, W);
weight (C_out, C, Kh, Kw); bias (C_out,); offset (B, 2 * D * Kh * Kw, H', W') of (y, x); mask (B, D * Kh * Kw, H', W').
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mmcv_ext.deformable import V2 as PAIRS
from ..mmcv_ext.deformable import Geometry, add_gradients, convolve
from ..ops.deform_conv.operands import Terms
from ..ops.deformable_attention.without_autograd import cast, without_autograd
from .deform_conv import V2, not_served
from .psroi_pooling import Bins, pool, pool_gradients

__all__ = ["dcn_v2_backward", "dcn_v2_forward", "dcn_v2_psroi_pooling_backward", "dcn_v2_psroi_pooling_forward"]
__getattr__ = not_served("_ext of DCNv2", __all__)


def dcn_v2_forward(input: Tensor, weight: Tensor, bias: Tensor, offset: Tensor, mask: Tensor, *geometry: int) -> Tensor:
    """Return the modulated deformable convolution, (B, C_out, H', W'), in the input's dtype.

    ``geometry`` is kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w and deformable_group.
    """
    with without_autograd(input):
        return cast(convolve(Terms(input, offset, weight, bias, mask), _geometry(geometry)), input.dtype)


def dcn_v2_backward(
    input: Tensor, weight: Tensor, bias: Tensor, offset: Tensor, mask: Tensor, grad_output: Tensor, *geometry: int
) -> list[Tensor]:
    """Return the gradients of input, offset, mask, weight and bias."""
    with without_autograd(input):
        terms = Terms(input, offset, weight, bias, mask)
        grads = Terms(*(torch.zeros_like(term) for term in (input, offset, weight, bias, mask)))
        add_gradients(grads, grad_output, terms, _geometry(geometry))
        return [grads.input, grads.offset, grads.mask, grads.weight, grads.bias]  # type: ignore[list-item]


def _geometry(numbers: tuple[int, ...]) -> Geometry:
    names = [name for name in V2 if name != "group"]
    if len(numbers) != len(names):
        raise TypeError(f"geometry must be {len(names)} numbers, {', '.join(names)}, got {numbers}")
    return Geometry.of(PAIRS, {"group": 1, **dict(zip(names, numbers))})


def dcn_v2_psroi_pooling_forward(input: Tensor, bbox: Tensor, trans: Tensor, *bins: Any) -> tuple[Tensor, Tensor]:
    """Return :func:`attn_plugins.extensions.psroi_pooling.pool`, the average and the number of samples of every bin."""
    with without_autograd(input):
        return pool(input, bbox, trans, Bins.of(bins))


def dcn_v2_psroi_pooling_backward(
    out_grad: Tensor, input: Tensor, bbox: Tensor, trans: Tensor, top_count: Tensor, *bins: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and trans."""
    with without_autograd(input):
        return pool_gradients(out_grad, input, bbox, trans, Bins.of(bins))
