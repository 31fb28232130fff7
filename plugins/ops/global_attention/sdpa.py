"""Global attention as plain scaled-dot-product attention: every logit term folded into the dot product.

    q' = [scale * q, row_logits, column_logits, 1]    k' = [k, onehot(row of k), onehot(column of k), key_logits]

so that q'·k' is exactly the sum of all terms, and PyTorch's fused kernels do the rest in O(N) memory. The gradients of
the terms are columns of the gradients of q' and k'. Devices differ only in the fused kernel that is called, and in
whether it needs values as wide as q'.

Since 0 * -inf is NaN, a very low number stands for -inf. float16 has none that is low enough, so there the logits are
divided by 16 in q' or k' and the ones are 16 in the other. -inf is then represented by -1e6, below any sum of float16
numbers, and 1/16 of a logit is as precise as the logit down to 5e-7.

Content alone in half precision, with values as wide as the keys, is not folded: CUDA's flash attention takes it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core import flash
from ...core.attention import empty_results
from ...core.backends import Backend, Gradients
from ...core.gradients import like_terms
from . import triton
from .operands import Options, Terms

WIDEST = 256  # width of q' beyond which the fused kernels take slow paths
_MULTIPLE = 8  # widths are padded to a multiple, for the kernels' alignment
_LSE_ALIGNMENT = 32  # queries; the CUDA kernels read and write log-sum-exps padded to a multiple


def width(terms: Terms) -> int:
    """Return the padded width of q' and k'."""
    query, _, value, row_logits, column_logits, key_logits = terms
    parts = (
        0 if query is None else query.shape[-1],
        0 if row_logits is None else value.shape[2],
        0 if column_logits is None else value.shape[3],
        0 if key_logits is None else 1,
    )
    return _padded(sum(parts))


def _padded(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def cannot(terms: Terms, options: Options) -> str | None:
    """Return the reason why PyTorch's fused attention cannot run, or None."""
    value = terms.value
    if value.device.type == "cpu":
        return None
    if not value.is_cuda:
        return f"it runs on CPUs and CUDA, but the tensors are on {value.device.type}"
    if value.dtype == torch.float64:
        return "CUDA's fused attention does not support float64"
    if max(value.shape[:2]) > flash.MOST:
        return f"CUDA's fused attention takes up to {flash.MOST} images and heads, got shape {tuple(value.shape)}"
    return None


def prefers_not(terms: Terms, options: Options) -> str | None:
    """Return the reason why another backend is faster, or None.

    On CPUs it takes only wide content without other terms. Up to a width of 32 our kernel is at least as fast (168
    against 185 ms, forward and backward, for 4200 queries and 1050 keys of 9 heads x 28); at 64 PyTorch's is faster,
    at 256 three times as fast. On CUDA it leaves to Triton what that can compute, but for position alone, and content
    alone in half precision.
    """
    query, _, value, *logits = terms
    if value.device.type == "cpu":
        if query is None or query.shape[-1] <= 32:
            return "on CPUs it is faster only for heads wider than 32"
        if any(term is not None for term in logits):
            return "on CPUs it is faster only for content alone"
        return None
    if (folded := max(width(terms), value.shape[-1])) > WIDEST:
        return f"all terms together are {folded} wide, and it is slow beyond {WIDEST}"
    of_ours = torch.are_deterministic_algorithms_enabled() or not (query is None or is_flash(terms, options))
    if of_ours and triton.cannot(terms, options) is None:
        return "Triton's kernels are faster for content with other terms or in float32, and are deterministic"
    return None


def cannot_backward(terms: Terms, options: Options) -> str | None:
    """Refuse deterministic mode on CUDA: the fused backward adds with atomics, the chunks add in a fixed order."""
    if terms.value.is_cuda and torch.are_deterministic_algorithms_enabled():
        return "CUDA's fused backward is not deterministic"
    return None


def _unit(dtype: torch.dtype) -> float:
    """Return the number that stands for 1; logits are divided by it."""
    return 16.0 if dtype == torch.float16 else 1.0


def _lowest(dtype: torch.dtype) -> float:
    """Return the finite number x that stands for -inf: exp(x + other logits) is 0, and 0 * x is 0."""
    return torch.finfo(dtype).min if dtype == torch.float16 else -1e30


def _logits(logits: Tensor) -> Tensor:
    unit = _unit(logits.dtype)
    return (logits if unit == 1 else logits / unit).clamp(min=_lowest(logits.dtype))


