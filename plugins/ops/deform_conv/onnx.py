"""Deformable convolution as ONNX's own ``DeformConv``, which opsets have since 19.

It has the order of offsets, the groups and the zeros outside the map of :func:`attn_plugins.ops.deform_conv2d`. Half
precision is computed in float32 here as well, so that positions are not rounded. A NaN offset may read 0, as in ONNX
Runtime, instead of NaN. For older opsets, and from PyTorch 2.7 and older with ``dynamo=True``, exports contain the
definition instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.onnx_export import target_opset, untraced
from .operands import Options, Terms

OPSET = 19


def node(terms: Terms, options: Options) -> Tensor | None:
    """Return the output of a ``DeformConv`` node in the export that is running, or None where it cannot have one."""
    if target_opset() < OPSET:
        return None
    stride, padding, dilation, groups, offset_groups = options
    operands = Terms(*at_least_float32(*terms))
    if torch.jit.is_tracing():
        _register()
        with untraced():  # a recorded number would be no constant
            options = options._replace(groups=int(groups), offset_groups=int(offset_groups))
        output = torch.ops.attn_plugins.deform_conv2d(*operands, *options)
    elif hasattr(torch.onnx, "ops") and torch.compiler.is_exporting():
        input, offset, weight, bias, mask = operands
        output = torch.onnx.ops.symbolic(
            "::DeformConv",
            (input, weight, offset, bias, mask),
            _attributes(stride, padding, dilation, groups, offset_groups),
            dtype=input.dtype,
            shape=(input.shape[0], weight.shape[0], *offset.shape[2:]),
            version=OPSET,
        )
    else:
        return None
    dtype = terms.input.dtype
    return output if output.dtype == dtype else output.to(dtype)  # else the older exporter records a cast as well


def _attributes(stride: Any, padding: Any, dilation: Any, groups: int, offset_groups: int) -> dict[str, Any]:
    return dict(
        strides=[*stride], pads=[*padding, *padding], dilations=[*dilation], group=groups, offset_group=offset_groups
    )


@cache
def _register() -> None:
    """Register the translation of our operator in the exporter that traces (``dynamo=False``)."""
    from torch.onnx import symbolic_helper

    @symbolic_helper.parse_args("v", "v", "v", "v", "v", "is", "is", "is", "i", "i")
    def symbolic(
        g: Any, input: Any, offset: Any, weight: Any, bias: Any, mask: Any, stride: Any, padding: Any, dilation: Any,
        groups: int, offset_groups: int,
    ) -> Any:  # fmt: skip
        operands = [input, weight, offset, bias, mask]
        while symbolic_helper._is_none(operands[-1]):
            operands.pop()
        attributes = _attributes(stride, padding, dilation, groups, offset_groups)
        return g.op("DeformConv", *operands, **{f"{name}_i": value for name, value in attributes.items()})

    torch.onnx.register_custom_op_symbolic("attn_plugins::deform_conv2d", symbolic, OPSET)
