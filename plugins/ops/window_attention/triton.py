"""Window attention in Triton, where no CUDA binary serves; see :mod:`.triton_kernels`.

Any window, stride, dilation and border; products and sums are in float32, in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...core import triton_launch
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed, target
from ...core.strides import has_rows, strides, with_rows
from ...core.triton_launch import launch, power_of_two
from .operands import Options, Terms

WIDEST = 512
_SIZE, _WARPS = 2048, 4  # numbers in a block of queries or keys; not timed


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why the kernels do not compute, or None."""
    query, _, value, _ = terms
    if reason := triton_launch.refusal(value):
        return reason
    width = max(value.shape[4], 0 if query is None else query.shape[4])
    if width > WIDEST:
        return f"its kernels take heads of up to {WIDEST} channels, got {width}"
    if (largest := _largest(terms, options)) >= 2**31:
        return f"its kernels count to 2**31, and an image or the reach of a window has {largest} numbers"
    return None


def _largest(terms: Terms, options: Options) -> int:
    """Return the largest number that kernels count to in 32 bits."""
    (B, M, Hk, Wk, dv), (Hq, Wq) = terms.value.shape, terms.grid()
    (Ky, Kx), jumps, pads, steps, *_ = options
    d = max(dv, 0 if terms.query is None else terms.query.shape[4])
    spans = [
        sum((n - 1) * stride for n, stride in zip(t.shape[2:], t.stride()[2:]))
        for t in terms[:3]
        if t is not None and t.numel()
    ]
    reach = [
        n + k + pad + grid * stride + taps * step
        for n, k, pad, grid, stride, taps, step in zip((Hq, Wq), (Hk, Wk), pads, (Hq, Wq), jumps, (Ky, Kx), steps)
    ]
    return max(*spans, *reach, M * Hq * Wq * max(d, Ky * Kx), M * Hk * Wk * d, B * M * max(Hq * Wq, Hk * Wk))


class _Call:
    """Launches of one call, with the arguments that they share."""

    def __init__(self, terms: Terms, options: Options, **others: Tensor | None):
        query, key, value, position = terms
        (B, M, Hk, Wk, DV), (Hq, Wq) = value.shape, terms.grid()
        if query is not None and not query.shape[4]:  # logits of 0
            query = key = None
        D = 0 if query is None else query.shape[4]
        tensors = dict(query=query, key=key, value=value, **others)
        strided = {name: with_rows(t) for name, t in tensors.items()}
        self.unit = math.gcd(16, *(n for t in strided.values() for n in strides(t)))
        numbers: dict[str, Any] = dict(scale=options.scale, M=M, Hq=Hq, Wq=Wq, Hk=Hk, Wk=Wk)
        names = ("taps_y", "taps_x", "stride_y", "stride_x", "pad_y", "pad_x", "step_y", "step_x")
        numbers |= zip(names, options.numbers())
        for name, tensor in strided.items():
            numbers |= {f"{name}_{axis}": n // self.unit for axis, n in zip("bmhw", strides(tensor))}
        position = None if position is None else position.contiguous()
        numbers |= zip(("position_logits_b", "position_logits_m"), strides(position))
        self.arguments = strided | numbers | dict(position_logits=position)
        wide, wide_v = power_of_two(D, 4), power_of_two(DV, 4)
        self.block, self.images = min(_SIZE // max(wide, wide_v), 64), B * M
        self.constants = dict(
            D=D, DV=DV, WIDE_D=wide, WIDE_DV=wide_v, UNIT=self.unit, EXCLUDE=options.border == "exclude",
            INSIDE=options.border == "inside", BLOCK=self.block, num_warps=_WARPS,
        )  # fmt: skip

    def launch(self, kernel: Any, size: int, **tensors: Tensor | None) -> None:
        """Launch ``kernel`` over ``size`` queries or keys of each head."""
        grid = (self.images * -(-size // self.block),)
        launch(kernel, grid, self.arguments | tensors, **self.constants)


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    from . import triton_kernels as kernels

    Hq, Wq = terms.grid()
    output, lse = empty_results(terms.value, Hq, Wq)
    _Call(terms, options, output=output).launch(kernels.attend, Hq * Wq, lse=lse)
    return output, lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    from . import triton_kernels as kernels

    B, M, Hq, Wq = lse.shape
    Hk, Wk = terms.value.shape[2:4]
    grads: Gradients = {}
    for name, term in needed(terms, needs):
        if name == "position_logits":
            grads[name] = target(term, (B, M, *term.shape[2:]), torch.float32, Tensor.is_contiguous)
        else:
            grads[name] = target(term, term.shape, term.dtype, has_rows)
    query, key, value, position = (
        grad if grad is None or grad.numel() else None for grad in map(grads.get, terms._fields)
    )
    call = _Call(terms, options, grad_output=grad_output, grad_query=query, grad_key=key, grad_value=value)
    lse = lse.contiguous()
    sums = dict(lse=lse, delta=torch.empty_like(lse))
    if query is not None or key is not None or position is not None:
        call.launch(kernels.gradients_of_queries, Hq * Wq, **sums, grad_position_logits=position)
    if key is not None or value is not None:
        call.launch(kernels.gradients_of_keys, Hk * Wk, **sums)
    return like_terms(terms, grads)


BACKEND = Backend(triton_launch.NAME, cannot, forward, backward, prefers_not=triton_launch.prefers_not)
