"""Deformable attention as TensorRT's own plug-in, in ONNX exports with ``dynamo=True`` that ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .operands import Options, Terms

PLUGIN = "trt::MultiscaleDeformableAttnPlugin_TRT"
_ASKED: ContextVar[bool] = ContextVar("tensorrt_plugin", default=False)


@contextlib.contextmanager
def tensorrt_plugin() -> Iterator[None]:
    """Let ``torch.onnx.export(..., dynamo=True)`` write TensorRT's plug-in for deformable attention.

    Inputs are value (B, S, M, d), int32 spatial_shapes (L, 2) and level_start_index (L,), sampling_locations
    (B, Q, M, L, K, 2) and attention_weights (B, Q, M, L, K), in this order; the output is (B, Q, M, d). Calls with
    levels of different numbers of points are exported as their definition. The file does not run in ONNX Runtime.

    Raises:
        RuntimeError: PyTorch is older than 2.8, whose exporter writes no such node.
    """
    if not hasattr(torch.onnx, "ops"):
        raise RuntimeError(f"TensorRT's plug-in needs the exporter of PyTorch >= 2.8, got {torch.__version__}")
    token = _ASKED.set(True)
    try:
        yield
    finally:
        _ASKED.reset(token)


def node(terms: Terms, options: Options) -> Tensor | None:
    """Return the output of the plug-in's node in the export that is running, or None where none is asked for."""
    if not _ASKED.get() or len(set(options.points)) != 1 or not torch.compiler.is_exporting():
        return None
    value, locations, weights = terms
    (B, _, M, d), Q, L, K = value.shape, weights.shape[1], len(options.points), options.points[0]
    levels = options.levels()
    starts = list(accumulate((h * w for h, w, _ in levels[:-1]), initial=0))
    integers = (
        torch.tensor(numbers, dtype=torch.int32, device=value.device)
        for numbers in ([[h, w] for h, w, _ in levels], starts)
    )
    operands = value, *integers, locations.view(B, Q, M, L, K, 2), weights.view(B, Q, M, L, K)
    attributes: dict[str, Any] = dict(plugin_version="1", plugin_namespace="")
    output = torch.onnx.ops.symbolic(PLUGIN, operands, attributes, dtype=value.dtype, shape=(B, Q, M, d), version=1)
    return output.flatten(2)
