"""Global attention in Triton: what its kernels need of a call, and their launches.

Half numbers are multiplied as they are and summed in float32; the softmax is in float32. Sums have a fixed order, so
that gradients are the same each time. See :mod:`.triton_kernels`.
"""

from __future__ import annotations

from functools import reduce
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import triton_launch
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed, target
from ...core.strides import has_rows, with_rows
from ...core.triton_launch import launch, power_of_two
from .operands import Options, Terms

WIDEST = 256  # of queries, keys and values: a block of each must fit into shared memory
WIDEST_FLOAT = 128  # of float32, which takes three times the registers
NARROWEST = 8  # columns of a tile


class Block(NamedTuple):
    """Sizes of a program's block, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, arithmetic ("tf32" is float32, as one or as three products) and the greater of both widths. Chosen by times
# on an H100, but for float32 of width 128, and by registers and shared memory, below the 99 KiB that smaller devices
# have where the widths allow it. Eight warps gave wrong results in float32 (Triton 3.6).
BLOCKS = {
    ("forward", "half", 32): Block(64, 32, 4, 3),
    ("forward", "half", 64): Block(64, 64, 4, 3),
    ("forward", "half", 128): Block(64, 64, 4, 2),
    ("forward", "half", 256): Block(64, 32, 8, 2),
    ("forward", "tf32", 32): Block(64, 64, 4, 1),
    ("forward", "tf32", 64): Block(64, 64, 4, 1),
    ("forward", "tf32", 128): Block(16, 32, 4, 1),
    ("query_gradients", "half", 32): Block(64, 64, 4, 2),
    ("query_gradients", "half", 64): Block(64, 64, 4, 2),
    ("query_gradients", "half", 128): Block(64, 32, 4, 1),
    ("query_gradients", "half", 256): Block(64, 32, 8, 1),
    ("query_gradients", "tf32", 32): Block(64, 32, 4, 1),
    ("query_gradients", "tf32", 64): Block(64, 32, 4, 1),
    ("query_gradients", "tf32", 128): Block(16, 32, 4, 1),
    ("key_gradients", "half", 32): Block(64, 64, 4, 2),
    ("key_gradients", "half", 64): Block(64, 64, 4, 3),
    ("key_gradients", "half", 128): Block(64, 32, 4, 1),
    ("key_gradients", "half", 256): Block(32, 32, 4, 1),
    ("key_gradients", "tf32", 32): Block(64, 64, 4, 1),
    ("key_gradients", "tf32", 64): Block(64, 32, 4, 1),
    ("key_gradients", "tf32", 128): Block(16, 16, 4, 1),
}
# Where tensor cores take factors from registers, and the above spills in the loop.
SMALLER_BLOCKS = {("query_gradients", "half", 64): Block(64, 32, 4, 2)}
# The same on devices other than Hopper, where float32 is kept from spilling and has not been timed.
SMALLER_FLOAT_BLOCKS = {
    ("forward", "tf32", 32): Block(64, 32, 4, 1),
    ("forward", "tf32", 64): Block(32, 64, 4, 1),
    ("query_gradients", "tf32", 32): Block(64, 16, 4, 1),
    ("query_gradients", "tf32", 64): Block(16, 32, 4, 1),
    ("key_gradients", "tf32", 32): Block(32, 32, 4, 1),
    ("key_gradients", "tf32", 64): Block(32, 32, 4, 1),
}
# On AMD's devices with warps of 32 threads, where none has run: those that spill least. Others take the smallest.
RDNA_BLOCKS = {
    ("forward", "half", 32): Block(32, 32, 4, 1),
    ("forward", "tf32", 32): Block(32, 16, 4, 1),
    ("query_gradients", "half", 32): Block(16, 32, 4, 1),
    ("key_gradients", "half", 32): Block(32, 32, 4, 1),
}
RDNA_SMALLEST = Block(16, 16, 4, 1)
# All other tensors are of queries.
_OF_KEYS = ("key", "value", "key_logits", "grad_key", "grad_value", "grad_key_logits")
_LOGITS = (
    *("row_logits", "column_logits", "key_logits"),
    *("grad_row_logits", "grad_column_logits", "grad_key_logits"),
)


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why these kernels cannot compute, or None."""
    query, _, value, *_ = terms
    if reason := triton_launch.refusal(value):
        return reason
    widths = (0 if query is None else query.shape[4], value.shape[4])
    widest = WIDEST if value.dtype.itemsize == 2 else WIDEST_FLOAT
    if max(widths) > widest:
        return f"queries are {widths[0]} and values {widths[1]} wide, and {widest} is the widest that its kernels hold"
    B, M, Hk, Wk, _ = value.shape
    Hq, Wq = terms.grid()
    if max(B * M * Hq * Wq, B * M * Hk * Wk) > triton_launch.LONGEST_GRID:
        return "there are 2**31 queries or keys, more than it counts"
    return None