def fold(terms: Terms, factor: float, grid: tuple[int, int], one_width: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q' (B, M, Hq * Wq, D), k' (B, M, Hk * Wk, D) and the padded value, as wide as them with ``one_width``."""
    query, key, value, row_logits, column_logits, key_logits = terms
    B, M, Hk, Wk, dv = value.shape
    unit = value.new_full((), _unit(value.dtype))
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    if query is not None and key is not None:
        queries.append(query * factor)
        keys.append(key)
    if row_logits is not None:
        queries.append(_logits(row_logits).expand(B, M, *grid, Hk))
        rows = torch.eye(Hk, dtype=value.dtype, device=value.device) * unit
        keys.append(rows.unsqueeze(1).expand(B, M, Hk, Wk, Hk))
    if column_logits is not None:
        queries.append(_logits(column_logits).expand(B, M, *grid, Wk))
        columns = torch.eye(Wk, dtype=value.dtype, device=value.device) * unit
        keys.append(columns.expand(B, M, Hk, Wk, Wk))
    if key_logits is not None:
        queries.append(unit.expand(B, M, *grid, 1))
        keys.append(_logits(key_logits).unsqueeze(-1).expand(B, M, Hk, Wk, 1))
    D, DV = width(terms), _padded(dv)
    if one_width:
        D = DV = max(D, DV)
    return _join(queries, D), _join(keys, D), _join([value], DV)


def _join(parts: list[Tensor], D: int) -> Tensor:
    missing = D - sum(p.shape[-1] for p in parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(()).expand(*parts[0].shape[:-1], missing)]
    # The fused kernels need contiguous rows, but the result of cat is channels-last if all its parts are.
    return torch.cat(parts, -1).flatten(2, 3).contiguous()


def _scales(terms: Terms, scale: float) -> tuple[float, float]:
    """Return the factor of the query in q', and that of all logits, which the kernel applies.

    Content alone is scaled by the kernel: in half precision, a scaled query would be rounded once more, and a logit of
    1000 with it by 0.5. Kernels expect a positive scale.
    """
    return (math.copysign(1.0, scale), abs(scale)) if _alone(terms) and scale else (scale, 1.0)


def _alone(terms: Terms) -> bool:
    """Return whether content is the only term."""
    return terms.query is not None and all(term is None for term in terms[3:])


def is_flash(terms: Terms, options: Options) -> bool:
    """Return whether CUDA's flash attention takes the terms: content alone in half precision."""
    query = terms.query
    return query is not None and _alone(terms) and flash.refusal(query, terms.value, options.scale) is None


def forward(terms: Terms, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    grid = terms.grid()
    output, lse = empty_results(terms.value, *grid)
    if is_flash(terms, options):
        query, key, value = (term.flatten(2, 3) for term in terms[:3] if term is not None)
        rows, total = flash.forward(query, key, value, options.scale)
        return output.copy_(rows.unflatten(2, grid)), lse.copy_(total.view(lse.shape))
    factor, scale = _scales(terms, options.scale)
    query, key, value = fold(terms, factor, grid, not terms.value.is_cuda)
    if value.is_cuda:
        folded, total, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, False, scale=scale
        )
    else:
        folded, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, scale=scale
        )
    total = total[..., : query.shape[2]].view(lse.shape)
    masked = total < _lowest(value.dtype) * _unit(value.dtype) / 2
    lse.copy_(torch.where(masked, float("inf"), total))
    folded = folded[..., : output.shape[-1]].unflatten(2, grid)
    return output.copy_(folded.masked_fill(masked.unsqueeze(-1), 0)), lse


def backward(
    grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor, needs: dict[str, bool]
) -> Gradients:
    """Return the gradients that are needed, of all that the fused kernels compute."""
    compute = _flash_backward if is_flash(terms, options) else _folded_backward
    grads = compute(grad_output, terms, options, output, lse)
    return like_terms(terms, {name: grad for name, grad in grads.items() if needs[name]})


def _folded_backward(grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor) -> Gradients:
    grid = (output.shape[2], output.shape[3])
    factor, scale = _scales(terms, options.scale)
    query, key, value = fold(terms, factor, grid, not terms.value.is_cuda)
    DV = value.shape[-1]
    grad_output, output = _join([grad_output], DV), _join([output], DV)
    lse = lse.flatten(2)
    if value.is_cuda:
        # The kernels for halves read the output as (B, N, M, DV), whatever its strides say.
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        N = query.shape[2]
        # The log-sum-exp of fully masked queries is +inf, so that their probabilities, exp(logit - inf), are 0.
        lse = torch.nn.functional.pad(lse, (0, -N % _LSE_ALIGNMENT), value=float("inf"))
        unused = torch.empty((), dtype=torch.long, device=value.device)  # state of the dropout, which is off
        grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_output, query, key, value, None, output, lse, unused, unused, 0.0,
            [True, True, True, False], False, scale=scale,
        )  # fmt: skip
    else:
        grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, output, lse, 0.0, False, scale=scale
        )
    return _unfold(terms, factor, grid, grad_query, grad_key, grad_value)


def _flash_backward(grad_output: Tensor, terms: Terms, options: Options, output: Tensor, lse: Tensor) -> Gradients:
    query, key, value = (term.flatten(2, 3) for term in terms[:3] if term is not None)
    rows = (grad_output.flatten(2, 3), query, key, value, output.flatten(2, 3))
    grads = flash.backward(*rows, lse.flatten(2), options.scale)
    grids = (output.shape[2:4], terms.value.shape[2:4], terms.value.shape[2:4])
    return {name: grad.unflatten(2, grid) for name, grad, grid in zip(terms._fields, grads, grids)}


def _unfold(
    terms: Terms, factor: float, grid: tuple[int, int], grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
) -> Gradients:
    """Extract the terms' gradients from those of q', k' and the padded value."""
    query, _, value, row_logits, column_logits, key_logits = terms
    grads: Gradients = {"value": grad_value.unflatten(2, value.shape[2:4])[..., : value.shape[-1]]}
    grad_query = grad_query.unflatten(2, grid)
    grad_key = grad_key.unflatten(2, value.shape[2:4])
    start = 0

    def take(grad: Tensor, size: int) -> Tensor:
        return grad[..., start : start + size]

    if query is not None:
        grads["query"] = take(grad_query, query.shape[-1]) * factor
        grads["key"] = take(grad_key, query.shape[-1])
        start += query.shape[-1]
    unit = _unit(value.dtype)
    if row_logits is not None:
        grads["row_logits"] = take(grad_query, value.shape[2]) / unit
        start += value.shape[2]
    if column_logits is not None:
        grads["column_logits"] = take(grad_query, value.shape[3]) / unit
        start += value.shape[3]
    if key_logits is not None:
        grads["key_logits"] = take(grad_key, 1).squeeze(-1) / unit
    return grads


BACKEND = Backend("sdpa", cannot, forward, backward, cannot_backward, prefers_not)
