"""Criss-cross attention in Triton's kernels: two passes, along columns and along rows, around one softmax.

Forward, the pass along rows continues the softmax of the pass along columns: nothing as large as the weights is
stored. A program has a block of queries of one line and a block of the values' channels, and reads the line's keys.
Values are split over programs, each of which computes the logits: 512 channels and keys of 64 (CCNet) do not fit
a program's registers, and the columns of one map alone do not fill a device.

Backward, weights are recomputed from the log-sum-exp. A gradient is written by one program in each of both passes, the
second of which adds to the first: no result depends on the order of programs.

They take content alone in float16 and bfloat16; sums and softmax are in float32. What the first pass writes is rounded
to the dtype of the tensors before the second adds to it, as between batched products, which serve everything else.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import triton_launch
from ...core.backends import Backend, Gradients
from ...core.gradients import needed
from ...core.strides import strides
from .eager import empty_gradient, empty_results, packed
from .operands import Options, Terms

WIDEST = 256  # width of query and key: a program holds them whole
_SMALLEST = 16  # block


class Blocks(NamedTuple):
    """Sizes of a program's blocks, and how it is compiled."""

    queries: int
    keys: int
    channels: int  # of the values
    warps: int
    stages: int


# By times on an H100.
BLOCKS = {"attend": Blocks(64, 32, 128, 4, 2), "queries": Blocks(64, 64, 64, 4, 2), "keys": Blocks(64, 64, 128, 4, 2)}
# On devices other than Hopper, where none has been timed: without spills.
OTHER_BLOCKS = {
    "attend": Blocks(64, 32, 64, 4, 2),
    "queries": Blocks(64, 32, 64, 4, 2),
    "keys": Blocks(32, 64, 64, 8, 2),
}
_HALF = (torch.float16, torch.bfloat16)


def takes(terms: Terms) -> bool:
    """Return whether the kernels have these terms and this dtype, whatever the sizes and the device are."""
    return terms.value.dtype in _HALF and terms.position_logits is None


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why the kernels do not compute this, or None."""
    if not takes(terms):
        return "its kernels take content alone, in float16 and bfloat16"
    if reason := triton_launch.refusal(terms.value):
        return reason
    if not options.recompute:
        return "the weights are to be kept"
    assert terms.query is not None
    width = terms.query.shape[4]
    if not 1 <= width <= WIDEST:
        return f"its kernels take widths of query and key from 1 to {WIDEST}, got {width}"
    B, M, H, W, dv = terms.value.shape
    most = B * M * max(H * _blocks(W, _SMALLEST), W * _blocks(H, _SMALLEST)) * (_blocks(dv, _SMALLEST) + 1)
    if most > triton_launch.LONGEST_GRID:
        return f"its kernels might need {most} programs, and a grid has at most {triton_launch.LONGEST_GRID}"
    return None


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (B, M, H, W, dv), no weights, and the log-sum-exp (B, M, H, W)."""
    from . import triton_kernels

    output, weights, log_sum_exp = empty_results(terms, options)
    launches = _Launches(terms, options, output)
    query, key, value = launches.terms
    blocks = launches.blocks("attend")
    partial = torch.empty_like(log_sum_exp)
    for column in (True, False):
        launches.add(
            triton_kernels.attend, blocks, column, blocks.queries, _blocks(value.shape[4], blocks.channels),
            dict(output=output, partial=partial, log_sum_exp=log_sum_exp),
        )  # fmt: skip
    return output, weights, log_sum_exp


