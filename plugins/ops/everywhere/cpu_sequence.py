"""Hands sequence attention to the CPU kernels (``csrc/everywhere/cpu_sequence.cpp``).

Half precision is computed in float32. Shapes as in ``chunked_sequence``; the kernels want an axis of slots after
(B, M): a slot is a share of a head's queries, whose sums over queries are its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import library
from ..backends import Backend
from .operands import SequenceOptions, SequenceTerms

_TASKS = 16  # at least so many independent sums over queries, for threads to share
_BLOCK = 48  # queries, of which a task takes at least one block


def _slots(B: int, M: int, T: int) -> int:
    """Shares per head. (They do not depend on the number of threads, so neither do the sums.)"""
    return max(1, min(-(-_TASKS // max(1, B * M)), -(-T // _BLOCK)))


def _inputs(terms: SequenceTerms, key_padding_mask: Tensor | None, lse: Tensor) -> list[Tensor | None]:
    B, M, T = lse.shape
    query, key, value, *logits = (None if t is None else t.to(lse.dtype) for t in terms)
    expanded = [None if t is None else t.expand(B, M, T, *t.shape[3:]) for t in logits]
    found = [None if t is None else t.unsqueeze(2) for t in (query, key, value, *expanded)]
    return [*found, None if key_padding_mask is None else key_padding_mask.contiguous()]


def refuses(terms: SequenceTerms, options: SequenceOptions) -> str | None:
    return library.refusal(terms.value.device.type, "cpu")


def forward(terms: SequenceTerms, options: SequenceOptions, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    target = output if output.dtype == lse.dtype else torch.empty_like(output, dtype=lse.dtype)
    torch.ops.attn_plugins.sequence_attention_forward_(
        *_inputs(terms, options.key_padding_mask, lse),
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
    grad_output: Tensor, terms: SequenceTerms, options: SequenceOptions, lse: Tensor, grads: list[Tensor | None]
) -> None:
    """Fill the wanted gradients (those not None), in the order of :class:`.SequenceTerms`."""
    B, M, T = lse.shape
    position = grads[5]
    if position is not None and position.shape[0] == 1 and B > 1 and T > 1:
        _backward_by_batch(grad_output, terms, options, lse, grads)
        return
    slots, dtype = _slots(B, M, T), lse.dtype

    def per_slot(grad: Tensor | None) -> Tensor | None:
        """Where the kernel writes sums over a slot's queries, (B, M, slots, S, width)."""
        if grad is None:
            return None
        if slots == 1 and grad.dtype == dtype:
            return grad.unsqueeze(2)
        return grad.new_empty((B, M, slots, *grad.shape[2:]), dtype=dtype)

    def logits(grad: Tensor | None) -> Tensor | None:
        """Where the kernel adds, (B, M, slots or 1, T or 1, ...)."""
        if grad is None:
            return None
        if grad.shape[:3] == (B, M, T) and grad.dtype == dtype and grad.stride(-1) == 1:
            return grad.zero_().unsqueeze(2)
        shared = grad.shape[2] == 1 and T > 1
        return grad.new_zeros((B, M, slots if shared else 1, *grad.shape[2:]), dtype=dtype)

    query = None
    if grads[0] is not None:
        query = grads[0] if grads[0].dtype == dtype else torch.empty_like(grads[0], dtype=dtype)
    written = [
        None if query is None else query.unsqueeze(2),
        *(per_slot(g) for g in grads[1:3]),
        *(logits(g) for g in grads[3:]),
    ]
    torch.ops.attn_plugins.sequence_attention_backward_(
        grad_output.to(dtype).unsqueeze(2),
        *_inputs(terms, options.key_padding_mask, lse),
        lse.unsqueeze(2),
        *written[:3],
        *(None if t is None else t.expand(B, M, slots, T, *t.shape[4:]) for t in written[3:]),
        options.start,
        options.causal,
        options.scale,
        slots,
    )
    for grad, result in zip(grads, written):
        if grad is not None and result is not None and result.data_ptr() != grad.data_ptr():
            grad.copy_(result.sum(2).sum_to_size(grad.shape))


def _backward_by_batch(
    grad_output: Tensor, terms: SequenceTerms, options: SequenceOptions, lse: Tensor, grads: list[Tensor | None]
) -> None:
    """:func:`backward` where the batch shares position logits: their gradients (T, S) are never held for all of it."""
    B, mask = lse.shape[0], options.key_padding_mask
    sums = [g if g is None or g.shape[0] == B else torch.zeros_like(g, dtype=lse.dtype) for g in grads]
    for b in range(B):
        one = slice(b, b + 1)
        parts = [None if g is None else g[one] if g.shape[0] == B else torch.empty_like(g) for g in sums]
        backward(
            grad_output[one],
            SequenceTerms(*(t if t is None or t.shape[0] == 1 else t[one] for t in terms)),  # type: ignore[arg-type]
            options if mask is None else options._replace(key_padding_mask=mask[one]),
            lse[one],
            parts,
        )
        for total, part in zip(sums, parts):
            if total is not None and part is not None and total.shape[0] == 1:
                total += part
    for grad, total in zip(grads, sums):
        if grad is not None and total is not None and grad is not total:
            grad.copy_(total)


BACKEND = Backend("cpu", refuses, forward, backward)