class _Shape(NamedTuple):
    B: int
    M: int
    Hq: int
    Wq: int
    Hk: int
    Wk: int
    D: int  # 0 without a content term
    DV: int


def _shape(terms: Terms) -> _Shape:
    query, _, value, *_ = terms
    B, M, Hk, Wk, DV = value.shape
    return _Shape(B, M, *terms.grid(), Hk, Wk, 0 if query is None else query.shape[4], DV)


def _tensors(terms: Terms, shape: _Shape) -> dict[str, Tensor | None]:
    """Return the terms under the kernels' names, expanded."""
    query, key, value, row_logits, column_logits, key_logits = terms
    B, M, Hq, Wq, Hk, Wk, D, _ = shape
    return {
        "value": with_rows(value),
        "query": with_rows(query) if query is not None and D else None,
        "key": with_rows(key) if key is not None and D else None,
        "row_logits": None if row_logits is None else with_rows(row_logits).expand(B, M, Hq, Wq, Hk),
        "column_logits": None if column_logits is None else with_rows(column_logits).expand(B, M, Hq, Wq, Wk),
        "key_logits": None if key_logits is None else _dense_rows(key_logits).expand(B, M, Hk, Wk),
    }


def _dense_rows(logits: Tensor) -> Tensor:
    """Return ``logits`` (·, ·, Hk, Wk), or a copy with adjacent columns; with adjacent rows if there is one column."""
    return logits if logits.stride(-2 if logits.shape[-1] == 1 else -1) == 1 else logits.contiguous()


def _block(kernel: str, shape: _Shape, tensor: Tensor, both: bool = False) -> Block:
    """Return what a program holds, for the dtype and device of ``tensor``; ``both`` for row and column logits."""
    key = kernel, "half" if tensor.dtype.itemsize == 2 else "tf32", power_of_two(max(shape.D, shape.DV), 32)
    if triton_launch.rdna(tensor):
        return RDNA_BLOCKS.get(key, RDNA_SMALLEST)
    block = BLOCKS[key]
    if not triton_launch.factors_in_shared_memory(tensor):
        block = SMALLER_BLOCKS.get(key, block)
    if not triton_launch.hopper(tensor):
        block = SMALLER_FLOAT_BLOCKS.get(key, block)
    if both and kernel == "query_gradients" and shape.Wk > block.keys:
        return block._replace(keys=min(block.keys, 32))  # gradients of rows in pieces want registers
    return block


