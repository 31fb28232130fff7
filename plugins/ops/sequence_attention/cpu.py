"""Call the CPU kernels of sequence attention (``csrc/sequence_attention/cpu.cpp``).

The kernels compute in float32 and read and write bfloat16 if :func:`_stored` allows; other half precision is converted
here. Shapes are those of ``eager``, with an axis of slots after (B, M): a slot is a share of a head's
queries that is summed separately.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import library
from ...core.arguments import arithmetic_dtype
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms, needed
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


def _stored(dtype: torch.dtype, T: int) -> torch.dtype:
    """Return the dtype of the kernels' operands; the kernel for few queries reads unpacked keys, only in float32."""
    return dtype if dtype == torch.bfloat16 and T > _FEW else arithmetic_dtype(dtype)


def _inputs(terms: Terms, options: Options, lse: Tensor) -> list[Tensor | None]:
    B, M, T = lse.shape
    stored = _stored(terms.value.dtype, T)
    query, key, value, *logits = [t if t is None or t.dtype == stored else t.to(stored) for t in terms]
    whole = (B, M, T)
    expanded = [t if t is None or t.shape[:3] == whole else t.expand(*whole, *t.shape[3:]) for t in logits]
    slotted = [None if t is None else t.unsqueeze(2) for t in (query, key, value, *expanded)]
    masks = options.key_padding_mask, options.segment_ids
    return [*slotted, *[None if t is None else t.contiguous() for t in masks]]


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, T, dv) and the log-sum-exp (B, M, T), +inf where all keys are masked."""
    T, dtype = terms.queries(), terms.value.dtype
    stored = _stored(dtype, T)
    output, lse = empty_results(terms.value, T, dtype=stored)
    torch.ops.attn_plugins.sequence_attention_forward_(
        *_inputs(terms, options, lse),
        output.unsqueeze(2),
        lse.unsqueeze(2),
        options.start,
        options.causal,
        options.scale,
        _slots(*lse.shape),
    )
    return output if stored == dtype else output.to(dtype), lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor | None, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed."""
    B, M, T = lse.shape
    dtype, stored = lse.dtype, _stored(terms.value.dtype, T)
    wanted = dict(needed(terms, needs))
    slots, groups = _slots(B, M, T), B
    if B > 1 and any(term.shape[0] == 1 for name, term in wanted.items() if name in _LOGITS):
        slots, groups = _shares(B, M, T)

    def query(term: Tensor) -> Tensor:
        return torch.empty_like(term, dtype=stored)

    def per_slot(term: Tensor) -> Tensor:
        """Return the tensor for sums over a slot's queries, (B, M, slots, S, width), or without slots for one."""
        if slots == 1 and term.dtype == stored:
            return torch.empty_like(term)
        return term.new_empty((B, M, slots, *term.shape[2:]), dtype=dtype)

    def logits(term: Tensor) -> Tensor:
        """Return the tensor that the kernel adds to, (B or groups, M, slots or 1, T or 1, ...), or without slots."""
        if term.shape[:3] == lse.shape and term.dtype == stored:
            grad = torch.zeros_like(term)
            if grad.stride(-1) == 1:
                return grad
        shared = term.shape[2] == 1 and T > 1
        batch = groups if term.shape[0] == 1 else B
        return term.new_zeros((batch, M, slots if shared else 1, *term.shape[2:]), dtype=dtype)

    makers = dict(query=query, key=per_slot, value=per_slot, **dict.fromkeys(_LOGITS, logits))
    sums = {name: makers[name](term) for name, term in wanted.items()}
    slotted = {name: t if t.dim() > wanted[name].dim() else t.unsqueeze(2) for name, t in sums.items()}
    torch.ops.attn_plugins.sequence_attention_backward_(
        grad_output.to(stored).unsqueeze(2),
        *_inputs(terms, options, lse),
        lse.unsqueeze(2),
        *map(slotted.get, _CONTENT),
        *(None if t is None else t.expand(-1, -1, slots, T, *t.shape[4:]) for t in map(slotted.get, _LOGITS)),
        options.start,
        options.causal,
        options.scale,
        slots,
        groups,
    )
    return like_terms(terms, {name: t if t.dim() == wanted[name].dim() else t.sum(2) for name, t in sums.items()})


BACKEND = Backend("cpu", library.refuses_other_devices, forward, backward)
