"""Functions of the extension ``maskrcnn_benchmark._C``, whose project others build on, such as GLIP and scene graphs.

They run without autograd and autocast, and allocate their results, except for deformable convolution and pooling. Boxes
count their last pixel: the width is x2 - x1 + 1. Shapes: input (B, C, H, W); rois (R, 5) of (image, x1, y1, x2, y2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mmcv_ext import regions
from ..mmcv_ext.boxes import float32, suppress
from ..mmcv_ext.calls import check, check_floats, check_shape, widened
from ..mmcv_ext.losses import log
from ..ops.deformable_attention.without_autograd import cast, without_autograd
from .deform_conv import (
    deform_conv_backward_input,
    deform_conv_backward_parameters,
    deform_conv_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
    not_served,
)
from .psroi_pooling import deform_psroi_pooling_backward, deform_psroi_pooling_forward

__all__ = [
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "deform_conv_forward",
    "deform_psroi_pooling_backward",
    "deform_psroi_pooling_forward",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
    "nms",
    "roi_align_backward",
    "roi_align_forward",
    "roi_pool_backward",
    "roi_pool_forward",
    "sigmoid_focalloss_backward",
    "sigmoid_focalloss_forward",
]
__getattr__ = not_served("maskrcnn_benchmark._C", __all__)


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return the indices of the boxes (N, 4) that greedy suppression keeps, in ascending order.

    As compiled, an overlap that equals the threshold suppresses on CPUs and does not on GPUs.
    """
    threshold = float32(threshold)
    if boxes.device.type == "cpu":
        threshold = math.nextafter(threshold, -math.inf)
    with without_autograd(boxes):
        return suppress(boxes, scores, threshold, offset=1).sort().values


def roi_align_forward(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int
) -> Tensor:
    """Return the averages of the samples of all bins, (R, C, h, w) (He et al. 2017); regions are not shifted."""
    size = pooled_height, pooled_width
    output, none = input.new_empty(len(rois), input.shape[1], *size), input.new_empty(0)
    regions.roi_align_forward(
        input, rois, output, none, none, *size, spatial_scale, sampling_ratio, regions.AVERAGE, False
    )
    return output


def roi_align_backward(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
) -> Tensor:
    """Return the gradient of the input."""
    grad_input, none = grad.new_zeros(batch_size, channels, height, width), grad.new_empty(0)
    numbers = pooled_height, pooled_width, spatial_scale, sampling_ratio, regions.AVERAGE, False
    regions.roi_align_backward(grad, rois, none, none, grad_input, *numbers)
    return grad_input


def roi_pool_forward(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int
) -> tuple[Tensor, Tensor]:
    """Return the maximum of every bin, (R, C, h, w), and its place in the map (Girshick 2015): torchvision's."""
    with without_autograd(input):
        regions.check_rois(input, rois, pooled_height, pooled_width, spatial_scale)
        maps = widened(input)
        numbers = spatial_scale, pooled_height, pooled_width
        output, places = torch.ops.torchvision.roi_pool(maps, rois.to(maps.dtype), *numbers)
        return cast(output, input.dtype), places


def roi_pool_backward(
    grad: Tensor,
    input: Tensor,
    rois: Tensor,
    argmax: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
) -> Tensor:
    """Return the gradient of the input."""
    with without_autograd(grad):
        wide = widened(grad)
        numbers = spatial_scale, pooled_height, pooled_width, batch_size, channels, height, width
        grads = torch.ops.torchvision._roi_pool_backward(wide, rois.to(wide.dtype), argmax, *numbers)
        return cast(grads, grad.dtype)


def sigmoid_focalloss_forward(logits: Tensor, targets: Tensor, num_classes: int, gamma: float, alpha: float) -> Tensor:
    """Return the losses (N, C) of logits (N, C) (Lin et al. 2017).

    Classes are counted from 1: a target of 0 has no positive class, a negative one no loss.
    """
    return cast(_focal(logits, targets, num_classes, gamma, alpha)[0], logits.dtype)


def sigmoid_focalloss_backward(
    logits: Tensor, targets: Tensor, d_losses: Tensor, num_classes: int, gamma: float, alpha: float
) -> Tensor:
    """Return the gradient of the logits for that of the losses."""
    check_shape("d_losses", d_losses, *logits.shape)
    return cast(d_losses * _focal(logits, targets, num_classes, gamma, alpha)[1], logits.dtype)


def _focal(logits: Tensor, targets: Tensor, num_classes: int, gamma: float, alpha: float) -> list[Tensor]:
    """Return the losses and their derivatives, in float32 or wider."""
    check_shape("logits", logits, "N", num_classes)
    check_shape("targets", targets, len(logits))
    check_floats("logits", logits=logits)
    check(not targets.is_floating_point(), f"targets must hold integers, got {targets.dtype}")
    with without_autograd(logits):
        x = widened(logits)
        p, q = x.sigmoid(), (-x).sigmoid()
        log_p, log_q = log(p), F.logsigmoid(-x)
        positive = -alpha * q**gamma * log_p, -alpha * q**gamma * (q - gamma * p * log_p)
        negative = (alpha - 1) * p**gamma * log_q, (alpha - 1) * p**gamma * (gamma * q * log_q - p)
        target = targets[:, None]
        own = target == torch.arange(1, num_classes + 1, device=x.device)
        return [torch.where(target >= 0, torch.where(own, *pair), 0) for pair in zip(positive, negative)]
