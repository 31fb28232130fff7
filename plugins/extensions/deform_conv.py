"""Functions of the extensions ``deform_conv_cuda`` and ``deform_conv_ext`` (Dai et al. 2017, Zhu et al. 2019).

mmdetection 1 and its many descendants call the former, mmdetection 2.0 to 2.3 and BasicSR the latter. Their functions
are mmcv's with arguments by position: they write into tensors that the caller allocated, and add gradients to what is
there. ``columns``, ``ones`` and ``im2col_step`` have no meaning here. detectron2 and maskrcnn-benchmark share them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..mmcv_ext import deformable
from ..mmcv_ext.calls import absent

V1 = ("kW", "kH", "dW", "dH", "padW", "padH", "dilationW", "dilationH", "group", "deformable_group")
V2 = ("kernel_h", "kernel_w", *deformable.V2, "group", "deformable_group")


def by_position(function: Callable[..., Any], numbers: Sequence[str]) -> Callable[..., Any]:
    """Return a function of mmcv with its tensors and then ``numbers`` by position."""
    parameters = inspect.signature(function).parameters.values()
    tensors = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [*tensors, *numbers]

    @functools.wraps(function)
    def call(*arguments: Any) -> None:
        if len(arguments) != len(names):
            raise TypeError(
                f"{function.__name__} must have {len(names)} arguments, {', '.join(names)}, got {len(arguments)}"
            )
        function(*arguments[: len(tensors)], **dict(zip(numbers, arguments[len(tensors) :])))

    return call


deform_conv_forward = by_position(deformable.deform_conv_forward, (*V1, "im2col_step"))
deform_conv_backward_input = by_position(deformable.deform_conv_backward_input, (*V1, "im2col_step"))
deform_conv_backward_parameters = by_position(deformable.deform_conv_backward_parameters, (*V1, "scale", "im2col_step"))
modulated_deform_conv_forward = by_position(deformable.modulated_deform_conv_forward, (*V2, "with_bias"))
modulated_deform_conv_backward = by_position(deformable.modulated_deform_conv_backward, (*V2, "with_bias"))

# as ``deform_conv_cuda`` calls them
deform_conv_forward_cuda = deform_conv_forward
deform_conv_backward_input_cuda = deform_conv_backward_input
deform_conv_backward_parameters_cuda = deform_conv_backward_parameters
modulated_deform_conv_cuda_forward = modulated_deform_conv_forward
modulated_deform_conv_cuda_backward = modulated_deform_conv_backward

__all__ = [
    "deform_conv_backward_input",
    "deform_conv_backward_input_cuda",
    "deform_conv_backward_parameters",
    "deform_conv_backward_parameters_cuda",
    "deform_conv_forward",
    "deform_conv_forward_cuda",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_cuda_backward",
    "modulated_deform_conv_cuda_forward",
    "modulated_deform_conv_forward",
]


def not_served(extension: str, served: Sequence[str]) -> Callable[[str], Callable[..., Any]]:
    """Return the ``__getattr__`` of a stand-in whose other functions raise NotImplementedError."""
    return absent(
        extension,
        f"{{name}} needs the compiled extension {extension}, which is not installed here; attn_plugins stands in only "
        f"for its {', '.join(served)}. Compile it as its project describes: it then takes precedence. "
        "`python -m attn_plugins` shows which extensions are compiled",
    )


__getattr__ = not_served("deform_conv_ext or deform_conv_cuda", __all__)
