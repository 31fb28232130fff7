"""Stand-in for ``mmcv._ext``, mmcv's compiled operators, on torchvision, this package's operators and PyTorch.

mmdet and mmsegmentation call some forty of the functions that mmcv compiles. Here they are Python functions with the
same names, arguments and results, for CPU and CUDA tensors, so that mmcv needs no compiler and runs under any torch.
Where mmcv is installed without its binary, :mod:`attn_plugins.autoload` offers this module as ``mmcv._ext``; a compiled
one always takes precedence. Every other name is a function that raises :class:`NotImplementedError`.

Conventions are mmcv's: most functions write into tensors that the caller allocated, gradients are added to what is
there, and all run without autograd inside mmcv's ``torch.autograd.Function``s. The order of boxes with equal scores and
thresholds rounded to float32 are mmcv's as well. Invalid arguments raise ValueError or TypeError before any work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..autoload import stand_in_for_mmcv_ext
from .boxes import bbox_overlaps, line_nms_forward, nms, nms_match, softnms
from .deformable import (
    deform_conv_backward_input,
    deform_conv_backward_parameters,
    deform_conv_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
    ms_deform_attn_backward,
    ms_deform_attn_forward,
)
from .losses import (
    sigmoid_focal_loss_backward,
    sigmoid_focal_loss_forward,
    softmax_focal_loss_backward,
    softmax_focal_loss_forward,
)
from .maps import (
    carafe_backward,
    carafe_forward,
    carafe_naive_backward,
    carafe_naive_forward,
    masked_col2im_forward,
    masked_im2col_forward,
    psamask_backward,
    psamask_forward,
)
from .regions import (
    deform_roi_pool_backward,
    deform_roi_pool_forward,
    roi_align_backward,
    roi_align_forward,
    roi_pool_backward,
    roi_pool_forward,
)
from .sync_bn import (
    sync_bn_backward_data,
    sync_bn_backward_param,
    sync_bn_forward_mean,
    sync_bn_forward_output,
    sync_bn_forward_var,
)

__all__ = [
    "bbox_overlaps",
    "carafe_backward",
    "carafe_forward",
    "carafe_naive_backward",
    "carafe_naive_forward",
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "deform_conv_forward",
    "deform_roi_pool_backward",
    "deform_roi_pool_forward",
    "get_compiler_version",
    "get_compiling_cuda_version",
    "line_nms_forward",
    "masked_col2im_forward",
    "masked_im2col_forward",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
    "ms_deform_attn_backward",
    "ms_deform_attn_forward",
    "nms",
    "nms_match",
    "psamask_backward",
    "psamask_forward",
    "roi_align_backward",
    "roi_align_forward",
    "roi_pool_backward",
    "roi_pool_forward",
    "sigmoid_focal_loss_backward",
    "sigmoid_focal_loss_forward",
    "softmax_focal_loss_backward",
    "softmax_focal_loss_forward",
    "softnms",
    "sync_bn_backward_data",
    "sync_bn_backward_param",
    "sync_bn_forward_mean",
    "sync_bn_forward_output",
    "sync_bn_forward_var",
]

NOT_COMPILED = "not compiled: attn_plugins stands in"


def get_compiler_version() -> str:
    """Return what ``mmcv.ops.get_compiler_version`` reports."""
    return NOT_COMPILED


def get_compiling_cuda_version() -> str:
    """Return what ``mmcv.ops.get_compiling_cuda_version`` reports."""
    return "not available"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"mmcv's operator {name} needs mmcv's compiled extension, which is not installed here; attn_plugins stands "
            "in only for the operators of mmdet and mmsegmentation. To compile mmcv against the installed torch: "
            "python -m attn_plugins install mm --compile"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing


# torch before 2.5 calls no entry point; importing attn_plugins.mmcv, as configs do, is then early enough.
stand_in_for_mmcv_ext()
