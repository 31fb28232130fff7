"""Region "everywhere" of a sequence: attention over all keys, with a band of position logits around each query.

Transformer-XL's relative positions, bilateral self-attention and cross-attention are this operator with other logits.
Whatever the arguments, no more than a block of queries has its logits written out, forward or backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import library
from ..arguments import arithmetic_dtype, check_dim, check_tensors
from ..operator import by_reference, define, differentiate_twice, under_autocast
from ..window.window_attention import window_attention
from . import chunked_sequence as chunked
from . import cpu_sequence as cpu
from . import reference
from .chunked_sequence import band_reach
from .operands import SequenceTerms


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
) -> Tensor:
    """Attend from every query of a sequence to all keys of a sequence (Zhu et al. 2019, Eq. 1; Thesis, Eq. 3.12).

    Query t stands at the keys' position p = start + t. The weight of key s is the softmax over all keys of

        scale * query[t]·key[s] + position_logits[t, s] + (band_logits[t, s - p + left] or outside_logits[t])

    with absent terms 0: a key whose offset s - p the band holds has its band logit, any other the outside logit.
    With ``causal`` keys after p have no weight. A logit of -inf masks; a query whose keys are all masked gets zeros.
    Neither mask nor bias of (T, S) is made; second derivatives hold all logits. An outside logit of -inf limits the
    range: then only the band's keys are computed.

    Args:
        query: (B, M, T, d); None, together with ``key``, for position logits alone.
        key: (B, M, S, d).
        value: (B, M, S, dv).
        band_logits: (B, M, T, K), of size 1 where it does not depend on batch, head or query; of the offsets
            -(K - 1) / 2 ... (K - 1) / 2 in rising order, K odd, or with ``causal`` -(K - 1) ... 0, any K.
        outside_logits: (B, M, T), of size 1 likewise, or a number; 0 where None.
        position_logits: (B, M, T, S), of size 1 in any of the first three axes.
        causal: Whether keys after a query's position are left out.
        key_padding_mask: (B, S) bool, True for keys to be left out.
        scale: Factor of the content term.
        start: The first query's position among the keys, at least 0. None stands for S - T with ``causal`` (the
            queries are the last T of S positions, as in incremental decoding), else for 0.

    Returns:
        (B, M, T, dv). T is the queries' number in those arguments that have it, or 1.

    Raises:
        ValueError: a shape, a device or a number does not fit, or there is no key.
        TypeError: the tensors are not floating or not of one dtype.
    """
    number = outside_logits if isinstance(outside_logits, (int, float)) else None
    outside = None if isinstance(outside_logits, (int, float)) else outside_logits
    terms = SequenceTerms(query, key, value, band_logits, outside, position_logits)
    _check(terms, number, key_padding_mask, causal)
    T, S = _queries(terms), value.shape[2]
    start = _start(start, T, S, causal)
    limited = number == float("-inf") and position_logits is None
    if limited and band_logits is not None and _window_pays(value, band_logits.shape[3], start):
        return _attend_in_range(query, key, value, band_logits, key_padding_mask, start, causal, scale, T)
    if number:
        terms = SequenceTerms(query, key, value, band_logits, value.new_full((1, 1, 1), number), position_logits)
    return under_autocast(
        lambda *cast: _attend(SequenceTerms(*cast), key_padding_mask, start, causal, float(scale)),
        terms,
        value.device.type,
    )


def _attend(terms: SequenceTerms, key_padding_mask: Tensor | None, start: int, causal: bool, scale: float) -> Tensor:
    if by_reference():
        return reference.sequence_attention(*terms, key_padding_mask, start, causal, scale)
    return torch.ops.attn_plugins.sequence_attention(*terms, key_padding_mask, start, causal, scale)[0]


def _window_pays(value: Tensor, K: int, start: int) -> bool:
    """Whether a band of K keys is computed faster as windows.

    (On the CPU up to a quarter of the keys: 40 against 119 ms for 31 of 1024 keys, forward and backward, 42 against
    34 ms for 129 of 512. Symbols are not compared, and are no padding of a window.)
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
    """Nothing outside the band has weight: the region is a window."""
    B, M, S, dv = value.shape
    K = band_logits.shape[3]
    first = start - band_reach(K, causal)[0]  # the key of the first query's first tap
    drop, padding = max(0, first), max(0, -first)
    if drop >= S:  # the queries are far behind all keys
        return value.new_zeros(B, M, T, dv)
    band = band_logits.expand(-1, -1, T, -1)
    if key_padding_mask is not None:
        behind = max(0, T + K - 1 - padding - (S - drop))
        taps = pad(key_padding_mask[:, drop:], (padding, behind), value=True).unfold(1, K, 1)[:, :T]
        band = band.masked_fill(taps.unsqueeze(1), float("-inf"))
    if key is not None:
        key = key[:, :, drop:]
    return window_attention(query, key, value[:, :, drop:], band, K, padding=padding, scale=scale)


