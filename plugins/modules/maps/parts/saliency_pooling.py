"""Attention whose weights are the same for all queries: a weighted mean of pixels for each head, projected afterwards.

The logits u·(K x) equal (Kᵀu)·x, and as weights sum to 1, the mean of the values V x is V times the mean of x. Neither
keys nor values are computed: their projections take C / M times as many operations as the two products with pixels.

Shapes: B batch, C channels, M heads, d width per head, N pixels, F output channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ....core.arguments import under_autocast
from ....core.gradients import transformed
from .fused_projections import may_leave_out

# Weights of a mean over more pixels may be below float16's normal numbers, 2**-14.
_MOST_HALF_PIXELS = 2**14


def pooled_attention(x: Tensor, vector: Tensor, key: nn.Module, value: nn.Module, output: nn.Module) -> Tensor | None:
    """Attend from one query with the logits u·key, and project its output.

    Args:
        x: (B, C, H, W), the keys' pixels.
        vector: u, (M, d).
        key: 1×1 convolution, C to M * d channels.
        value: Likewise.
        output: 1×1 convolution, M * d to F channels.

    Returns:
        (B, F, 1, 1) in the dtype of the weights; None if the layers have to be called one by one.
    """
    if not may_leave_out(key, value, output):
        return None
    terms = x, vector, key.weight, value.weight, output.weight, output.bias
    if any(t is None or t.dtype != vector.dtype for t in terms[1:]):
        return None
    pooled = under_autocast(_pooled, terms, cast=(True, *[False] * 5))  # type: ignore[arg-type]
    return pooled[..., None, None]


def _pooled(x: Tensor, vector: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    pixels = x.flatten(2)
    if x.dtype == torch.float16 and (x.is_cpu or pixels.shape[2] > _MOST_HALF_PIXELS):
        pixels = pixels.float()
    M, d = vector.shape
    terms = pixels, vector, key.view(M, d, -1), value.view(M, d, -1), weight.flatten(1), bias
    if transformed() or forward_ad._current_level >= 0:
        return _steps(*terms)[0]
    return _Pooled.apply(*terms)


def _steps(pixels: Tensor, vector: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Compute the output, (B, F), and what its backward needs.

    What has no pixels has the dtype of the weights, also under autocast: casts would take longer than these products.

    Args:
        pixels: (B, C, N).
        vector: (M, d).
        key: (M, d, C).
        value: (M, d, C).
        weight: (F, M * d).
        bias: (F,).
    """
    by_pixel = torch.bmm(vector.unsqueeze(1), key).transpose(0, 1).to(pixels.dtype)  # (1, M, C)
    weights = torch.bmm(by_pixel.expand(pixels.shape[0], -1, -1), pixels).softmax(2)
    means = torch.bmm(weights, pixels.mT).transpose(0, 1).to(value.dtype)  # (M, B, C)
    mixed = torch.bmm(value, means.mT).flatten(0, 1)  # (M * d, B)
    return [torch.addmm(bias, mixed.t(), weight.t()), by_pixel, weights, means, mixed]


class _Pooled(torch.autograd.Function):
    """:func:`_steps` as one node, whose gradient of the pixels is a sum within a product."""

    @staticmethod
    def forward(ctx: Any, *terms: Tensor) -> Tensor:
        output, *kept = _steps(*terms)
        ctx.save_for_backward(*terms, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pixels, vector, key, value, weight, bias, by_pixel, weights, means, mixed = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiated((pixels, vector, key, value, weight, bias), grad)
        B = len(pixels)
        grad_mixed = torch.mm(weight.t(), grad.t()).view(*vector.shape, B)
        grad_means = torch.bmm(grad_mixed.mT, value).transpose(0, 1).to(pixels.dtype)  # (B, M, C)
        grad_weights = torch.bmm(grad_means, pixels)
        grad_logits = torch._softmax_backward_data(grad_weights, weights, 2, weights.dtype)
        grad_by_pixel = torch.bmm(grad_logits, pixels.mT).sum(0, dtype=key.dtype).unsqueeze(1)  # (M, 1, C)
        grad_pixels: Tensor | None = None
        if ctx.needs_input_grad[0] and pixels.stride(1) == 1:  # channels-last
            grad_pixels = torch.bmm(grad_logits.mT, by_pixel.expand(B, -1, -1))
            grad_pixels = grad_pixels.baddbmm_(weights.mT, grad_means).mT
        elif ctx.needs_input_grad[0]:
            grad_pixels = torch.bmm(by_pixel.mT.expand(B, -1, -1), grad_logits).baddbmm_(grad_means.mT, weights)
        return (
            grad_pixels,
            torch.bmm(key, grad_by_pixel.mT).squeeze(2),
            vector.unsqueeze(2) * grad_by_pixel,
            torch.bmm(grad_mixed, means),
            torch.mm(grad.t(), mixed.t()),
            grad.sum(0),
        )


def _differentiated(terms: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients by PyTorch, for second derivatives."""
    # Views have no history of each other, as pixels have of weights that two layers share.
    leaves = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in terms]
    output, *_ = _steps(*leaves)
    return torch.autograd.grad(output, leaves, grad, create_graph=True)