def _launch(kernel: str, shape: _Shape, scale: float, **tensors: Tensor | None) -> None:
    """Launch a kernel.

    Args:
        kernel: Its name.
        shape: Of the call.
        scale: Of the content term.
        **tensors: All that the kernel names, of their full shapes; None where one is absent or not wanted.
    """
    from . import triton_kernels as kernels

    function = getattr(kernels, kernel)
    B, M, Hq, Wq, Hk, Wk, D, DV = shape
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    strides = {name: _strides(name, tensor, shape) for name, tensor in given.items() if tensor.dim() > 3}
    tensor = next(iter(given.values()))
    block = _block(kernel, shape, tensor, both="row_logits" in given and "column_logits" in given)
    of_keys = [name for name in strides if name in _OF_KEYS]
    if (
        "row_logits" not in strides
        and "column_logits" not in strides
        and all(_even(strides[name], Wk) for name in of_keys)
    ):
        # Neither rows nor columns matter: a tile is a piece of the sequence of keys.
        columns = width = block.keys
        rows = -(-Hk * Wk // columns)
        strides |= {name: (*strides[name][:2], columns * strides[name][3], strides[name][3]) for name in of_keys}
    else:
        columns, width, rows = min(block.keys, power_of_two(Wk, NARROWEST)), Wk, Hk
    tile_rows = block.keys // columns
    row_blocks = -(-rows // tile_rows)
    numbers = dict(
        scale=scale, M=M, Wq=Wq, queries=Hq * Wq, Hk=rows, Wk=width, keys=Hk * Wk, row_blocks=row_blocks
    )  # fmt: skip
    constants = dict(
        D=D, DV=DV, BLOCK_D=power_of_two(D), BLOCK_DV=power_of_two(DV),
        QUERIES=block.queries, ROWS=tile_rows, COLUMNS=columns, WIDE=columns < width,
        ALIGNED=_alignment(strides, tensor.dtype), LINE=_line(strides, Wk, tensor.dtype), LONG=_long(strides, shape),
        FLAT=all(_even(four, Wq) for name, four in strides.items() if name not in _OF_KEYS),
        PRECISION=triton_launch.precision(tensor), UPCAST=triton_launch.upcast(tensor.dtype),
    )  # fmt: skip
    over_keys = kernel == "key_gradients"
    blocks = row_blocks * -(-width // columns) if over_keys else -(-Hq * Wq // block.queries)
    places = {
        f"{name}_{axis}": n for name in kernels.TENSORS for axis, n in zip("bmhw", strides.get(name, (0, 0, 0, 0)))
    }
    constants = {name: constants[name] for name in function.arg_names if name in constants}
    launch(
        function, (B * M * blocks,), tensors | places | numbers, **constants,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


def _strides(name: str, tensor: Tensor, shape: _Shape) -> tuple[int, int, int, int]:
    """Return the strides of batch, heads, rows and columns; with one row, its stride is W times that of columns."""
    H, W = (shape.Hk, shape.Wk) if name in _OF_KEYS else (shape.Hq, shape.Wq)
    b, m, h, w = tensor.stride()[:4]
    w = h if W == 1 else w
    return b if shape.B > 1 else 0, m if shape.M > 1 else 0, W * w if H == 1 else h, w


def _even(strides: tuple[int, int, int, int], width: int) -> bool:
    """Return whether the cells of a map of ``width`` columns are evenly spaced, row after row."""
    return strides[2] == width * strides[3]


def _alignment(strides: dict[str, tuple[int, int, int, int]], dtype: torch.dtype) -> int:
    """Return the greatest power of two, up to 16 bytes, that divides the strides of all but the logits."""
    common = reduce(gcd, (stride for name, four in strides.items() if name not in _LOGITS for stride in four), 0)
    return min(common & -common or 16, 16 // dtype.itemsize)


def _line(strides: dict[str, tuple[int, int, int, int]], width: int, dtype: torch.dtype) -> int:
    """Return how many column logits are read at a time, 16 bytes or one: other numbers would be further variants."""
    numbers = 16 // dtype.itemsize
    fits = "column_logits" in strides and not any(size % numbers for size in (width, *strides["column_logits"]))
    return numbers if fits else 1


def _long(strides: dict[str, tuple[int, int, int, int]], shape: _Shape) -> bool:
    """Return whether a head of an image spans so much memory that its offsets need 64 bits."""
    widest = max(shape.D, shape.DV, shape.Hk, shape.Wk)
    rows, columns = max(shape.Hq, shape.Hk), max(shape.Wq, shape.Wk)
    return any(rows * h + columns * w + widest >= 2**31 for _, _, h, w in strides.values())


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    shape = _shape(terms)
    output, lse = empty_results(terms.value, shape.Hq, shape.Wq)
    _launch("forward", shape, options.scale, **_tensors(terms, shape), output=output, lse=lse.flatten(2))
    return output, lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    shape = _shape(terms)
    B, M, Hq, Wq, Hk, Wk, *_ = shape
    wide = Wk > _block("query_gradients", shape, output).keys
    grads: Gradients = {}
    for name, term in needed(terms, needs):
        axes = (Hk, Wk) if name in _OF_KEYS else (Hq, Wq)
        added = wide and name == "row_logits"  # the kernel adds to what it has written: half numbers are too coarse
        fits = has_rows if not added else lambda grad: has_rows(grad) and grad.dtype == torch.float32
        grads[name] = target(term, (B, M, *axes, *term.shape[4:]), torch.float32, fits)
    query, key, value, row, column, key_logits = (
        grad if grad is None or grad.numel() else None for grad in map(grads.get, terms._fields)
    )
    sums = lse.flatten(2).contiguous()
    inverse = None if output.dtype.itemsize == 2 else torch.empty_like(sums)
    norms = dict(lse=sums, delta=torch.empty_like(sums), inverse=inverse)
    tensors = dict(**_tensors(terms, shape), grad_output=with_rows(grad_output), **norms)
    targets = dict(output=with_rows(output), grad_query=query, grad_row_logits=row, grad_column_logits=column)
    _launch("query_gradients", shape, options.scale, **tensors, **targets)
    if any(grad is not None for grad in (key, value, key_logits)):
        targets = dict(grad_key=key, grad_value=value, grad_key_logits=key_logits)
        _launch("key_gradients", shape, options.scale, **tensors, **targets)
    for lines, grad in ((Hk, row), (Wk, column)):
        if lines == 1 and grad is not None:  # a logit that all keys share has the gradient 0
            grad.zero_()
    return like_terms(terms, grads)


BACKEND = Backend(triton_launch.NAME, cannot, forward, backward, prefers_not=triton_launch.prefers_not)
