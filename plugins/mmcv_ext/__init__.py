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

from . import boxes, deformable, losses, maps, regions, sync_bn  # noqa: F401  their functions enter OPERATORS
from .calls import OPERATORS

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


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"mmcv's operator {name} needs mmcv's compiled extension, which is not installed here; attn_plugins stands "
            "in only for the operators of mmdet and mmsegmentation. docs/start/install.md says how to compile mmcv"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