def _start(start: int | None, T: int, S: int, causal: bool) -> int:
    if start is None:
        if not causal:
            return 0
        if T > S:
            raise ValueError(
                f"causal attention takes the {T} queries for the last of the {S} keys, which are too few; "
                f"start says where the queries stand"
            )
        return S - T
    if start < 0:
        raise ValueError(f"start must be at least 0, got {start}")
    return start


def _check(terms: SequenceTerms, number: float | None, key_padding_mask: Tensor | None, causal: bool) -> None:
    query, key, value, band_logits, outside_logits, position_logits = terms
    check_tensors("value", value=value, **{n: t for n, t in zip(SequenceTerms._fields, terms) if n != "value"})
    check_dim("value", value, "(B, M, S, dv)")
    B, M, S, _ = value.shape
    if S == 0:
        raise ValueError(f"value must have at least one key, got shape {tuple(value.shape)}")
    if (query is None) != (key is None):
        raise ValueError("query and key must be given together, or both be None for position logits alone")
    if query is not None and key is not None:
        check_dim("query", query, "(B, M, T, d)")
        if query.shape[:2] != (B, M):
            raise ValueError(f"query must have value's batch and heads ({B}, {M}), got shape {tuple(query.shape)}")
        if key.shape != (B, M, S, query.shape[3]):
            raise ValueError(
                f"key must have shape {(B, M, S, query.shape[3])}, value's axes and query's width, "
                f"got {tuple(key.shape)}"
            )
    elif band_logits is None and position_logits is None:
        raise ValueError("query and key, band_logits or position_logits must be given")
    if band_logits is None and (outside_logits is not None or number is not None):
        raise ValueError("outside_logits needs band_logits: without a band no key is outside it")
    if number is not None and not number < float("inf"):
        raise ValueError(f"outside_logits must be finite or -inf, got {number}")
    names = ("band_logits", "outside_logits", "position_logits")
    for name, logits, axes in zip(names, terms[3:], ("(B, M, T, K)", "(B, M, T)", "(B, M, T, S)")):
        if logits is not None:
            check_dim(name, logits, axes)
    T = _queries(terms)
    for name, logits in zip(names, terms[3:]):
        if logits is None:
            continue
        shape = (B, M, T, S) if name == "position_logits" else (B, M, T, *logits.shape[3:])
        fits = logits.shape[3:] == shape[3:]
        if not fits or any(n not in (1, m) for n, m in zip(logits.shape[:3], shape[:3])):
            raise ValueError(
                f"{name} must have shape {shape}, or size 1 in any of the first three axes, got {tuple(logits.shape)}"
            )
    if band_logits is not None:
        K = band_logits.shape[3]
        if K == 0 or (not causal and K % 2 == 0):  # no guard on a parity that may be any
            raise ValueError(
                f"band_logits must have at least one tap, and an odd number of them unless causal, got {K} "
                f"in shape {tuple(band_logits.shape)}"
            )
    if key_padding_mask is not None:
        if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
            kind = getattr(key_padding_mask, "dtype", type(key_padding_mask).__name__)
            raise TypeError(f"key_padding_mask must be a bool Tensor, True for padding, got {kind}")
        if key_padding_mask.shape != (B, S):
            raise ValueError(
                f"key_padding_mask must have shape {(B, S)} = (B, S) of value, got {tuple(key_padding_mask.shape)}"
            )
        if key_padding_mask.device != value.device:
            raise ValueError(
                f"key_padding_mask must be on value's device {value.device}, got {key_padding_mask.device}"
            )


# --- the operators: kernels, fake functions, gradients, FLOPs -----------------------------------------------------


def _queries(terms: SequenceTerms) -> int:
    if terms.query is not None:
        return terms.query.shape[2]
    T = 1
    for logits in terms[3:]:
        T = logits.shape[2] if logits is not None and T == 1 else T
    return T


def _outputs(terms: SequenceTerms) -> tuple[Tensor, Tensor]:
    """Uninitialised output, heads innermost but for the width as a projection wants them, and log-sum-exp."""
    B, M, _, dv = terms.value.shape
    T = _queries(terms)
    output = terms.value.new_empty_strided((B, M, T, dv), (T * M * dv, dv, M * dv, 1))
    return output, terms.value.new_empty((B, M, T), dtype=arithmetic_dtype(terms.value.dtype))


def _gradients(terms: SequenceTerms, needs: list[bool]) -> list[Tensor]:
    """Uninitialised gradients, laid out as what they are the gradients of; empty where not needed."""
    return [
        torch.empty_like(t) if t is not None and need else terms.value.new_empty(0) for t, need in zip(terms, needs)
    ]


