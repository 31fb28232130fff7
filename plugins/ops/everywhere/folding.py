"""Global attention as plain scaled-dot-product attention: every logit term folded into the dot product.

    q' = [scale * q, row_logits, column_logits, 1]    k' = [k, onehot(row of k), onehot(column of k), key_logits]

so that q'·k' is the sum of all terms, exactly, and the library's fused kernels do the rest in O(N) memory.
The terms' gradients are columns of the gradients of q' and k'. The device decides only which fused kernel is
called; the folding is the same everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import Backend
from .operands import GlobalOptions, GlobalTerms

WIDEST = 256  # of q'; beyond it the fused kernels fall to slow paths
_MULTIPLE = 8  # of the width, for the kernels' alignment
_LSE_ALIGNMENT = 32  # the CUDA kernel's log-sum-exp comes and goes padded to this many queries


def width(terms: GlobalTerms) -> int:
    """The width of q' and k', padded."""
    query, _, value, row_logits, column_logits, key_logits = terms
    parts = (
        0 if query is None else query.shape[-1],
        0 if row_logits is None else value.shape[2],
        0 if column_logits is None else value.shape[3],
        0 if key_logits is None else 1,
    )
    return -(-max(sum(parts), value.shape[-1]) // _MULTIPLE) * _MULTIPLE


def refuses(terms: GlobalTerms, options: GlobalOptions) -> str | None:
    """The reason why the library's fused attention does not serve, or None.

    On CPUs it serves wide content alone. (Up to a width of 32 our kernel is as fast or faster: 168 against 185 ms,
    forward and backward, for 4200 queries and 1050 keys of 9 heads x 28. At 64 the library's is faster, at 256 three
    times.)
    """
    query, _, value, *logits = terms
    if value.device.type == "cpu":
        if query is None or query.shape[-1] <= 32:
            return "on CPUs it pays for heads wider than 32"
        if any(term is not None for term in logits):
            return "on CPUs it pays for content alone"
        return None
    if not value.is_cuda:
        return f"it serves CPUs and CUDA, and the tensors are on {value.device.type}"
    if value.dtype == torch.float64:
        return "CUDA's fused attention takes no float64"
    folded = width(terms)
    return None if folded <= WIDEST else f"all terms together are {folded} wide, and {WIDEST} is the widest that pays"


def refuses_backward(terms: GlobalTerms, options: GlobalOptions) -> str | None:
    """CUDA's fused backward adds with atomics; the chunks' sums have a fixed order."""
    if terms.value.is_cuda and torch.are_deterministic_algorithms_enabled():
        return "CUDA's fused backward is not deterministic"
    return None


def _finite(logits: Tensor) -> Tensor:
    """-inf as a number that still gives exp(...) = 0 but survives a product with 0."""
    return logits.clamp(min=_lowest(logits.dtype))


def _lowest(dtype: torch.dtype) -> float:
    return -3e4 if dtype == torch.float16 else -1e30


def fold(terms: GlobalTerms, scale: float, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """q' (B, M, Hq * Wq, D), k' and the padded value (B, M, Hk * Wk, D)."""
    query, key, value, row_logits, column_logits, key_logits = terms
    B, M, Hk, Wk, _ = value.shape
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    if query is not None and key is not None:
        queries.append(query * scale)
        keys.append(key)
    if row_logits is not None:
        queries.append(_finite(row_logits).expand(B, M, *grid, Hk))
        rows = torch.eye(Hk, dtype=value.dtype, device=value.device)
        keys.append(rows.unsqueeze(1).expand(B, M, Hk, Wk, Hk))
    if column_logits is not None:
        queries.append(_finite(column_logits).expand(B, M, *grid, Wk))
        columns = torch.eye(Wk, dtype=value.dtype, device=value.device)
        keys.append(columns.expand(B, M, Hk, Wk, Wk))
    if key_logits is not None:
        queries.append(value.new_ones(()).expand(B, M, *grid, 1))
        keys.append(_finite(key_logits).unsqueeze(-1).expand(B, M, Hk, Wk, 1))
    D = width(terms)
    return _join(queries, D), _join(keys, D), _join([value], D)


def _join(parts: list[Tensor], D: int) -> Tensor:
    missing = D - sum(p.shape[-1] for p in parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(()).expand(*parts[0].shape[:-1], missing)]
    # The fused kernels read rows of contiguous numbers; cat's result is channels-last where all its parts are.
    return torch.cat(parts, -1).flatten(2, 3).contiguous()


def forward(terms: GlobalTerms, options: GlobalOptions, output: Tensor, lse: Tensor) -> None:
    """Write the output (B, M, Hq, Wq, dv) and the log-sum-exp (B, M, Hq, Wq), +inf where all keys are masked."""
    query, key, value = fold(terms, options.scale, (output.shape[2], output.shape[3]))
    if value.is_cuda:
        folded, total, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, False, scale=1.0
        )
        total = total[..., : query.shape[2]]
    else:
        folded, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, scale=1.0
        )
    total = total.view(lse.shape)
    masked = total < _lowest(value.dtype) / 2
    lse.copy_(torch.where(masked, float("inf"), total))
    folded = folded[..., : output.shape[-1]].unflatten(2, output.shape[2:4])
    output.copy_(folded.masked_fill(masked.unsqueeze(-1), 0))


def backward(
    grad_output: Tensor,
    terms: GlobalTerms,
    options: GlobalOptions,
    output: Tensor,
    lse: Tensor,
    grads: list[Tensor | None],
) -> None:
    """Fill the wanted gradients (those not None) of query, key, value, row, column and key logits."""
    grid = (output.shape[2], output.shape[3])
    query, key, value = fold(terms, options.scale, grid)
    D = query.shape[-1]
    grad_output, output = _join([grad_output], D), _join([output], D)
    lse = lse.flatten(2)
    if value.is_cuda:
        N = query.shape[2]
        # Queries without keys have +inf: their probabilities, exp(logit - inf), come out as 0 again.
        lse = torch.nn.functional.pad(lse, (0, -N % _LSE_ALIGNMENT), value=float("inf"))
        unused = torch.empty((), dtype=torch.long, device=value.device)  # the state of a dropout that is off
        grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_output, query, key, value, None, output, lse, unused, unused, 0.0,
            [True, True, True, False], False, scale=1.0,
        )  # fmt: skip
    else:
        grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_output, query, key, value, output, lse, 0.0, False, scale=1.0
        )
    _unfold(terms, options.scale, grid, grad_query, grad_key, grad_value, grads)


def _unfold(
    terms: GlobalTerms,
    scale: float,
    grid: tuple[int, int],
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grads: list[Tensor | None],
) -> None:
    """Take the terms' gradients out of those of q', k' and the padded value, summed over broadcast axes."""
    query, _, value, row_logits, column_logits, key_logits = terms
    grad_query = grad_query.unflatten(2, grid)
    grad_key = grad_key.unflatten(2, value.shape[2:4])
    start = 0

    def take(grad: Tensor, size: int) -> Tensor:
        return grad[..., start : start + size]

    def write(target: Tensor | None, grad: Tensor) -> None:
        if target is not None:
            target.copy_(grad.sum_to_size(target.shape))

    if query is not None:
        write(grads[0], take(grad_query, query.shape[-1]) * scale)
        write(grads[1], take(grad_key, query.shape[-1]))
        start += query.shape[-1]
    if row_logits is not None:
        write(grads[3], take(grad_query, value.shape[2]))
        start += value.shape[2]
    if column_logits is not None:
        write(grads[4], take(grad_query, value.shape[3]))
        start += value.shape[3]
    if key_logits is not None:
        write(grads[5], take(grad_key, 1).squeeze(-1))
    write(grads[2], grad_value.unflatten(2, value.shape[2:4])[..., : value.shape[-1]])


BACKEND = Backend("sdpa", refuses, forward, backward, refuses_backward)
