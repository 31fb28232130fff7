"""Operator calls of modules that TorchScript can compile.

TorchScript supports neither keyword-only arguments nor ``Sequence``, and does not compile checks, so scripted modules
call the registered operators directly. The checks of such modules (``checks``) are skipped as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import deform_conv2d, global_attention, window_attention
from ..ops.everywhere.global_attention import scripted_global_attention
from ..ops.window.window_attention import scripted_window_attention


def attend_everywhere(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    row_logits: Tensor | None,
    column_logits: Tensor | None,
    key_logits: Tensor | None,
    scale: float,
) -> Tensor:
    """Call :func:`attn_plugins.ops.global_attention`."""
    if torch.jit.is_scripting():
        return scripted_global_attention(query, key, value, row_logits, column_logits, key_logits, scale)
    else:
        return global_attention(
            query, key, value, row_logits=row_logits, column_logits=column_logits, key_logits=key_logits, scale=scale
        )


def attend_in_windows(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    position_logits: Tensor | None,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    zero_border: bool,
) -> Tensor:
    """Call :func:`attn_plugins.ops.window_attention` for maps."""
    if torch.jit.is_scripting():
        return scripted_window_attention(
            query, key, value, position_logits, kernel_size, stride, padding, dilation, zero_border, 1.0
        )
    else:
        return window_attention(
            query, key, value, position_logits, kernel_size, stride=stride, padding=padding, dilation=dilation,
            border="zero" if zero_border else "exclude",
        )  # fmt: skip


def convolve_deformably(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    offset_groups: int,
) -> Tensor:
    """Call :func:`attn_plugins.ops.deform_conv2d`."""
    if torch.jit.is_scripting():
        return torch.ops.attn_plugins.deform_conv2d(
            x, offset, weight, bias, mask, stride, padding, dilation, groups, offset_groups
        )
    else:
        return deform_conv2d(x, offset, weight, bias, stride, padding, dilation, mask)
