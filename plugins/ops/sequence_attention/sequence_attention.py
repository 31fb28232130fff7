"""Region "everywhere" of a sequence: attention over all keys, with a band of position logits around each query.

Transformer-XL's relative positions, bilateral self-attention and cross-attention use this operator with different
logits. In the forward and the backward, the logits of only one block of queries are in memory at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core import triton_launch
from ...core.arguments import (
    LARGEST,
    as_number,
    broadcasts,
    check_dim,
    check_padding_mask,
    check_tensors,
    finite,
    is_size,
)
from ...core.attention import check_query_and_key, counts_of_products, empty_results
from ...core.axes import unfold
from ...core.backends import closed_form, forced
from ...core.operator import Operator
from ..window_attention.window_attention import window_attention
from . import cpu, eager, reference, sdpa, triton
from .eager import band_reach
from .operands import Options, Terms


def sequence_attention(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    *,
    band_logits: Tensor | None = None,
    outside_logits: Tensor | float | None = None,
    position_logits: Tensor | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float = 1.0,
    start: int | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Attend from every query of a sequence to all keys of a sequence (Zhu et al. 2019, Eq. 1; Thesis, Eq. 3.12).

    Query t has position p = start + t among the keys. The weight of key s is the softmax over all keys of

        scale * query[t]·key[s] + position_logits[t, s] + (band_logits[t, s - p + left] or outside_logits[t])

    where absent terms count as 0: keys at offsets s - p within the band have a band logit, all others the outside
    logit. A logit of -inf masks its key. Fully masked queries return zeros.

    No (T, S) mask or bias is allocated, except for second derivatives, which hold all logits. If the outside logit is
    the number -inf, keys outside the band are masked and, where that is faster, not computed.

    Args:
        query: (B, M, T, d); None, together with ``key``, for position logits alone.
        key: (B, M, S, d).
        value: (B, M, S, dv).
        band_logits: (B, M, T, K), or size 1 in any of the first three axes to broadcast: logits at the offsets
            -(K - 1) / 2 ... (K - 1) / 2 in ascending order, for odd K; with ``causal`` at -(K - 1) ... 0, for any K.
        outside_logits: (B, M, T), size 1 likewise, or a number; None for 0.
        position_logits: (B, M, T, S), or size 1 in any of the first three axes to broadcast.
        causal: Whether to mask keys after the query's position.
        key_padding_mask: (B, S) bool, True at keys to mask.
        scale: Factor of the content term.
        start: Position of the first query among the keys, at least 0. None means S - T with ``causal`` (the queries
            are the last T of S positions, as in incremental decoding), else 0.
        segment_ids: (n, S) int32, where n divides B: the segment of each key; batch entry b has those of row b % n. A
            query, whose position must be below S, attends only to the keys of the segment at its position. This
            serves several sequences packed into one, and shifted windows.

    Returns:
        (B, M, T, dv). T is 1 if it is in all arguments that have it. On CUDA, and in bfloat16 on CPUs with AMX, it must
        not be modified in place if gradients are wanted.

    Raises:
        ValueError: A shape, a device or a number does not match, or there is no key.
        TypeError: The tensors are not floating-point or do not share one dtype.
    """
    given = as_number(outside_logits)
    is_number = isinstance(given, (int, float, torch.SymFloat))
    number, outside = (given, None) if is_number else (None, given)
    terms = Terms(query, key, value, band_logits, outside, position_logits)
    _check(terms, number, key_padding_mask, causal)
    scale = finite("scale", scale)
    start = _start(start, terms, causal)
    if segment_ids is not None:
        _check_segments(segment_ids, terms, start)
    limited = number == float("-inf") and position_logits is None and segment_ids is None
    if limited and band_logits is not None and forced() is None and _window_pays(value, band_logits.shape[3], start):
        return _attend_in_range(query, key, value, band_logits, key_padding_mask, start, causal, scale, terms.queries())
    if number:
        terms = Terms(query, key, value, band_logits, value.new_full((1, 1, 1), number), position_logits)
    return ATTEND(terms, Options(key_padding_mask, start, causal, scale, segment_ids))


def _window_pays(value: Tensor, K: int, start: int) -> bool:
    """Return whether a band of K keys is computed faster as windows.

    On the CPU this holds up to a quarter of the keys: forward and backward take 40 instead of 119 ms for 31 of 1024
    keys, but 42 instead of 34 ms for 129 of 512. A symbolic ``start`` cannot be a window's padding, and a symbolic
    number of keys is not compared.
    """
    S = value.shape[2]
    return isinstance(start, int) and (value.is_cuda or not isinstance(S, int) or 4 * K <= S)


def _attend_in_range(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor,
    band_logits: Tensor,
    key_padding_mask: Tensor | None,
    start: int,
    causal: bool,
    scale: float,
    T: int,
) -> Tensor:
    """Attend to the keys inside the band alone, as windows."""
    B, M, S, dv = value.shape
    K = int(band_logits.shape[3])  # a tensor while traced
    first = start - band_reach(K, causal)[0]  # the key of the first query's first tap
    drop, padding = max(0, first), max(0, -first)
    if drop >= S and closed_form():  # all windows lie behind the last key
        outputs = value.new_zeros(B, M, T, dv)
        terms = [t for t in (query, key, value, band_logits) if t is not None and t.requires_grad]
        return outputs + sum(t.flatten()[:0].sum() for t in terms) if terms else outputs  # gradients are 0
    band = band_logits.expand(-1, -1, T, -1)
    if key_padding_mask is not None:
        behind = max(0, max(T, 1) + K - 1 - padding - (S - drop))
        taps = unfold(pad(key_padding_mask[:, drop:], (padding, behind), value=True), 1, K)[:, :T]
        band = band.masked_fill(taps.unsqueeze(1), float("-inf"))
    if key is not None:
        key = key[:, :, drop:]
    return window_attention(query, key, value[:, :, drop:], band, K, padding=padding, scale=scale)


