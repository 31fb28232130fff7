"""Gradients where softmax saturates: large logits and few keys, against float64, beside the plain definition."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_plugins import ops
from attn_plugins.ops.sequence_attention import triton
from tests.helpers.operator_checks import DEVICES
from tests.helpers.triton_checks import DEVICE, needs_triton

Call = tuple[dict[str, Tensor], dict]
# Roundings that are always allowed, where the plain definition happens to be exact.
LEAST = 8


def global_attention(keys: int, draw) -> Call:
    rows = 1 if keys < 8 else 4
    map = (2, 3, rows, keys // rows)
    return dict(
        query=draw(2, 3, 4, 5, 16), key=draw(*map, 16), value=draw(*map, 16), row_logits=draw(2, 3, 4, 5, rows)
    ), {}


def sequence_attention(keys: int, draw) -> Call:
    line = (2, 3, keys, 16)
    return dict(query=draw(2, 3, 7, 16), key=draw(*line), value=draw(*line), position_logits=draw(1, 3, 7, keys)), {}


def window_attention(keys: int, draw) -> Call:
    kernel = {1: (1, 1), 2: (1, 3), 8: (3, 3), 64: (7, 9)}[keys]
    map = (2, 3, 6, 11)
    terms = dict(
        query=draw(*map, 16),
        key=draw(*map, 16),
        value=draw(*map, 16),
        position_logits=draw(*map, kernel[0] * kernel[1]),
    )
    return terms, dict(kernel_size=kernel)


def criss_cross_attention(keys: int, draw) -> Call:
    map = {1: (2, 3, 1, 1), 2: (2, 3, 1, 2), 8: (2, 3, 4, 5), 64: (2, 3, 31, 34)}[keys]
    return dict(
        query=draw(*map, 16), key=draw(*map, 16), value=draw(*map, 16), position_logits=draw(*map, map[2] + map[3])
    ), {}


CALLS = [global_attention, sequence_attention, window_attention, criss_cross_attention]


def differentiate(backend: str | None, dtype: torch.dtype, tensors: dict[str, Tensor], call) -> dict[str, Tensor]:
    """Return the gradients, in float64."""
    leaves = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    with ops.backend(backend) if backend else contextlib.nullcontext():
        output = call(**leaves)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad(output, [*leaves.values()], grad.to(output))
    return {name: gradient.double() for name, gradient in zip(leaves, grads)}


HALVES = [torch.float16, torch.bfloat16]
SIZES = pytest.mark.parametrize("size", [1, 30, 1000])


# Every value of each, every size with every number of keys, and 1,000 with every dtype.
CASES = [
    (operator, keys, size, [torch.float32, *HALVES][(n + k) % 3], [None, "eager"][(n + k) // 3 % 2])
    for operator in CALLS
    for n, (keys, size) in enumerate(itertools.product([1, 2, 8, 64], [1, 30, 1000]))
    for k in ((0, 1, 5) if size == 1000 else (n % 6,))
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator, keys, size, dtype, backend", CASES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_errors_are_those_of_the_definition(operator, keys, size, dtype, backend, device):
    check(operator, lambda draw: operator(keys, draw), keys, size, dtype, backend, device)


# 64 keys of criss-cross attention take the interpreter minutes; its kernels take content in halves alone.
SLOW = pytest.mark.slow
INTERPRETED = [
    (global_attention, 8, torch.float16, True, 1000),
    pytest.param(global_attention, 2, torch.float32, True, 30, marks=SLOW),
    (sequence_attention, 8, torch.bfloat16, True, 1000),
    pytest.param(sequence_attention, 1, torch.float32, True, 1, marks=SLOW),
    (sequence_attention, 2, torch.float16, False, 1000),  # not by the kernel of windows
    (criss_cross_attention, 2, torch.float16, True, 1000),
    pytest.param(criss_cross_attention, 8, torch.bfloat16, True, 1000, marks=SLOW),
    *(pytest.param(global_attention, 64, dtype, True, 1000, marks=SLOW) for dtype in (torch.float32, *HALVES)),
    *(pytest.param(sequence_attention, 64, dtype, windows, 1000, marks=SLOW)
      for dtype, windows in zip((torch.float32, *HALVES), (True, False, True))),
]  # fmt: skip


@pytest.fixture
def dots_of_one_order(monkeypatch):
    """Give the interpreter products that round alike, whichever factor is transposed.

    NumPy's differ on some processors, so that ``key @ query.T``, in the backward, gives other weights than the forward.
    A GPU's products stay as they are.
    """
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, *_):
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@needs_triton
@pytest.mark.usefixtures("dots_of_one_order")
@pytest.mark.parametrize(
    "operator, keys, dtype, windows, size", INTERPRETED, ids=lambda given: getattr(given, "__name__", str(given))
)
def test_errors_of_triton_are_those_of_the_definition(operator, keys, dtype, windows, size, monkeypatch):
    """As above, with one head of one image."""
    if not windows:
        monkeypatch.setattr(triton, "_are_windows", lambda call, terms: False)

    def make(draw) -> Call:
        terms, options = operator(keys, draw)
        if operator is criss_cross_attention:
            del terms["position_logits"]
        return {name: t[:1, :1] for name, t in terms.items()}, options

    check(operator, make, keys, size, dtype, "triton", DEVICE)


def check(
    operator, make, keys: int, size: float, dtype: torch.dtype, backend: str | None, device: str, times: float = 3
) -> None:
    """Assert that of eight calls, no gradient's largest error is over ``times`` that of the plain definition."""
    function = getattr(ops, operator.__name__)
    ours, plain, sizes = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(8):
        terms, options = make(partial(torch.randn, generator=torch.Generator().manual_seed(seed)))
        for name in ("query", "row_logits", "position_logits"):
            if name in terms:
                terms[name] *= size / (4 if name == "query" else 1)
        tensors = {name: t.to(device, dtype) for name, t in terms.items()}
        call = partial(function, **options)
        exact = differentiate("reference", torch.float64, tensors, call)
        for errors, by in ((ours, backend), (plain, "reference")):
            for name, gradient in differentiate(by, dtype, tensors, call).items():
                errors[name] = max(errors[name], float((gradient - exact[name]).abs().max()))
                sizes[name] = max(sizes[name], float(exact[name].abs().max()))
    for name in ours:
        allowed = times * max(plain[name], LEAST * torch.finfo(dtype).eps * sizes[name])
        assert ours[name] <= allowed, f"{name}: {ours[name]:.2g}, plain {plain[name]:.2g}, of {sizes[name]:.2g}"
        if keys == 1 and name in ("query", "key"):
            assert ours[name] == 0
