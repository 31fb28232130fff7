"""Sequence attention by Triton kernels (:mod:`.triton_kernels`), without a tensor of all logits.

The forward pass goes once over the keys, for each block of queries. The backward pass goes once over the keys for the
gradients of what belongs to queries, once over the queries for those of what belongs to keys, and once more for
position logits that are broadcast; in half precision, that of windows of up to 64 places is a single kernel. No sum
depends on the order in which blocks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import triton_launch
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed, target
from ...core.strides import strides
from ...core.triton_launch import launch, power_of_two
from .eager import band_reach
from .operands import Options, Terms


class Tile(NamedTuple):
    """Queries and keys of a program's tile of logits, warps of a program, loads that are under way in a loop."""

    queries: int
    keys: int
    warps: int
    stages: int


# By arithmetic ("tf32" is float32, as one or as three products), then by the largest width: tiles of the forward, of
# queries' gradients, of keys', of position logits'. Up to a width of 64 chosen by times on an H100; the others by
# registers. Float32's kernels of eight warps accessed memory out of bounds (Triton 3.6).
TILES = {
    "half": {
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 3)),
        128: (Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
        256: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    },
    "tf32": {
        64: (Tile(64, 64, 4, 1), Tile(64, 64, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
        128: (Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), Tile(32, 16, 4, 1)),
    },
}
# On devices other than Hopper, where no tile has been timed: those that do not spill.
OTHER_TILES = {
    "half": {**TILES["half"], 64: (Tile(128, 64, 8, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 2), Tile(64, 32, 4, 3))},
    "tf32": {
        64: (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
        128: (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(32, 16, 4, 1)),
    },
}
# On AMD's devices with warps of 32 threads, where none has run: those that spill least. Some gradients still do.
_SMALLEST = (Tile(16, 16, 4, 1),) * 4
RDNA_TILES = {
    "half": {64: (Tile(32, 32, 4, 1), *_SMALLEST[1:3], Tile(32, 32, 4, 1)), 128: _SMALLEST, 256: _SMALLEST},
    "tf32": {64: _SMALLEST, 128: _SMALLEST},
}
SHORT = 64  # queries or keys at most for which a large block is mostly empty
WINDOW_PROGRAMS = 256  # two for each multiprocessor of an H100: each sums the gradients of shared position logits
PROGRAMS = 512  # into at least so many the sums over broadcast axes are parted, if there are so many addends
# A program goes through the keys in turn, 64 in a microsecond or more (H100): where so few programs have so many keys,
# products with all keys at once, on the whole device, need a fraction of that. Not timed.
FEW_PROGRAMS, MANY_KEYS = 16, 2**15
LONGEST = 2**23  # positions, taps, and numbers between rows: offsets within a tile stay below 2**31


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why the kernels cannot compute, or None."""
    value, T = terms.value, terms.queries()
    if reason := triton_launch.refusal(value):
        return reason
    widths = max(value.shape[3], 0 if terms.query is None else terms.query.shape[3])
    widest = max(TILES[_arithmetic(value)])
    if widths > widest:
        return f"its tiles hold widths of up to {widest} in {str(value.dtype)[6:]}, and a head has {widths}"
    K = 0 if terms.band_logits is None else terms.band_logits.shape[3]
    longest = max(T, value.shape[2], K)
    if longest > LONGEST:
        return f"it counts up to {LONGEST} queries, keys and taps, and there are {longest}"
    programs = value.shape[0] * value.shape[1] * -(-longest // 16)
    if programs > triton_launch.LONGEST_GRID:
        return f"a grid has up to {triton_launch.LONGEST_GRID} programs, and these are up to {programs}"
    return None


def prefers_not(terms: Terms, options: Options) -> str | None:
    """Leave few queries of many keys to products with all keys at once."""
    value = terms.value
    if reason := triton_launch.prefers_not(terms, options):
        return reason
    busy = value.shape[0] * value.shape[1] * -(-terms.queries() // SHORT)
    if busy <= FEW_PROGRAMS and value.shape[2] >= MANY_KEYS:
        return f"only {busy} programs would go through {value.shape[2]} keys, which does not pay"
    return None


def _arithmetic(tensor: Tensor) -> str:
    """Return a key of :data:`TILES`."""
    return "half" if tensor.dtype.itemsize == 2 else "tf32"


def _tiles(tensor: Tensor) -> dict[str, Any]:
    if triton_launch.rdna(tensor):
        return RDNA_TILES
    return TILES if triton_launch.hopper(tensor) else OTHER_TILES


# Tensors with strides: rows of vectors, logits that are read a line at a time, logits that are read one by one.
_VECTORS = ("value", "query", "key", "output", "attended", "grad_output", "grad_query", "grad_key", "grad_value")
_LINES = ("position_logits", "grad_position_logits")
_TAPS = ("band_logits", "outside_logits", "grad_band_logits", "grad_outside_logits")


class Call:
    """The arguments of one call as kernels take them."""

    def __init__(self, terms: Terms, options: Options):
        mask, dtype = options.key_padding_mask, terms.value.dtype
        self.B, self.M, self.S, self.dv = terms.value.shape
        self.T, self.d = terms.queries(), 0 if terms.query is None else terms.query.shape[3]
        self.K = 0 if terms.band_logits is None else terms.band_logits.shape[3]
        query, key, value, band, outside, position = (None if t is None else _with_rows(t) for t in terms)
        if self.d == 0:
            query = key = None
        start = min(options.start, self.S + self.K)  # positions beyond all bands are alike
        left, _ = band_reach(self.K, options.causal)
        padding = None if mask is None else mask.contiguous().view(torch.uint8)
        ids = options.segment_ids
        self.tensors = dict(
            value=value, query=query, key=key, band_logits=band, outside_logits=outside, position_logits=position,
            key_padding_mask=padding, segment_ids=None if ids is None else ids.contiguous(),
        )  # fmt: skip
        self.numbers: dict[str, float] = dict(
            M=self.M, T=self.T, S=self.S, K=self.K, left=left, start=start, scale=float(options.scale),
            period=1 if ids is None else ids.shape[0], key_padding_mask_b=0 if padding is None else padding.stride(0),
        )  # fmt: skip
        self.device, self.itemsize = terms.value.device, dtype.itemsize
        self.of_widths = _tiles(terms.value)[_arithmetic(terms.value)]
        self.constants = dict(
            D=self.d,
            DV=self.dv,
            BLOCK_D=power_of_two(self.d),
            BLOCK_DV=power_of_two(self.dv),
            CAUSAL=options.causal,
            PRECISION=triton_launch.precision(terms.value),
            UPCAST=triton_launch.upcast(dtype),
        )

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of the forward, and of the gradients of queries, keys and position logits."""
        width = next(width for width in self.of_widths if max(self.d, self.dv) <= width)
        return self.of_widths[width]

    def run(
        self,
        kernel: Any,
        programs: int,
        tile: Tile,
        tensors: dict[str, Tensor | None],
        numbers: dict[str, int] | None = None,
        **constants: Any,
    ) -> None:
        """Launch ``kernel`` with the tensors and numbers of every kernel and its own."""
        tensors = self.tensors | tensors
        vectors = [tensors[name] for name in _VECTORS if name in tensors]
        unit = 16 // self.itemsize
        if any(n % unit for tensor in vectors for n in strides(tensor, 3)):
            unit = 1
        line = _line([tensors.get(name) for name in _LINES], self.S)
        units = dict.fromkeys(_VECTORS, unit) | dict.fromkeys(_LINES, line) | dict.fromkeys(_TAPS, 1)
        steps = {
            f"{name}_{axis}": n // units[name]
            for name in units.keys() & tensors.keys()
            for axis, n in zip("bmt", strides(tensors[name], 3))
        }
        launch(
            kernel, (programs,), tensors | steps | self.numbers | (numbers or {}),
            BLOCK_T=tile.queries, BLOCK_S=tile.keys, UNIT=unit, LINE=line, num_warps=tile.warps, num_stages=tile.stages,
            **self.constants, **constants,
        )  # fmt: skip


def _band_block(step: int) -> int:
    """Return how many keys or queries a loop takes per step where a band touches them, at least 16 for ``tl.dot``."""
    return max(16, step // 2)


def _has_rows(tensor: Tensor) -> bool:
    """Return whether kernels can address ``tensor``, (B, M, rows) or (B, M, rows, width)."""
    together = tensor.dim() == 3 or tensor.shape[3] <= 1 or tensor.stride(3) == 1
    return together and (tensor.shape[2] == 1 or tensor.stride(2) <= LONGEST)


def _with_rows(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy whose last axis is contiguous."""
    return tensor if _has_rows(tensor) else tensor.contiguous()


def _line(matrices: Sequence[Tensor | None], S: int) -> int:
    """Return how many numbers of position logits, or of their gradients, are read at a time: 16 bytes or one."""
    given = [matrix for matrix in matrices if matrix is not None]
    line = min((16 // matrix.element_size() for matrix in given), default=1)
    return 1 if S % line or any(n % line for matrix in given for n in strides(matrix, 3)) else line


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    from . import triton_kernels as kernels

    call = Call(terms, options)
    output, lse = empty_results(terms.value, call.T)
    tile = call.tiles[0]
    if call.T <= SHORT < tile.queries:
        tile = tile._replace(queries=tile.queries // 2, warps=tile.warps // 2)
    if call.S <= SHORT:
        tile = tile._replace(keys=min(tile.keys, SHORT // 2))
    programs = call.B * call.M * -(-call.T // tile.queries)
    call.run(kernels.attend, programs, tile, dict(output=output, lse=lse), BLOCK_BAND=_band_block(tile.keys))
    return output, lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor | None, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    from . import triton_kernels as kernels
    from . import triton_shared

    call = Call(terms, options)
    B, M, T, S = call.B, call.M, call.T, call.S
    grad_output, lse = _with_rows(grad_output), lse.contiguous()
    windows, position_logits = _are_windows(call, terms), terms.position_logits
    summed = position_logits is not None and (windows or position_logits.shape[:3] != (B, M, T))
    grads: Gradients = {}
    for name, term in needed(terms, needs):
        if name in _VECTORS:
            grads[name] = target(term, term.shape, term.dtype, _has_rows)
        elif not (summed and name == "position_logits"):
            grads[name] = target(term, (B, M, T, *term.shape[3:]), torch.float32, _has_rows)
    query, key, value, band, outside, position = map(grads.get, terms._fields)
    if call.d == 0:
        query = key = None
    if windows:
        share = -(-B * M // WINDOW_PROGRAMS)
        parts = -(-B // max(share, 1))
        sums = lse.new_empty((parts, M, T, S)) if needs["position_logits"] else None
        block = power_of_two(max(T, S))
        tile = Tile(block, block, 8, 2 if triton_launch.hopper(terms.value) else 1)  # those that do not spill
        call.run(
            triton_shared.differentiate_windows, parts * M, tile,
            dict(grad_output=grad_output, sums=sums, grad_query=query, grad_key=key, grad_value=value),
            dict(share=share, entries=B),
        )  # fmt: skip
        return like_terms(terms, grads | dict(position_logits=None if sums is None else sums.sum(0, keepdim=True)))
    if output is None:  # another backend was to compute this backward pass
        output, _ = forward(terms, options)
    inverse = None if output.dtype.itemsize == 2 else torch.empty_like(lse)
    tensors = dict(grad_output=grad_output, lse=lse, delta=torch.empty_like(lse), inverse=inverse)
    if band is not None:  # at the ends of a sequence, bands have taps without keys
        band.zero_()
    if position is not None and options.causal:  # what no query of a block sees is left out
        position.zero_()
    tile = call.tiles[1]
    programs = B * M * -(-T // tile.queries)
    targets_of_queries = dict(
        grad_query=query, grad_band_logits=band, grad_outside_logits=outside, grad_position_logits=position
    )
    call.run(
        kernels.differentiate_queries, programs, tile,
        dict(**tensors, attended=_with_rows(output), **targets_of_queries), BLOCK_BAND=_band_block(tile.keys),
    )  # fmt: skip
    if key is not None or value is not None:
        tile = call.tiles[2]
        programs = B * M * -(-S // tile.keys)
        targets_of_keys = dict(grad_key=key, grad_value=value)
        call.run(
            kernels.differentiate_keys, programs, tile, tensors | targets_of_keys, BLOCK_BAND=_band_block(tile.queries)
        )
    if summed and needs["position_logits"]:
        kernel = triton_shared.differentiate_position
        grads["position_logits"] = _sum_position(kernel, call, tensors, position_logits.shape)  # type: ignore[union-attr]
    return like_terms(terms, grads)


def _are_windows(call: Call, terms: Terms) -> bool:
    """Return whether one kernel computes all gradients: sequences fit its tile and share their position logits."""
    position = terms.position_logits
    return (
        call.itemsize == 2
        and not triton_launch.rdna(terms.value)
        and max(call.T, call.S, call.d, call.dv) <= SHORT
        and call.K == 0
        and (position is None or position.shape[0] == 1)
    )


def _sum_position(kernel: Any, call: Call, tensors: dict[str, Tensor | None], shape: Sequence[int]) -> Tensor:
    """Return the gradient of position logits that are broadcast, in float32."""
    B, M, T, S = call.B, call.M, call.T, call.S
    tile = call.tiles[3]
    blocks = -(-T // tile.queries)
    every_query = shape[2] != T
    own = [shape[0] * shape[1], -(-S // tile.keys) * (1 if every_query else blocks)]  # heads, tiles of a head
    steps = [B // shape[0], M // shape[1], blocks if every_query else 1]  # along the axes that are summed
    count = steps[0] * steps[1] * steps[2]
    share = -(-count // min(count, -(-PROGRAMS // (own[0] * own[1]))))
    parts = -(-count // share)
    sums = torch.empty((parts, *shape), dtype=torch.float32, device=call.device)
    numbers = dict(heads=own[0], reduced_b=steps[0], reduced_m=steps[1], reduced_t=steps[2], share=share)
    call.run(kernel, parts * own[0] * own[1], tile, tensors | dict(sums=sums), numbers, EVERY_QUERY=every_query)
    return sums.sum(0)


BACKEND = Backend(triton_launch.NAME, cannot, forward, backward, prefers_not=prefers_not)
