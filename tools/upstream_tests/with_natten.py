"""pytest plug-in for NATTEN's ``tests/test_fna.py``: its cases, with our operators in the place of its kernels.

NATTEN's tests need its CUDA library for both sides of the comparison. Here one side is the dense softmax in float64
over the keys that NATTEN's own mask for FlexAttention allows, and the other ours: ``window_attention`` with a window of
2k - 1 taps and the logit -inf where NATTEN has no key, since its windows move inwards at borders. Away from borders,
``window_attention`` without logits is compared as well, where NATTEN's windows are centred.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import natten.utils.testing
import pytest
import torch
from natten.backends.flex import get_na_flex_mask
from natten.utils.checks import check_all_args
from torch import Tensor

import attn_plugins.ops

TESTS = ("test_1d_against_reference", "test_2d_against_reference", "test_2d_against_reference_extended")
PAIRS = 35_000_000  # of queries and keys, or of queries and taps: larger cases are left out
BOUNDS = {  # NATTEN's, of the output and the gradients of query, key and value
    torch.float32: (1e-4, 1e-2, 1e-4, 1e-4),
    torch.float16: (1e-2, 1e-2, 1e-2, 1e-2),
    torch.bfloat16: (5e-2, 1e-2, 1e-2, 1e-2),
}
compared: list[tuple[int, ...]] = []
natten.utils.testing._IS_CUDA_AVAILABLE = natten.utils.testing.HAS_LIBNATTEN = True  # or the tests skip themselves


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the comparisons with the reference in one and two dimensions, and compare our operator there."""
    kept = [item for item in items if item.name in TESTS]
    for item in kept:
        item.cls._test_all_dtypes_against_reference = compare  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Report the number of compared cases with the test."""
    compared.clear()
    result = yield
    item.user_properties.append(("cases", len(compared)))
    return result


def compare(
    test: Any,
    batch: int,
    heads: int,
    head_dim: int,
    head_dim_v: int,
    input_shape: tuple[int, ...],
    kernel_size: Any,
    stride: Any,
    dilation: Any,
    is_causal: Any = False,
    heads_kv: int | None = None,
) -> None:
    """Compare one of NATTEN's cases, forward and backward, with the bounds of NATTEN's test."""
    axes = len(input_shape)
    kernel, strides, dilations, causal = check_all_args(axes, kernel_size, stride, dilation, is_causal)
    tokens, taps = math.prod(input_shape), math.prod(2 * k - 1 for k in kernel)
    if tokens * max(tokens, taps) > PAIRS:
        return
    compared.append(input_shape)
    mask = get_na_flex_mask("cpu", axes, input_shape, kernel, strides, dilations, causal).mask_mod
    index = torch.arange(tokens)
    allowed = mask(None, None, index[:, None], index)
    query = torch.randn(batch, heads, *input_shape, head_dim)
    key, value = (
        torch.randn(batch, heads_kv or heads, *input_shape, size).repeat_interleave(heads // (heads_kv or heads), 1)
        for size in (head_dim, head_dim_v)
    )
    gradient = torch.randn(batch, heads, *input_shape, head_dim_v) * 0.05
    expected = dense(*(t.double() for t in (query, key, value, gradient)), allowed)

    logits = log_mask(allowed, input_shape, kernel, dilations)
    window = [2 * k - 1 for k in kernel]
    for dtype, bounds in BOUNDS.items():
        leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (query, key, value)]
        output = attn_plugins.ops.window_attention(
            *leaves, logits.to(dtype), window, dilation=dilations, scale=head_dim**-0.5
        )
        output.backward(gradient.to(dtype))
        for actual, wanted, bound in zip([output, *(t.grad for t in leaves)], expected, bounds, strict=True):
            torch.testing.assert_close(actual.double(), wanted, atol=bound, rtol=0)

    if all(k % 2 and s == 1 and not c for k, s, c in zip(kernel, strides, causal, strict=True)):
        plain = attn_plugins.ops.window_attention(
            query, key, value, None, kernel, dilation=dilations, scale=head_dim**-0.5
        )
        borders = [k // 2 * d for k, d in zip(kernel, dilations, strict=True)]
        inside = (..., *(slice(b, size - b) for b, size in zip(borders, input_shape, strict=True)), slice(None))
        torch.testing.assert_close(plain[inside].double(), expected[0][inside], atol=BOUNDS[torch.float32][0], rtol=0)


def dense(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, allowed: Tensor) -> list[Tensor]:
    """Return the output and the gradients of masked attention, with all weights written out."""
    leaves = [t.requires_grad_() for t in (query, key, value)]
    flat = [t.flatten(2, -2) for t in leaves]
    logits = flat[0] @ flat[1].mT * query.shape[-1] ** -0.5
    output = (logits.masked_fill(~allowed, -math.inf).softmax(-1) @ flat[2]).view_as(gradient)
    return [output, *torch.autograd.grad(output, leaves, gradient)]


def log_mask(allowed: Tensor, shape: tuple[int, ...], kernel: Any, dilation: Any) -> Tensor:
    """Return the logits 0 and -inf, (1, 1, *shape, taps), of windows of 2k - 1 taps around every query."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, 1, len(shape))
    steps = torch.tensor(list(itertools.product(*(range(1 - k, k) for k in kernel)))) * torch.tensor(dilation)
    keys, size = places + steps, torch.tensor(shape)
    inside = ((keys >= 0) & (keys < size)).all(-1)
    strides = torch.tensor([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
    index = (keys.clamp(min=0).minimum(size - 1) * strides).sum(-1)
    return torch.where(inside & allowed.gather(1, index), 0.0, -math.inf).view(1, 1, *shape, -1)
