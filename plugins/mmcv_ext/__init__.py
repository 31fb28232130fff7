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

from . import boxes, deformable, losses, maps, regions, sync_bn  # noqa: F401  their functions enter OPERATORS
from .calls import OPERATORS, absent

globals().update(OPERATORS)

__all__ = ["get_compiler_version", "get_compiling_cuda_version"]
__all__ += sorted(OPERATORS)

NOT_COMPILED = "not compiled: attn_plugins stands in"


def get_compiler_version() -> str:
    """Return what ``mmcv.ops.get_compiler_version`` reports."""
    return NOT_COMPILED


def get_compiling_cuda_version() -> str:
    """Return what ``mmcv.ops.get_compiling_cuda_version`` reports."""
    return "not available"


__getattr__ = absent(
    __name__,
    "mmcv's operator {name} needs mmcv's compiled extension, which is not installed here; attn_plugins stands in only "
    "for the operators of mmdet and mmsegmentation. With a C++ compiler, this compiles it: pip install --no-deps "
    "--force-reinstall --no-cache-dir --no-build-isolation --no-binary onedl-mmcv onedl-mmcv",
)
