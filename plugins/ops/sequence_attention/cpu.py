"""Call the CPU kernels of sequence attention (``csrc/sequence_attention/cpu.cpp``).

The kernels compute in float32 and read and write bfloat16 if :func:`_stored` allows; other half precision is converted
here. Shapes are those of ``eager``, with an axis of slots after (B, M): a slot is a share of a head's
queries that is summed separately.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import library
from ..common.backends import Backend, Gradients
from .operands import Options, Terms

_CONTENT, _LOGITS = Terms._fields[:3], Terms._fields[3:]
_TASKS = 16  # minimum number of independent sums over queries, which threads share
_BLOCK = 48  # queries in a block; a task takes at least one block
_FEW = 4  # up to so many queries, packing the keys does not pay


def _slots(B: int, M: int, T: int) -> int:
    """Return the number of slots per head; it, and so the sums, do not depend on the number of threads."""
    return max(1, min(-(-_TASKS // max(1, B * M)), -(-T // _BLOCK)))


def _shares(B: int, M: int, T: int) -> tuple[int, int]:
    """Return the numbers of slots per head and of groups of images, each group with sums of its own.

    A sum holds gradients of (M, T, S) logits. Long sequences are split into slots, each of which holds part of them;
    short ones into groups, since every slot packs all keys.
    """
    slots = max(1, min(-(-_TASKS // max(1, M)), T // (4 * _BLOCK)))
    return slots, max(1, min(B, -(-_TASKS // max(1, M * slots))))


def _stored(value: Tensor, lse: Tensor) -> torch.dtype:
    """Return the dtype of the kernels' operands; the kernel for few queries reads unpacked keys, only in float32."""
    return value.dtype if value.dtype == torch.bfloat16 and lse.shape[2] > _FEW else lse.dtype


def _inputs(terms: Terms, options: Options, lse: Tensor) -> list[Tensor | None]:
    B, M, T = lse.shape
    stored = _stored(terms.value, lse)
    query, key, value, *logits = [t if t is None or t.dtype == stored else t.to(stored) for t in terms]
    whole = (B, M, T)
    expanded = [t if t is None or t.shape[:3] == whole else t.expand(*whole, *t.shape[3:]) for t in logits]
    slotted = [None if t is None else t.unsqueeze(2) for t in (query, key, value, *expanded)]
    masks = options.key_padding_mask, options.segment_ids
    return [*slotted, *[None if t is None else t.contiguous() for t in masks]]


def forward(terms: Terms, options: Options, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    stored = _stored(terms.value, lse)
    target = output if output.dtype == stored else torch.empty_like(output, dtype=stored)
    torch.ops.attn_plugins.sequence_attention_forward_(
        *_inputs(terms, options, lse),
        target.unsqueeze(2),
        lse.unsqueeze(2),
        options.start,
        options.causal,
        options.scale,
        _slots(*lse.shape),
    )
    if target is not output:
        output.copy_(target)


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor | None, lse: Tensor, grads: Gradients
) -> Gradients:
    """Fill or return the gradients that are not None."""
    B, M, T = lse.shape
    dtype, stored = lse.dtype, _stored(terms.value, lse)
    slots, groups = _slots(B, M, T), B
    if B > 1 and any(g is not None and g.shape[0] == 1 for name, g in grads.items() if name in _LOGITS):
        slots, groups = _shares(B, M, T)

    def per_slot(grad: Tensor | None) -> Tensor | None:
        """Return the tensor for sums over a slot's queries, (B, M, slots, S, width)."""
        if grad is None:
            return None
        if slots == 1 and grad.dtype == stored:
            return grad.unsqueeze(2)
        return grad.new_empty((B, M, slots, *grad.shape[2:]), dtype=dtype)

    def logits(grad: Tensor | None) -> Tensor | None:
        """Return the tensor that the kernel adds to, (B or groups, M, slots or 1, T or 1, ...)."""
        if grad is None:
            return None
        if grad.shape[:3] == (B, M, T) and grad.dtype == stored and grad.stride(-1) == 1:
            return grad.zero_().unsqueeze(2)
        shared = grad.shape[2] == 1 and T > 1
        batch = groups if grad.shape[0] == 1 else B
        return grad.new_zeros((batch, M, slots if shared else 1, *grad.shape[2:]), dtype=dtype)

    query = grads["query"]
    if query is not None:
        query = (query if query.dtype == stored else torch.empty_like(query, dtype=stored)).unsqueeze(2)
    written = [query, *(per_slot(grads[name]) for name in _CONTENT[1:])]
    written += [logits(grads[name]) for name in _LOGITS]
    torch.ops.attn_plugins.sequence_attention_backward_(
        grad_output.to(stored).unsqueeze(2),
        *_inputs(terms, options, lse),
        lse.unsqueeze(2),
        *written[:3],
        *(None if t is None else t.expand(-1, -1, slots, T, *t.shape[4:]) for t in written[3:]),
        options.start,
        options.causal,
        options.scale,
        slots,
        groups,
    )
    summed: Gradients = {}
    for (name, grad), sums in zip(grads.items(), written):
        if grad is not None and sums is not None and sums.data_ptr() != grad.data_ptr():
            summed[name] = sums.sum(2)
    return summed


BACKEND = Backend("cpu", library.refuses_other_devices, forward, backward)