def _leader(terms: Terms) -> str:
    """Return the name of the argument that determines the number of queries."""
    T = terms.queries()
    names = ("query", "band_logits", "outside_logits", "position_logits")
    tensors = (terms.query, *terms[3:])
    return next((name for name, t in zip(names, tensors) if t is not None and t.shape[2] == T), "query")


def _start(start: int | None, terms: Terms, causal: bool) -> int:
    if start is None:
        if not causal:
            return 0
        T, S = terms.queries(), terms.value.shape[2]
        if T > S:
            raise ValueError(
                f"causal attention takes the {T} queries of {_leader(terms)} as the last positions of value, which has "
                f"only {S} keys; pass start, the position of the first query"
            )
        return S - T
    if not is_size(start):
        raise TypeError(f"start must be an int or None, got {type(start).__name__}")
    if start < 0 or start > LARGEST:
        raise ValueError(f"start must be at least 0 and below 2**31, got {start}")
    return start


def _check(terms: Terms, number: float | None, key_padding_mask: Tensor | None, causal: bool) -> None:
    query, key, value, band_logits, outside_logits, position_logits = terms
    check_tensors("value", **terms._asdict())
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    check_dim("value", value, "(B, M, S, dv)")
    B, M, S, _ = value.shape
    if S == 0:
        raise ValueError(f"value must have at least one key, got shape {tuple(value.shape)}")
    check_query_and_key(query, key, value, "(B, M, T, d)")
    if query is None and band_logits is None and position_logits is None:
        raise ValueError("query and key, band_logits or position_logits must be given")
    if band_logits is None and (outside_logits is not None or number is not None):
        raise ValueError("outside_logits needs band_logits: without a band no key is outside it")
    if number is not None and not number < float("inf"):
        raise ValueError(f"outside_logits must be finite or -inf, got {number}")
    names = ("band_logits", "outside_logits", "position_logits")
    for name, logits, axes in zip(names, terms[3:], ("(B, M, T, K)", "(B, M, T)", "(B, M, T, S)")):
        if logits is not None:
            check_dim(name, logits, axes)
    T = terms.queries()
    for name, logits in zip(names, terms[3:]):
        if logits is None:
            continue
        shape = (B, M, T, S) if name == "position_logits" else (B, M, T, *logits.shape[3:])
        if not broadcasts(logits, shape, 3):
            keys = ", keys" if name == "position_logits" else ""
            raise ValueError(
                f"{name} must have shape {shape}, batch{keys} and heads of value and queries of {_leader(terms)}, or "
                f"size 1 in any of the first three axes, got {tuple(logits.shape)}"
            )
    if band_logits is not None:
        K = band_logits.shape[3]
        if K == 0 or (not causal and K % 2 == 0):  # causal first: a symbolic K gets no guard on its parity
            raise ValueError(
                f"band_logits must have at least one tap, and an odd number of them unless causal, got {K} "
                f"in shape {tuple(band_logits.shape)}"
            )
    check_padding_mask(key_padding_mask, B, S, value.device, "keys of value")


def _check_segments(segment_ids: Tensor, terms: Terms, start: int) -> None:
    B, _, S, _ = terms.value.shape
    if not isinstance(segment_ids, Tensor) or segment_ids.dtype != torch.int32:
        kind = getattr(segment_ids, "dtype", type(segment_ids).__name__)
        raise TypeError(f"segment_ids must be an int32 Tensor, got {kind}")
    n = segment_ids.shape[0] if segment_ids.dim() == 2 and segment_ids.shape[1] == S else None
    if n is None or (n != B and (n == 0 or B % n)):
        raise ValueError(
            f"segment_ids must have shape (n, {S}), keys of value, where n divides the batch of {B}, "
            f"got {tuple(segment_ids.shape)}"
        )
    if segment_ids.device != terms.value.device:
        raise ValueError(f"segment_ids must be on value's device {terms.value.device}, got {segment_ids.device}")
    T = terms.queries()
    if start + T > S:
        raise ValueError(
            f"segment_ids needs every query to have the position of a key: the {T} queries of {_leader(terms)} from "
            f"position {start} on go beyond the {S} keys of value"
        )


# --- the operator -------------------------------------------------------------------------------------------------


def _needs_output(terms: Terms, options: Options) -> bool:
    """Return whether the backward reads the output, for its product with the gradient; our CPU kernels recompute it."""
    name = forced()
    if terms.value.device.type != "cpu" or name == triton_launch.NAME:
        return True
    return sdpa.BACKEND.refusal(terms, options, backward=True, forced=name == sdpa.BACKEND.name) is None


def _products(terms: Any, options: Options) -> tuple[int, int]:
    """Count the operations of one content and of one value product, including masked keys, as torch's formulas do."""
    query, _, (B, M, S, dv), *logits = terms
    T = query[2] if query is not None else max(shape[2] for shape in logits if shape is not None)
    pairs = 2 * B * M * T * S
    return (0 if query is None else pairs * query[3]), pairs * dv


ATTEND = Operator(
    "sequence_attention",
    Terms,
    Options,
    ("output", "log_sum_exp"),
    needs_output=_needs_output,
    fake=lambda terms, options: empty_results(terms.value, terms.queries()),
    reference=lambda terms, options: reference.sequence_attention(*terms, *options),
    table=[sdpa.BACKEND, cpu.BACKEND, triton.BACKEND, eager.BACKEND],
    **counts_of_products(_products),
)
