"""Focal losses (Lin et al. 2017).

Shapes: ``input`` (N, C), ``target`` (N,) integers, ``weight`` (C,) by class or empty. mmcv's Python code falls back to
its own definition on CPUs, so these serve CUDA tensors above all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .calls import check, check_floats, check_shape, operator, widened, write

_SMALLEST = torch.finfo(torch.float32).tiny  # FLT_MIN, which bounds mmcv's arguments of logarithms


def _check(input: Tensor, target: Tensor, weight: Tensor, output: Tensor) -> None:
    check_shape("input", input, "N", "C")
    check_shape("target", target, len(input))
    check(
        not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool),
        f"target must hold integers, got {target.dtype}",
    )
    check(target.device == input.device, f"target must be on input's device {input.device}, got {target.device}")
    check_shape("output or gradient", output, *input.shape[: output.dim()])
    if weight.numel():
        check_shape("weight", weight, input.shape[1])
    check_floats("input", input=input, weight=weight, output=output)


def log(p: Tensor) -> Tensor:
    return p.clamp(min=_SMALLEST).log()


def _is_target(input: Tensor, target: Tensor) -> Tensor:
    return torch.arange(input.shape[1], device=input.device) == target[:, None]


def _weighted(loss: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Multiply by the weights of the target classes; a target of C, the background, has that of the last class."""
    if not weight.numel():
        return loss
    factor = widened(weight)[target.clamp(0, len(weight) - 1)]
    return loss * factor.view(-1, *[1] * (loss.dim() - 1))


@operator
def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the losses of all classes into ``output`` (N, C); a target of C has no positive class."""
    _check(input, target, weight, output)
    p = widened(input).sigmoid()
    positive = -alpha * (1 - p) ** gamma * log(p)
    negative = (alpha - 1) * p**gamma * log(1 - p)
    write(output, _weighted(torch.where(_is_target(p, target), positive, negative), target, weight))


@operator
def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Write the derivatives of the losses into ``grad_input`` (N, C)."""
    _check(input, target, weight, grad_input)
    p = widened(input).sigmoid()
    q = 1 - p
    positive = -alpha * q**gamma * (q - gamma * p * log(p))
    negative = (alpha - 1) * p**gamma * (gamma * q * log(q) - p)
    grad_input.copy_(_weighted(torch.where(_is_target(p, target), positive, negative), target, weight))


def _target_probability(input: Tensor, target: Tensor) -> Tensor:
    return widened(input).gather(1, target.clamp(min=0)[:, None])[:, 0]


@operator
def softmax_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Write the losses into ``output`` (N,), from probabilities ``input``; a negative target has no loss."""
    _check(input, target, weight, output)
    p = _target_probability(input, target)
    loss = -alpha * (1 - p) ** gamma * log(p)
    write(output, _weighted(torch.where(target >= 0, loss, 0), target, weight))


@operator
def softmax_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Write the derivatives by the logits behind the probabilities ``input`` into ``grad_input`` (N, C)."""
    _check(input, target, weight, grad_input)
    p = _target_probability(input, target)
    slope = alpha * (gamma * (1 - p) ** (gamma - 1) * p * log(p) - (1 - p) ** gamma)
    slope = _weighted(torch.where(target >= 0, slope, 0), target, weight)
    buff.copy_(slope)
    grad_input.copy_(slope[:, None] * (_is_target(input, target).to(slope.dtype) - widened(input)))
