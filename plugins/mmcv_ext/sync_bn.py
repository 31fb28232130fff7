"""The local steps of mmcv's synchronized batch normalization (``MMSyncBN``); mmcv reduces between them.

``input`` is (B, C, P); statistics are float32 of (C,).
"""

from __future__ import annotations

from torch import Tensor

from .calls import check_floats, check_shape, operator, write


@operator
def sync_bn_forward_mean(input: Tensor, mean: Tensor) -> None:
    """Write the mean of every channel."""
    check_shape("input", input, "B", "C", "P")
    check_floats("input", input=input, mean=mean)
    mean.copy_(input.float().mean((0, 2)))


@operator
def sync_bn_forward_var(input: Tensor, mean: Tensor, var: Tensor) -> None:
    """Write the biased variance around ``mean``."""
    check_shape("mean", mean, input.shape[1])
    check_floats("input", input=input, mean=mean, var=var)
    var.copy_((input.float() - mean[:, None]).square().mean((0, 2)))


@operator
def sync_bn_forward_output(
    input: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    norm: Tensor,
    std: Tensor,
    output: Tensor,
    eps: float,
    momentum: float,
    group_size: int,
) -> None:
    """Write the normalized input, its standard deviation and the output; update the running statistics."""
    check_floats("input", input=input, mean=mean, var=var, output=output)
    std.copy_((var + eps).sqrt())
    norm.copy_((input.float() - mean[:, None]) / std[:, None])
    write(output, norm * weight[:, None] + bias[:, None] if weight.numel() else norm)
    if running_mean.numel():
        count = input.shape[0] * input.shape[2] * group_size
        unbiased = var * (count / (count - 1)) if count > 1 else var
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(unbiased, momentum)


@operator
def sync_bn_backward_param(grad_output: Tensor, norm: Tensor, grad_weight: Tensor, grad_bias: Tensor) -> None:
    """Write the gradients of weight and bias."""
    check_floats("grad_output", grad_output=grad_output, norm=norm)
    grad_weight.copy_((grad_output.float() * norm).sum((0, 2)))
    grad_bias.copy_(grad_output.float().sum((0, 2)))


@operator
def sync_bn_backward_data(
    grad_output: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    norm: Tensor,
    std: Tensor,
    grad_input: Tensor,
) -> None:
    """Write the gradient of the input."""
    check_floats("grad_output", grad_output=grad_output, norm=norm)
    count = norm.shape[0] * norm.shape[2]
    centred = grad_output.float() - (norm * grad_weight[:, None] + grad_bias[:, None]) / count
    grad_input.copy_(weight[:, None] * centred / std[:, None])
