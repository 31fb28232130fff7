"""Counting of operations: by torch's flop counter on shapes alone, then by the convention of a paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

_BATCH_NORM, _RELU = "aten._native_batch_norm_legit_no_training", "aten.relu"
# Operators that the counter ignores and a convention may charge: counted as 0, to record their shapes.
_NOTED = (torch.ops.aten._native_batch_norm_legit_no_training, torch.ops.aten.relu)


@dataclass(frozen=True)
class Call:
    """Call of one operator."""

    operator: str  # such as 'aten.bmm'
    module: str  # the innermost one that called it
    shapes: tuple[Any, ...]  # the arguments, with tensors replaced by their shapes
    operations: int  # by the operator's formula, two per multiply-add

    @property
    def products(self) -> int:
        """Number of multiply-adds."""
        return self.operations // 2


def calls(module: nn.Module, *shape: int) -> list[Call]:
    """Record the counted calls of a forward pass in inference of a module on the meta device."""
    recorded: list[Call] = []
    tracker = ModuleTracker()

    def noting(operator: Any, formula: Callable[..., int]) -> Callable[..., int]:
        def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
            operations = formula(*args, out_val=out_val, **kwargs)
            shapes = tree_map(lambda a: tuple(a.shape) if isinstance(a, Tensor) else a, args)
            recorded.append(Call(str(operator), max(tracker.parents - {"Global"}, key=len), shapes, operations))
            return operations

        count._get_raw = True  # type: ignore[attr-defined]  # marks formulas that take tensors
        return count

    formulas = {**dict.fromkeys(_NOTED, lambda *args, **kwargs: 0), **flop_registry}
    counter = FlopCounterMode(display=False, custom_mapping={k: noting(k, f) for k, f in formulas.items()})
    with tracker, counter, torch.no_grad():
        module.eval()(torch.empty(shape, device="meta"))
    if counter.get_total_flops() != sum(call.operations for call in recorded):
        raise RuntimeError("the calls' operations do not add up to the counter's total")
    return recorded


def parameters(module: nn.Module) -> int:
    """Count the parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def executed(recorded: Sequence[Call]) -> int:
    """Count all executed multiply-adds."""
    return sum(call.products for call in recorded)


_ATTENTION = ("attn_plugins.global_attention", "attn_plugins.window_attention")


def _unknown(call: Call, paper: str) -> RuntimeError:
    return RuntimeError(f"{paper} says nothing of {call.operator}, called by {call.module}")


def bello_2019(recorded: Sequence[Call]) -> int:
    """Count as Bello et al. (2019): 2 per multiply-add in convolutions and linear layers, 1 in QKᵀ and AV."""
    total = 0
    for call in recorded:
        if call.operator in _ATTENTION:
            total += call.products
        elif call.operator in ("aten.convolution", "aten.addmm"):
            total += call.operations
        elif call.operator not in ("aten.bmm", "aten.baddbmm", _BATCH_NORM, _RELU):  # products with relative positions
            raise _unknown(call, "Bello et al. (2019)")
    return total


def zhu_2019(recorded: Sequence[Call], positions: int, head_width: int) -> int:
    """Count a module of stride 1 as Zhu et al. (2019): 1 per multiply-add, nothing for softmax and biases.

    Sampling and predicted offsets are free, too. The paper's figures also follow from these rules:

    * all projections run at every position, even where we run one for all queries;
    * a query's products with offsets (q·R) are free if its products with keys (q·k) are charged;
    * all weighted sums run over all keys at once, even where we sum over columns and then over rows.

    An inner product of length ``head_width`` is a logit, any other a sum over keys.
    """
    has_content = any(call.operator in _ATTENTION and call.shapes[0] is not None for call in recorded)
    total, sums, keys = 0, 0, 1
    for call in recorded:
        if call.operator in ("aten.convolution", "attn_plugins.deform_conv2d"):
            if not call.module.endswith("conv_offset"):
                total += call.products // math.prod(call.shapes[0][2:]) * positions
        elif call.operator == "aten.mm" or call.operator in _ATTENTION:  # mm: the encodings' projection
            total += call.products
        elif call.operator == "aten.bmm":
            (heads, rows, inner), (_, _, columns) = call.shapes[:2]
            if inner == head_width:
                total += 0 if has_content else call.products
            else:
                sums, keys = heads * rows * columns, keys * inner
        elif call.operator != _RELU:
            raise _unknown(call, "Zhu et al. (2019)")
    return total + sums * keys


def zhu_2019_sequence(recorded: Sequence[Call], tokens: int) -> int:
    """Count a module on N ``tokens`` as Zhu et al. (2019), by the rules of :func:`zhu_2019` with these additions.

    * a query's products with offsets are charged once per key, N or those in range, not per offset, 2N - 1;
    * keys out of range are free, even where we mask them.

    The decoder is charged like the encoder, as if it attended in both directions: count modules that are not causal.
    """
    attention = (*_ATTENTION, "attn_plugins.sequence_attention")
    has_content = any(call.operator in attention and call.shapes[0] is not None for call in recorded)
    total = 0
    for call in recorded:
        if call.operator in ("aten.mm", "aten.addmm"):  # of one row, where we project for all queries at once
            rows = call.shapes[-2][0]
            total += call.products * (tokens if rows == 1 else 1)
        elif call.operator == "attn_plugins.sequence_attention":
            keys, band, outside = call.shapes[2][2], call.shapes[3], call.shapes[4]
            total += call.products // keys * (keys if outside is None else band[3])
        elif call.operator in ("attn_plugins.window_attention", "attn_plugins.deform_conv2d"):
            total += call.products
        elif call.operator == "aten.bmm":
            (heads, rows, width), (_, _, columns) = call.shapes[:2]
            total += 0 if has_content else heads * rows * width * min(columns, tokens)
        elif call.operator != _RELU and not call.module.endswith("conv_offset"):
            raise _unknown(call, "Zhu et al. (2019)")
    return total


def thesis(recorded: Sequence[Call]) -> int:
    """Count as the thesis, Table 4.2: multiply-adds of linear layers, and per output 1 a bias, 2 a BatchNorm, 1 a ReLU.

    Attention itself is free.
    """
    total = 0
    for call in recorded:
        if call.operator == "aten.convolution":
            image, weight, bias = call.shapes[:3]
            stride, padding, dilation = call.shapes[3:6]
            outputs = image[0] * weight[0]
            for n, k, s, p, d in zip(image[2:], weight[2:], stride, padding, dilation):
                outputs *= (n + 2 * p - d * (k - 1) - 1) // s + 1
            total += call.products + (0 if bias is None else outputs)
        elif call.operator == _BATCH_NORM:
            total += math.prod(call.shapes[0]) * 2
        elif call.operator == _RELU:
            total += math.prod(call.shapes[0])
        elif call.operator not in _ATTENTION:
            raise _unknown(call, "the thesis")
    return total