def backward(
    grad_output: Tensor,
    terms: Terms,
    options: Options,
    output: Tensor | None,
    weights: Tensor,
    log_sum_exp: Tensor,
    needs: dict[str, bool],
) -> Gradients:
    """Return the gradients of query, key and value that are needed."""
    from . import triton_kernels

    grads: Gradients = {name: empty_gradient(term) for name, term in needed(terms, needs)}
    grad_query, grad_key, grad_value = (
        g if g is None or g.numel() else None for g in map(grads.get, ("query", "key", "value"))
    )
    grad_output = packed(grad_output, grad_output.dtype)
    if grad_query is not None or grad_key is not None:
        if output is None:  # another backend was to compute this backward pass
            output, *_ = forward(terms, options)
        output = packed(output, output.dtype)
    launches = _Launches(terms, options, grad_output, output, grad_query, grad_key, grad_value)
    query, key, value = launches.terms
    delta, ds_sums, ds_sizes = (torch.empty_like(log_sum_exp) for _ in range(3))
    tensors = dict(grad_output=grad_output, log_sum_exp=log_sum_exp, delta=delta)

    blocks = launches.blocks("queries")
    turns = (grad_query is not None) + (grad_query is not None or grad_key is not None)
    for again, column in itertools.product((False, True)[:turns], (True, False)):
        launches.add(
            triton_kernels.gradients_of_queries, blocks, column, blocks.queries, 1,
            dict(**tensors, output=output, ds_sums=ds_sums, ds_sizes=ds_sizes, grad_query=grad_query), AGAIN=again,
        )  # fmt: skip

    blocks = launches.blocks("keys")
    value_parts = 0 if grad_value is None else _blocks(value.shape[4], blocks.channels)
    parts = value_parts + (grad_key is not None)
    for column in (True, False) if parts else ():
        launches.add(
            triton_kernels.gradients_of_keys, blocks, column, blocks.keys, parts,
            dict(**tensors, grad_key=grad_key, grad_value=grad_value), VALUE_PARTS=value_parts, ADD=not column,
        )  # fmt: skip
    return grads


class _Launches:
    """Shared arguments of all launches of a call.

    Attributes:
        terms: Query, key and value, with contiguous widths.
    """

    def __init__(self, terms: Terms, options: Options, *others: Tensor | None):
        dtype = terms.value.dtype
        self.terms = tuple(packed(t, dtype) for t in terms[:3] if t is not None)
        query, key, value = self.terms
        self.scale, self.shape = options.scale, value.shape
        numbers = [n for t in (query, key, value, *others) if t is not None for n in strides(t)]
        self.unit = math.gcd(16, *numbers)
        D, DV = query.shape[4], value.shape[4]
        self.constants: dict[str, Any] = dict(
            D=D, DV=DV, UNIT=self.unit, BLOCK_D=triton_launch.power_of_two(D),
            PRECISION=triton_launch.precision(value), UPCAST=triton_launch.upcast(dtype),
        )  # fmt: skip

    def blocks(self, kernel: str) -> Blocks:
        """Return the blocks of a kernel, with no more channels than there are, and 8 warps above a width of 64."""
        blocks = (BLOCKS if triton_launch.hopper(self.terms[2]) else OTHER_BLOCKS)[kernel]
        if self.constants["D"] > 64:
            blocks = blocks._replace(warps=8)
        return blocks._replace(channels=min(blocks.channels, triton_launch.power_of_two(self.shape[4])))

    def add(
        self,
        kernel: Any,
        blocks: Blocks,
        column: bool,
        block: int,
        parts: int,
        tensors: dict[str, Tensor | None],
        **constants: Any,
    ) -> None:
        """Launch a kernel along columns or rows.

        Args:
            block: Places of a line that a program has.
            parts: Programs that have the same places.
            tensors: Those that the kernel names besides query, key and value; it takes strides in units.
        """
        B, M, H, W, _ = self.shape
        lines, length = (W, H) if column else (H, W)
        arguments: dict[str, Any] = dict(scale=self.scale, heads=M, lines=lines, length=length)
        for name, tensor in (*zip(("query", "key", "value"), self.terms), *tensors.items()):
            arguments[name] = tensor
            b, m, *lengths = strides(tensor)
            for axis, stride in zip(("batch", "head", "line", "place"), (b, m, *lengths[:: -1 if column else 1])):
                arguments[f"{name}_{axis}"] = stride // self.unit
        triton_launch.launch(
            kernel, (B * M * lines * _blocks(length, block) * parts,), arguments,
            **self.constants, **constants, COLUMN=column, PARTS=parts,
            BLOCK_Q=blocks.queries, BLOCK_K=blocks.keys, BLOCK_V=blocks.channels,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


BACKEND = Backend(triton_launch.NAME, cannot, forward, backward, prefers_not=triton_launch.prefers_not)
