"""Criss-cross attention in Triton's kernels: two passes, along columns and along rows, around one softmax.

Forward, the pass along rows continues the softmax of the pass along columns: nothing as large as the weights is
stored. A program has a block of queries of one line and a block of the values' channels, and reads the line's keys.
Values are split over programs, each of which computes the logits: 512 channels beside keys of 64 (CCNet) do not fit
a program's registers, and the columns of one map alone do not fill a device.

Backward, weights are recomputed from the log-sum-exp. A gradient is written by one program in each of both passes, the
second of which adds to the first: no result depends on the order of programs.

They take CUDA tensors of float32, float16 and bfloat16; sums and softmax are in float32. What the first pass writes
is rounded to the tensors' dtype before the second adds to it, as between batched products.

They serve content alone in half precision, for which they are faster than batched products, and else within
``backend("triton")``. ``Options.recompute`` takes that to the backward, which runs in a thread of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, triton_launch
from ..backends import Backend
from .operands import Options, Terms
from .products import empty, packed

WIDEST = 256  # width of query and key: a program holds them whole
WIDEST_FLOAT = 128  # of float32, whose kernels spill in their loops beyond it
_SMALLEST = 16  # block


class Blocks(NamedTuple):
    """What a program holds at once, and how it is compiled."""

    queries: int
    keys: int
    channels: int  # of the values
    warps: int
    stages: int


# By the kind of product ("tf32" is float32, as one or as three products): halves by times on an H100, float32 such that
# widths up to 64 do not spill in loops (tools.triton_report).
BLOCKS = {
    "attend": {"half": Blocks(64, 32, 128, 4, 2), "tf32": Blocks(32, 32, 64, 4, 1)},
    "queries": {"half": Blocks(64, 64, 64, 4, 2), "tf32": Blocks(32, 32, 32, 4, 1)},
    "keys": {"half": Blocks(64, 64, 128, 4, 2), "tf32": Blocks(32, 32, 32, 4, 1)},
}
# On devices other than Hopper, and with position logits, where none has been timed: halves without spills.
OTHER_BLOCKS = {
    "attend": BLOCKS["attend"] | {"half": Blocks(64, 32, 64, 4, 2)},
    "queries": BLOCKS["queries"] | {"half": Blocks(64, 32, 64, 4, 2)},
    "keys": BLOCKS["keys"] | {"half": Blocks(32, 64, 64, 8, 2)},
}
# Of float32 wider than 64, on any device.
WIDE_FLOAT_BLOCKS = {
    "attend": Blocks(16, 32, 64, 4, 1),
    "queries": Blocks(16, 16, 32, 4, 1),
    "keys": Blocks(16, 16, 32, 4, 1),
}
_HALF = (torch.float16, torch.bfloat16)


def wanted(terms: Terms) -> bool:
    """Whether these kernels are to serve, whatever the sizes are.

    Batched products stay where Triton has not been seen to be faster: in float32, and with position logits.
    """
    if (name := backends.forced()) is not None:
        return name == triton_launch.NAME
    value = terms.value
    if not value.is_cuda or value.dtype not in _HALF or terms.position_logits is not None:
        return False
    return triton_launch.runs_on(value.device.index or 0)


def refuses(terms: Terms, options: Options) -> str | None:
    """Return the reason why the kernels do not compute this, or None."""
    if reason := triton_launch.refusal(terms.value):
        return reason
    if not options.recompute:
        return "in float32 and with position logits, batched products serve unless Triton is asked for"
    widest = WIDEST_FLOAT if terms.value.dtype == torch.float32 else WIDEST
    if terms.query is not None and terms.query.shape[4] > widest:
        return f"its kernels take widths of query and key up to {widest}, got {terms.query.shape[4]}"
    B, M, H, W, dv = terms.value.shape
    most = B * M * max(H * _blocks(W, _SMALLEST), W * _blocks(H, _SMALLEST)) * (_blocks(dv, _SMALLEST) + 1)
    if most > triton_launch.LONGEST_GRID:
        return f"its kernels might need {most} programs, and a grid has at most {triton_launch.LONGEST_GRID}"
    return None


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def forward(terms: Terms, options: Options, output: Tensor, weights: Tensor, log_sum_exp: Tensor) -> None:
    """Write the output (B, M, H, W, dv) and the log-sum-exp (B, M, H, W)."""
    from . import triton_kernels

    launches = _Launches(terms, options, output)
    query, key, value, position = launches.terms
    blocks = launches.blocks("attend")
    partial = torch.empty_like(log_sum_exp)
    for column in (True, False):
        launches.add(
            triton_kernels.attend, blocks, column, blocks.queries, _blocks(value.shape[4], blocks.channels),
            (value, query, key, position, output, partial, log_sum_exp), (value, query, key, output), (position,),
        )  # fmt: skip


def backward(
    grad_output: Tensor,
    terms: Terms,
    options: Options,
    output: Tensor | None,
    weights: Tensor,
    log_sum_exp: Tensor,
    grads: Sequence[Tensor | None],
) -> None:
    """Fill the wanted gradients (those not None) of query, key, value and position logits."""
    from . import triton_kernels

    grad_query, grad_key, grad_value, grad_position = (g if g is None or g.numel() else None for g in grads)
    slopes = packed(grad_output, grad_output.dtype)
    of_queries = grad_query is not None or grad_position is not None
    if of_queries or grad_key is not None:
        if output is None:  # another backend was to compute this backward pass
            output = empty(terms.value, terms.value.shape[4])
            forward(terms, options, output, weights, torch.empty_like(log_sum_exp))
        output = packed(output, output.dtype)
    launches = _Launches(terms, options, slopes, output, grad_query, grad_key, grad_value)
    query, key, value, position = launches.terms
    every = grad_position  # of every image and head, where logits of position are shared
    if grad_position is not None and grad_position.shape[:2] != value.shape[:2]:
        every = grad_position.new_empty((*value.shape[:2], *grad_position.shape[2:]), dtype=torch.float32)
    mean = torch.empty_like(log_sum_exp)

    blocks = launches.blocks("queries")
    for column in (True, False):
        if of_queries or (column and grad_key is not None):
            launches.add(
                triton_kernels.gradients_of_queries, blocks, column, blocks.queries, 1,
                (value, query, key, position, slopes, log_sum_exp, output, mean, grad_query, every),
                (value, query, key, slopes, output, grad_query), (position, every),
                MEAN=column, GRADIENTS=of_queries, ADD=not column,
            )  # fmt: skip

    blocks = launches.blocks("keys")
    value_parts = 0 if grad_value is None else _blocks(value.shape[4], blocks.channels)
    parts = value_parts + (grad_key is not None)
    for column in (True, False) if parts else ():
        launches.add(
            triton_kernels.gradients_of_keys, blocks, column, blocks.keys, parts,
            (value, query, key, position, slopes, log_sum_exp, mean, grad_key, grad_value),
            (value, query, key, slopes, grad_key, grad_value), (position,),
            VALUE_PARTS=value_parts, ADD=not column,
        )  # fmt: skip
    if grad_position is not None and every is not None and every is not grad_position:
        grad_position.copy_(every.sum_to_size(grad_position.shape))


class _Launches:
    """What all launches of a call share.

    Attributes:
        terms: The call's, with contiguous widths.
    """

    def __init__(self, terms: Terms, options: Options, *others: Tensor | None):
        dtype = terms.value.dtype
        self.terms = Terms._make(None if t is None else packed(t, dtype) for t in terms)
        query, key, value, _ = self.terms
        self.scale, self.shape = options.scale, value.shape
        strides = [n for t in (query, key, value, *others) if t is not None for n in _strides(t, False)]
        self.unit = math.gcd(16, *strides)
        D, DV = 0 if query is None else query.shape[4], value.shape[4]
        self.kind = "tf32" if dtype == torch.float32 else "half"
        self.constants: dict[str, Any] = dict(
            D=D, DV=DV, UNIT=self.unit, BLOCK_D=triton_launch.power_of_two(D), CONTENT=D > 0,
            PRECISION=triton_launch.precision(dtype), UPCAST=triton_launch.upcast(dtype),
        )  # fmt: skip

    def blocks(self, kernel: str) -> Blocks:
        """Those of a kernel, with no more channels than there are; of halves above a width of 64, of 8 warps."""
        timed = self.terms.position_logits is None and triton_launch.hopper(self.terms.value)
        table = BLOCKS if timed else OTHER_BLOCKS
        found, wide = table[kernel][self.kind], self.constants["D"] > 64
        if wide:
            found = found._replace(warps=8) if self.kind == "half" else WIDE_FLOAT_BLOCKS[kernel]
        return found._replace(channels=min(found.channels, triton_launch.power_of_two(self.shape[4])))

    def add(
        self,
        kernel: Any,
        blocks: Blocks,
        column: bool,
        block: int,
        parts: int,
        tensors: Sequence[Tensor | None],
        strided: Sequence[Tensor | None],
        of_position: Sequence[Tensor | None],
        **constants: Any,
    ) -> None:
        """Launch a kernel along columns or rows.

        Args:
            block: Places of a line that a program has.
            parts: Programs that have the same places.
            tensors: The kernel's.
            strided: Those whose strides, in units, it takes.
            of_position: Those whose strides it takes as they are.
        """
        B, M, H, W, _ = self.shape
        lines, length = (W, H) if column else (H, W)
        sizes = [n // self.unit for t in strided for n in _strides(t, column)]
        sizes += [n for t in of_position for n in _strides(t, column)]
        triton_launch.launch(
            kernel, (B * M * lines * _blocks(length, block) * parts,), *tensors,
            self.scale, M, lines, length, 0 if column else H, *sizes,
            **self.constants, **constants, COLUMN=column, PARTS=parts,
            BLOCK_Q=blocks.queries, BLOCK_K=blocks.keys, BLOCK_V=blocks.channels,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip


def _strides(tensor: Tensor | None, column: bool) -> tuple[int, ...]:
    """Of image, head, line and place, 0 where there is but one or no tensor."""
    if tensor is None:
        return 0, 0, 0, 0
    (B, M, H, W), (b, m, h, w) = tensor.shape[:4], tensor.stride()[:4]
    b, m, h, w = 0 if B == 1 else b, 0 if M == 1 else m, 0 if H == 1 else h, 0 if W == 1 else w
    return (b, m, w, h) if column else (b, m, h, w)


BACKEND = Backend(triton_launch.NAME, refuses, forward, backward)
