"""Gradients where softmax saturates: large logits and few keys, against float64, beside the plain definition."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from attn_plugins.ops.sequence_attention import triton
from tests.helpers.operator_checks import DEVICES
from tests.helpers.slow_cases import slow_but
from tests.helpers.triton_checks import DEVICE, SLOW_INTERPRETED, needs_triton
from tests.ops import contract_examples
from tests.ops.contract_examples import EXAMPLES
from tests.ops.test_contract import differentiate, forced

# Roundings that are always allowed, where the plain definition happens to be exact.
LEAST = 8
KEYS = (1, 2, 8, 64)
BUILDS = EXAMPLES | {
    "global_attention": contract_examples.global_attention("query key value row_logits"),
    "sequence_attention": contract_examples.sequence_attention("query key value position_logits"),
}
EXTENTS = {  # that give about so many keys
    "global_attention": {n: dict(grid=(4, 5), keys=(rows, n // rows)) for n, rows in zip(KEYS, (1, 1, 4, 4))},
    "sequence_attention": {n: dict(T=7, S=n) for n in KEYS},
    "window_attention": {n: dict(map=(6, 11), kernel=k) for n, k in zip(KEYS, ((1, 1), (1, 3), (3, 3), (7, 9)))},
    "criss_cross_attention": {n: dict(map=m) for n, m in zip(KEYS, ((1, 1), (1, 2), (4, 5), (31, 34)))},
}


HALVES = [torch.float16, torch.bfloat16]
SIZES = pytest.mark.parametrize("size", [1, 30, 1000])


# Every value of each, every size with every number of keys, and 1,000 with every dtype.
CASES = [
    (operator, keys, size, [torch.float32, *HALVES][(n + k) % 3], [None, "eager"][(n + k) // 3 % 2])
    for operator in EXTENTS
    for n, (keys, size) in enumerate(itertools.product(KEYS, [1, 30, 1000]))
    for k in ((0, 1, 5) if size == 1000 else (n % 6,))
]


# 64 keys of two operators take a second, in halves and by the definition as in the kernel's float32.
LONG = [("criss_cross_attention", 64), ("window_attention", 64)]
QUICK = [case for case in CASES if case[:2] not in LONG or case[2:] == (1000, torch.float32, None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, keys, size, dtype, backend", slow_but(QUICK, CASES), ids=str)
def test_errors_are_those_of_the_definition(name, keys, size, dtype, backend, device):
    check(name, keys, size, dtype, backend, device)


# 64 keys of criss-cross attention take the interpreter minutes; its kernels take content in halves alone.
SLOW = pytest.mark.slow
CRISS_CROSS = "criss_cross_attention, content"
INTERPRETED = [
    ("global_attention", 8, torch.float16, True, 1000),
    pytest.param("global_attention", 2, torch.float32, True, 30, marks=SLOW),
    pytest.param("sequence_attention", 8, torch.bfloat16, True, 1000, marks=SLOW_INTERPRETED),
    pytest.param("sequence_attention", 1, torch.float32, True, 1, marks=SLOW),
    # Not by the kernel of windows.
    pytest.param("sequence_attention", 2, torch.float16, False, 1000, marks=SLOW_INTERPRETED),
    pytest.param(CRISS_CROSS, 2, torch.float16, True, 1000, marks=SLOW_INTERPRETED),
    pytest.param(CRISS_CROSS, 8, torch.bfloat16, True, 1000, marks=SLOW),
    *(pytest.param("global_attention", 64, dtype, True, 1000, marks=SLOW) for dtype in (torch.float32, *HALVES)),
    *(pytest.param("sequence_attention", 64, dtype, windows, 1000, marks=SLOW)
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
@pytest.mark.parametrize("name, keys, dtype, windows, size", INTERPRETED, ids=str)
def test_errors_of_triton_are_those_of_the_definition(name, keys, dtype, windows, size, monkeypatch):
    """As above, with one head of one image, and fewer calls where kernels are interpreted."""
    if not windows:
        monkeypatch.setattr(triton, "_are_windows", lambda call, terms: False)
    check(name, keys, size, dtype, "triton", DEVICE, calls=8 if DEVICE == "cuda" else 3, B=1, M=1)


# Our baseline kernels round each product and each sum; MKL may have fused instructions even there.
TIMES = 5 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 3


def check(
    name: str,
    keys: int,
    size: float,
    dtype: torch.dtype,
    backend: str | None,
    device: str,
    times: float = TIMES,
    calls: int = 8,
    **one: int,
) -> None:
    """Assert that of some calls, no gradient's largest error is over ``times`` that of the plain definition."""
    extents = {**dict(B=2, M=3, d=16, dv=16), **EXTENTS[name.split(",")[0]][keys], **one}
    some = BUILDS[name]("small", **extents)
    ours, plain, sizes = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(calls):
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for n, t in some.tensors.items():
            factor = 1 if n in ("key", "value") else size / (4 if n == "query" else 1)
            tensors[n] = (torch.randn(t.shape, generator=generator) * factor).to(device, dtype)

        def differentiated(by: str | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
            leaves = {n: t.to(dtype).requires_grad_() for n, t in tensors.items()}  # noqa: B023
            with forced(by):
                gradients = differentiate(partial(some.call, scale=1.0), leaves)
                return {n: t.double() for n, t in gradients.items() if n != "output"}

        exact = differentiated("reference", torch.float64)
        for errors, by in ((ours, backend), (plain, "reference")):
            for n, gradient in differentiated(by, dtype).items():
                errors[n] = max(errors[n], float((gradient - exact[n]).abs().max()))
                sizes[n] = max(sizes[n], float(exact[n].abs().max()))
    for n in ours:
        allowed = times * max(plain[n], LEAST * torch.finfo(dtype).eps * sizes[n])
        assert ours[n] <= allowed, f"{n}: {ours[n]:.2g}, plain {plain[n]:.2g}, of {sizes[n]:.2g}"
        if keys == 1 and n in ("query", "key"):
            assert ours[n] == 0
