"""Global attention on a CUDA device against its float64 reference in plain PyTorch, by relative norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import global_attention, reference
from tests.helpers.cuda_checks import DTYPES, exact
from tests.helpers.operator_checks import relative_error

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("full_float32")]
ATTENTION = ("query", "key", "value", "row_logits", "column_logits", "key_logits")


def attention_operands(dtype, *, B=2, M=3, Hq=7, Wq=9, Hk=5, Wk=6, d=16, absent=()) -> dict:
    random = torch.Generator().manual_seed(0)
    shapes = dict(
        query=(B, M, Hq, Wq, d), key=(B, M, Hk, Wk, d), value=(B, M, Hk, Wk, d), row_logits=(B, M, Hq, Wq, Hk),
        column_logits=(B, M, Hq, Wq, Wk), key_logits=(1, M, Hk, Wk),
    )  # fmt: skip
    return {
        name: None
        if name in absent
        else (torch.randn(shapes[name], generator=random, dtype=torch.float64) * 0.7).to("cuda", dtype)
        for name in ATTENTION
    }


def attend(query, key, value, **logits) -> Tensor:
    return global_attention(query, key, value, **logits, scale=0.5)


def attention_reference(query, key, value, row_logits, column_logits, key_logits) -> Tensor:
    return reference.global_attention(query, key, value, row_logits, column_logits, key_logits, 0.5)


def attention_gradients(function, operands: dict) -> list[Tensor]:
    leaves = {k: None if v is None else v.detach().requires_grad_() for k, v in operands.items()}
    output = function(**leaves)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [v for v in leaves.values() if v is not None]
    return [output, *torch.autograd.grad(output, wanted, grad.to(output))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "absent",
    [(), ("query", "key"), ("row_logits",), ("row_logits", "column_logits", "key_logits"),
     ("query", "key", "row_logits", "column_logits"), ("key_logits",)],
    ids=lambda names: "without " + ", ".join(names) if names else "all terms",
)  # fmt: skip
@pytest.mark.parametrize("width", [16, 28, 300])  # 300: too wide to fold
def test_global_attention(absent, dtype, width):
    operands = attention_operands(dtype, absent=absent, d=width)
    expected = attention_gradients(attention_reference, exact(operands))
    for found, wanted in zip(attention_gradients(attend, operands), expected):
        assert found.dtype == dtype
        assert relative_error(found, wanted) < DTYPES[dtype]


def test_global_attention_in_strided_and_large_maps():
    operands = attention_operands(torch.float32, B=1, M=2, Hq=40, Wq=52, Hk=20, Wk=26)
    operands["query"] = operands["query"].permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
    for a, b in zip(attention_gradients(attend, operands), attention_gradients(attention_reference, exact(operands))):
        assert relative_error(a, b) < 1e-5


def test_global_attention_masked_keys():
    operands = attention_operands(torch.float32)
    operands["row_logits"][..., 0] = -float("inf")
    operands["key_logits"][..., -1] = -float("inf")
    found = attention_gradients(attend, operands)
    expected = attention_gradients(attention_reference, exact(operands))
    assert all(torch.isfinite(t).all() for t in found)
    assert relative_error(found[0], expected[0]) < 1e-5


def test_global_attention_gradcheck():
    operands = attention_operands(torch.float64, B=1, M=1, Hq=2, Wq=3, Hk=2, Wk=2, d=4)
    leaves = tuple(t.requires_grad_() for t in operands.values())
    function = lambda *terms: attend(**dict(zip(ATTENTION, terms)))  # noqa: E731
    torch.autograd.gradcheck(function, leaves, nondet_tol=1e-10)
    torch.autograd.gradgradcheck(function, leaves, nondet_tol=1e-10)


def test_global_attention_opcheck_compile_autocast():
    operands = attention_operands(torch.float32)
    leaves = [t.requires_grad_() for t in operands.values()]
    torch.library.opcheck(torch.ops.attn_plugins.global_attention.default, (*leaves, 0.5), rtol=1e-4, atol=1e-4)
    compiled = torch.compile(attend, fullgraph=True)
    eager = attention_gradients(attend, operands)
    for a, b in zip(attention_gradients(compiled, operands), eager):
        assert relative_error(a, b) < 1e-5
    with torch.autocast("cuda", torch.bfloat16):
        halved = attention_gradients(attend, operands)
    assert halved[0].dtype == torch.bfloat16
    assert relative_error(halved[0], eager[0]) < 3e-2


def test_global_attention_deterministic_mode(deterministic):
    operands = attention_operands(torch.bfloat16, Hq=20, Wq=20)
    first = attention_gradients(attend, operands)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, attention_gradients(attend, operands)))