def _forward(query, key, value, band_logits, outside_logits, position_logits, key_padding_mask, start, causal, scale):
    terms = SequenceTerms(query, key, value, band_logits, outside_logits, position_logits)
    output, lse = _outputs(terms)
    with torch.autocast(value.device.type, enabled=False):
        if output.numel() == 0:
            lse.fill_(float("inf"))
        elif _compiled(value):
            cpu.forward(terms, key_padding_mask, start, causal, scale, output, lse)
        else:
            problem = chunked.Problem(terms, key_padding_mask, start, causal, scale, lse.shape[2])
            chunked.forward(problem, output, lse)
    return output, lse


def _backward(
    grad_output, query, key, value, band_logits, outside_logits, position_logits, key_padding_mask, log_sum_exp,
    start, causal, scale, needs,
):  # fmt: skip
    terms = SequenceTerms(query, key, value, band_logits, outside_logits, position_logits)
    results = _gradients(terms, needs)
    grads = [g if t is not None and need else None for t, g, need in zip(terms, results, needs)]
    with torch.autocast(value.device.type, enabled=False):
        if grad_output.numel() == 0:
            for grad in results:
                grad.zero_()
        elif _compiled(value):
            cpu.backward(grad_output, terms, key_padding_mask, start, causal, scale, log_sum_exp, grads)
        else:
            problem = chunked.Problem(terms, key_padding_mask, start, causal, scale, log_sum_exp.shape[2])
            chunked.backward(problem, grad_output, log_sum_exp, scale, grads)
    return tuple(results)


def _compiled(value: Tensor) -> bool:
    return value.device.type == "cpu" and library.serves("cpu")


def _fake_forward(query, key, value, band_logits, outside_logits, position_logits, *rest):
    return _outputs(SequenceTerms(query, key, value, band_logits, outside_logits, position_logits))


def _fake_backward(grad_output, query, key, value, band_logits, outside_logits, position_logits, *rest):
    return tuple(_gradients(SequenceTerms(query, key, value, band_logits, outside_logits, position_logits), rest[-1]))


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.options = inputs[7:]
    ctx.save_for_backward(*inputs[:7], output[1])


def _differentiate(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple:
    needs = list(ctx.needs_input_grad[:6])
    if grad_output is None:
        return (None,) * 10
    grads = torch.ops.attn_plugins.sequence_attention_backward(grad_output, *ctx.saved_tensors, *ctx.options, needs)
    return (*(grad if need else None for grad, need in zip(grads, needs)), *(None,) * 4)


def _setup_context_double(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.options, ctx.needs = inputs[9:12], inputs[12]
    ctx.save_for_backward(*inputs[:8])


def _differentiate_twice(ctx: Any, *grads: Tensor | None) -> tuple:
    *saved, mask = ctx.saved_tensors
    found = differentiate_twice(
        lambda *terms: reference.sequence_attention(*terms, mask, *ctx.options),  # type: ignore[call-arg]
        saved,
        ctx.needs,
        ctx.needs_input_grad[:7],
        grads,
    )
    return (*found, *(None,) * 6)


Shape = tuple[int, ...]


def _operations(query: Shape | None, value: Shape, *logits: Shape | None) -> tuple[int, int]:
    """Of one content product and of one value product; keys that a mask leaves out count, as in torch's formulas."""
    B, M, S, dv = value
    T = query[2] if query is not None else max(shape[2] for shape in logits if shape is not None)
    pairs = 2 * B * M * T * S
    return (0 if query is None else pairs * query[3]), pairs * dv


def _flops(query, key, value, band, outside, position, *args, out_shape=None, **kwargs):
    """Two per multiply-add of both matrix products."""
    return sum(_operations(query, value, band, outside, position))


def _flops_backward(grad_output, query, key, value, band, outside, position, *args, out_shape=None, **kwargs):
    """Recomputed logits, gradients of query and key; gradients of weights and value."""
    content, mixing = _operations(query, value, band, outside, position)
    return 3 * content + 2 * mixing


_TERMS = (
    "Tensor? query, Tensor? key, Tensor value, Tensor? band_logits, Tensor? outside_logits, "
    "Tensor? position_logits, Tensor? key_padding_mask"
)
_OPTIONS = "SymInt start, bool causal, float scale"
define(
    "sequence_attention",
    f"({_TERMS}, {_OPTIONS}) -> (Tensor output, Tensor log_sum_exp)",
    _forward,
    _fake_forward,
    _differentiate,
    _setup_context,
    _flops,
)
define(
    "sequence_attention_backward",
    # Gradients that are not needed come back empty.
    f"(Tensor grad_output, {_TERMS}, Tensor log_sum_exp, {_OPTIONS}, bool[] needs) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_band_logits, "
    "Tensor grad_outside_logits, Tensor grad_position_logits)",
    _backward,
    _fake_backward,
    _differentiate_twice,
    _setup_context_double,
    _flops_backward,
)
