"""Backends of deformable attention: kernels (``csrc/sampled/cpu_attention.cpp``, ``cuda_attention.cuh``) or PyTorch.

The kernels compute in float32, or in float64 for float64 values, and never store the samples. On CPUs, half precision
is copied to float32, and threads that read the values of a head often pack them first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import library
from ..arguments import arithmetic_dtype
from ..backends import Backend, never
from ..gradients import autograd_within_operator
from . import attention_reference
from .attention_operands import Options, Terms

_MOST_LEVELS = 16  # limit of the CUDA kernels, as in cuda_attention.cuh


def refuses_cpu(terms: Terms, options: Options) -> str | None:
    return library.refusal(terms.value.device, "cpu")


def refuses_cuda(terms: Terms, options: Options) -> str | None:
    if reason := library.refusal(terms.value.device, "cuda"):
        return reason
    levels = len(options.points)
    return f"it takes at most {_MOST_LEVELS} levels, got {levels}" if levels > _MOST_LEVELS else None


def refuses_cuda_backward(terms: Terms, options: Options) -> str | None:
    """Refuse deterministic mode: the kernel adds with atomics, but the reference's index_add can be deterministic."""
    return "its backward is not deterministic" if torch.are_deterministic_algorithms_enabled() else None


def _beside(terms: Terms, dtype: torch.dtype) -> list[Tensor]:
    return [terms.locations.to(dtype).contiguous(), terms.weights.to(dtype).contiguous()]


def _cpu_operands(terms: Terms) -> list[Tensor]:
    dtype = arithmetic_dtype(terms.value.dtype)
    value = terms.value.to(dtype)
    return [value if value.stride(3) == 1 else value.contiguous(), *_beside(terms, dtype)]


def _cpu_forward(terms: Terms, options: Options, output: Tensor) -> None:
    operands = _cpu_operands(terms)
    target = output if output.dtype == operands[0].dtype else torch.empty_like(output, dtype=operands[0].dtype)
    torch.ops.attn_plugins.deformable_attention_forward_(*operands, target, *options)
    if target is not output:
        output.copy_(target)


def _cpu_backward(grad_output: Tensor, terms: Terms, options: Options, grads: Sequence[Tensor | None]) -> None:
    operands = _cpu_operands(terms)
    dtype = operands[0].dtype
    written = [g if g is None or g.dtype == dtype else torch.empty_like(g, dtype=dtype) for g in grads]
    torch.ops.attn_plugins.deformable_attention_backward_(
        grad_output.to(dtype).contiguous(), *operands, *written, *options
    )
    _copy(written, grads)


def _cuda_forward(terms: Terms, options: Options, output: Tensor) -> None:
    beside = _beside(terms, arithmetic_dtype(terms.value.dtype))
    torch.ops.attn_plugins.deformable_attention_forward_(terms.value.contiguous(), *beside, output, *options)


def _cuda_backward(grad_output: Tensor, terms: Terms, options: Options, grads: Sequence[Tensor | None]) -> None:
    dtype = arithmetic_dtype(terms.value.dtype)
    written = [g if g is None or g.dtype == dtype else torch.empty_like(g, dtype=dtype) for g in grads]
    if written[0] is not None:
        written[0].zero_()
    torch.ops.attn_plugins.deformable_attention_backward_(
        grad_output.contiguous(), terms.value.contiguous(), *_beside(terms, dtype), *written, *options
    )
    _copy(written, grads)


def _copy(written: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> None:
    """Copy gradients that were computed in another dtype to their results."""
    for grad, result in zip(grads, written):
        if grad is not None and result is not None and result is not grad:
            grad.copy_(result)


def _torch_backward(grad_output: Tensor, terms: Terms, options: Options, needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the definition, one image at a time, since it stores all samples of its input."""
    parts = []
    for n in range(len(terms.value)):
        one = Terms(*(t[n : n + 1].detach().requires_grad_(need) for t, need in zip(terms, needs)))
        with autograd_within_operator():
            output = attention_reference.deformable_attention(one, options)
            gradients = iter(
                torch.autograd.grad(output, [t for t, need in zip(one, needs) if need], grad_output[n : n + 1])
            )
        parts.append([next(gradients) if need else None for need in needs])
    return [torch.cat(images) if need else None for need, images in zip(needs, zip(*parts))]


CPU = Backend("cpu", refuses_cpu, _cpu_forward, _cpu_backward)
CUDA = Backend("cuda", refuses_cuda, _cuda_forward, _cuda_backward, refuses_cuda_backward)
TORCH = Backend("torch", never, attention_reference.deformable_attention, _torch_backward, allocates=True)
