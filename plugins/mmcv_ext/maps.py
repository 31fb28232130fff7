"""Operators on whole maps: CARAFE's reassembly, convolution at chosen pixels, point-wise spatial attention's masks.

Backwards differentiate the forward's expression again, since mmcv calls them outside autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .calls import check, check_floats, check_shape, operator, widened, write


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of ``function(*inputs)`` for ``grad_output``, in the arithmetic of the inputs."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        output = function(*leaves)
        return torch.autograd.grad(output, leaves, grad_output.to(output.dtype))


# --- CARAFE -------------------------------------------------------------------------------------------------------


def _reassemble(features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int) -> Tensor:
    """Sum the neighbors of every pixel with predicted weights, ``scale_factor``² times (Wang et al. 2019, Eq. 3)."""
    B, C, H, W = features.shape
    half, s, G = kernel_size // 2, scale_factor, group_size
    padded = F.pad(widened(features), (half,) * 4).view(B, G, C // G, H + 2 * half, W + 2 * half)
    weights = widened(masks).view(B, G, kernel_size**2, 1, H, s, W, s)
    total = torch.zeros((), dtype=padded.dtype, device=padded.device)
    for tap in range(kernel_size**2):
        i, j = divmod(tap, kernel_size)
        neighbor = padded[..., i : i + H, j : j + W].unsqueeze(-1).unsqueeze(4)  # (B, G, C / G, H, 1, W, 1)
        total = total + neighbor * weights[:, :, tap]
    return total.reshape(B, C, H * s, W * s)


def _check_reassembly(features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int) -> None:
    check_shape("features", features, "B", "C", "H", "W")
    check_floats("features", features=features, masks=masks)
    check(kernel_size > 0 and kernel_size % 2 == 1, f"kernel_size must be odd, got {kernel_size}")
    check(group_size > 0 and features.shape[1] % group_size == 0, f"group_size {group_size} must divide the channels")
    B, _, H, W = features.shape
    check_shape("masks", masks, B, group_size * kernel_size**2, H * scale_factor, W * scale_factor)


@operator
def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> None:
    """Write the reassembled map (B, C, s * H, s * W) into ``output``.

    Args:
        features: (B, C, H, W).
        masks: (B, G * k², s * H, s * W): for every output pixel, the weights of the k × k neighbors.
        output: Tensor to write.
        kernel_size: k, odd.
        group_size: G, number of groups of consecutive channels that share weights.
        scale_factor: s.
    """
    _check_reassembly(features, masks, kernel_size, group_size, scale_factor)
    check_shape("output", output, *features.shape[:2], *masks.shape[2:])
    write(output, _reassemble(features, masks, kernel_size, group_size, scale_factor))


@operator
def carafe_naive_backward(
    top_grad: Tensor,
    features: Tensor,
    masks: Tensor,
    bottom_grad: Tensor,
    mask_grad: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """Add the gradients of features and masks."""
    _check_reassembly(features, masks, kernel_size, group_size, scale_factor)
    of_features, of_masks = gradients(
        lambda f, m: _reassemble(f, m, kernel_size, group_size, scale_factor), (features, masks), top_grad
    )
    bottom_grad += of_features
    mask_grad += of_masks


@operator
def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Tensor,
    routput: Tensor,
    rmasks: Tensor,
    output: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """Compute :func:`carafe_naive_forward`; the backward reads the copy of the features."""
    rfeatures.copy_(features.detach())
    carafe_naive_forward(features, masks, output, kernel_size, group_size, scale_factor)


@operator
def carafe_backward(
    top_grad: Tensor,
    rfeatures: Tensor,
    masks: Tensor,
    rtop_grad: Tensor,
    rbottom_grad_hs: Tensor,
    rbottom_grad: Tensor,
    rmask_grad: Tensor,
    bottom_grad: Tensor,
    mask_grad: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    """Compute :func:`carafe_naive_backward`."""
    carafe_naive_backward(top_grad, rfeatures, masks, bottom_grad, mask_grad, kernel_size, group_size, scale_factor)


# --- convolution at chosen pixels ---------------------------------------------------------------------------------


@operator
def masked_im2col_forward(
    im: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    col: Tensor,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> None:
    """Write the neighborhoods of P pixels of a map (1, C, H, W) into ``col`` (C * kernel_h * kernel_w, P)."""
    check_shape("im", im, 1, "C", "H", "W")
    check_shape("col", col, im.shape[1] * kernel_h * kernel_w, len(mask_h_idx))
    check_floats("im", im=im, col=col)
    padded = F.pad(im[0], (pad_w, pad_w, pad_h, pad_h))
    rows = mask_h_idx + torch.arange(kernel_h, device=im.device).view(-1, 1, 1)
    columns = mask_w_idx + torch.arange(kernel_w, device=im.device).view(-1, 1)
    col.copy_(padded[:, rows, columns].view_as(col))


@operator
def masked_col2im_forward(
    col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, im: Tensor, height: int, width: int, channels: int
) -> None:
    """Write ``col`` (C, P) to the P pixels of ``im`` (1, C, H, W)."""
    check_shape("im", im, 1, channels, height, width)
    im[0, :, mask_h_idx, mask_w_idx] = col.view(channels, -1).to(im)  # under autocast mmcv multiplies in half precision


# --- point-wise spatial attention ---------------------------------------------------------------------------------


def _connect(input: Tensor, psa_type: int, mask: tuple[int, int], half: tuple[int, int]) -> Tensor:
    """Return for each pair of pixels the mask value that connects them, or 0 (Zhao et al. 2018, Eqs. 8 and 9).

    Pixel (h, w) predicts a mask that is centred on itself. The result is (B, others, H, W) for 0 (collect), where the
    others are the pixels that (h, w) looks at, and its transpose for 1 (distribute).
    """
    H, W = input.shape[2:]
    steps = [
        torch.arange(size, device=input.device)[:, None] - torch.arange(size, device=input.device) + middle
        for size, middle in zip((H, W), half)
    ]
    y, x = steps[0][:, None, :, None], steps[1][None, :, None, :]  # (other rows, other columns, rows, columns)
    valid = ((y >= 0) & (y < mask[0]) & (x >= 0) & (x < mask[1])).view(H * W, H * W)
    channel = (y * mask[1] + x).view(H * W, H * W).where(valid, 0)
    connected = input.flatten(2).gather(1, channel.expand(len(input), -1, -1)) * valid
    connected = connected if psa_type == 0 else connected.transpose(1, 2)
    return connected.reshape(len(input), H * W, H, W)


def _check_masks(input: Tensor, psa_type: int, h_mask: int, w_mask: int) -> None:
    check(psa_type in (0, 1), f"psa_type must be 0 (collect) or 1 (distribute), got {psa_type}")
    check_shape("input", input, "B", h_mask * w_mask, "H", "W")


@operator
def psamask_forward(
    input: Tensor,
    output: Tensor,
    psa_type: int,
    num_: int,
    h_feature: int,
    w_feature: int,
    h_mask: int,
    w_mask: int,
    half_h_mask: int,
    half_w_mask: int,
) -> None:
    """Write the attention of masks (B, h_mask * w_mask, H, W) between all pixels into ``output`` (B, H * W, H, W)."""
    _check_masks(input, psa_type, h_mask, w_mask)
    B, _, H, W = input.shape
    check_shape("output", output, B, H * W, H, W)
    check_floats("input", input=input, output=output)
    write(output, _connect(input, psa_type, (h_mask, w_mask), (half_h_mask, half_w_mask)))


@operator
def psamask_backward(
    grad_output: Tensor,
    grad_input: Tensor,
    psa_type: int,
    num_: int,
    h_feature: int,
    w_feature: int,
    h_mask: int,
    w_mask: int,
    half_h_mask: int,
    half_w_mask: int,
) -> None:
    """Write the gradient of the masks."""
    _check_masks(grad_input, psa_type, h_mask, w_mask)
    connect = lambda input: _connect(input, psa_type, (h_mask, w_mask), (half_h_mask, half_w_mask))  # noqa: E731
    grad_input.copy_(gradients(connect, (grad_input,), grad_output)[0])
