"""Functions of the extension ``detectron2._C``: deformable convolution, and what detectron2's report of versions asks.

Where detectron2 has a way without its extension, it still takes it: torchvision's operators, and the evaluation of
pycocotools. Rotated boxes and their RoIAlign, which it calls as ``torch.ops.detectron2``, raise an error.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from ..import_hooks import after_import
from ..mmcv_ext import get_compiler_version
from .deform_conv import (
    deform_conv_backward_input,
    deform_conv_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
    not_served,
)
from .deform_conv import deform_conv_backward_parameters as deform_conv_backward_filter

__all__ = [
    "deform_conv_backward_filter",
    "deform_conv_backward_input",
    "deform_conv_forward",
    "get_compiler_version",
    "get_cuda_version",
    "has_cuda",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
]
__getattr__ = not_served("detectron2._C", __all__)

ROTATED = {
    "nms_rotated": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "box_iou_rotated": "(Tensor boxes1, Tensor boxes2) -> Tensor",
    "roi_align_rotated_forward": "(Tensor input, Tensor rois, float scale, int height, int width, int ratio) -> Tensor",
    "roi_align_rotated_backward": "(Tensor grad, Tensor rois, float scale, int height, int width, int B, int C, int H, "
    "int W, int ratio) -> Tensor",
}
_library = torch.library.Library("detectron2", "FRAGMENT")  # its operators live as long as it does


def get_cuda_version() -> str:
    """Return what the report shows as the compiler of CUDA code."""
    return "not available"


def has_cuda() -> bool:
    """Return False: no file of compiled CUDA code exists, whose architectures the report would show."""
    return False


def when_offered() -> None:
    """Let operators that are not served say so, and detectron2 evaluate without its extension."""
    for name, schema in ROTATED.items():
        if not hasattr(torch.ops.detectron2, name):
            _library.define(name + schema)
            _library.impl(name, __getattr__(name), "CompositeImplicitAutograd")
    after_import("detectron2.evaluation.fast_eval_api", _refuse)


def _refuse(fast_evaluation: ModuleType) -> None:
    """Let the import of detectron2's evaluation in C++ fail, every time: detectron2 then takes that of pycocotools."""
    del sys.modules[fast_evaluation.__name__]
    after_import(fast_evaluation.__name__, _refuse)
    raise ImportError(
        f"{fast_evaluation.__name__} needs detectron2's compiled extension, which is not installed here; take "
        "COCOEvaluator(…, use_fast_impl=False), which is pycocotools' evaluation"
    )
