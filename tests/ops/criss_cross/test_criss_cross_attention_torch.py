"""Criss-cross attention in torch: gradients, dtypes, compilation, views, memory, threads, errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.ops import criss_cross_attention
from attn_plugins.ops.criss_cross import products
from tests.helpers.operator_checks import DEVICES, check_autocast, check_compiled_and_exported, given
from tests.ops.criss_cross.operands import LOGITS, operands


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logits", LOGITS)
def test_gradients_of_both_orders(logits, device):
    terms = operands((3, 4), logits, batch=1, heads=2, d=2, dv=3, device=device)

    def function(*tensors: Tensor) -> Tensor:
        found = iter(tensors)
        return criss_cross_attention(*(None if t is None else next(found) for t in terms), scale=0.6)

    assert torch.autograd.gradcheck(function, given(*terms))
    assert torch.autograd.gradgradcheck(function, given(*terms))


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck(recompute, logits, dtype):
    terms = operands((4, 9), logits, batch=1, heads=2, dtype=dtype)
    torch.library.opcheck(torch.ops.attn_plugins.criss_cross_attention, (*terms, 0.5, recompute))
    output, *kept = torch.ops.attn_plugins.criss_cross_attention(*terms, 0.5, recompute)
    assert [each.numel() > 0 for each in kept] == [not recompute, recompute]
    needs = [t is not None for t in terms]
    detached = [None if t is None else t.detach() for t in terms]
    torch.library.opcheck(
        torch.ops.attn_plugins.criss_cross_attention_backward,
        (torch.randn_like(output), *detached, *(each.detach() for each in (output, *kept)), 0.5, recompute, needs),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype, logits, device):
    torch.manual_seed(0)
    terms = operands((18, 21), logits, d=32, dv=32, dtype=dtype, device=device)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in terms]
    found = criss_cross_attention(*terms, scale=32**-0.5)
    expected = criss_cross_attention(*exact, scale=32**-0.5)
    assert found.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * tolerance, atol=2 * tolerance)
    grad = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, given(*exact), grad.double())
    for a, b in zip(torch.autograd.grad(found, given(*terms), grad), wanted):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=4 * tolerance, atol=4 * tolerance * b.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_half_precision_are_not_rounded(device):
    """Two keys have logits that differ by 1 in 2000, which half precision could not represent."""
    query = torch.zeros(1, 1, 1, 2, 2, dtype=torch.bfloat16, device=device)
    key, value = torch.zeros_like(query), torch.zeros_like(query)
    query[..., :] = torch.tensor([44.0, 1.0])
    key[..., 0, :], key[..., 1, :] = torch.tensor([44.0, 0.0]), torch.tensor([44.0, 1.0])
    value[..., 1, :] = 1
    found = criss_cross_attention(query, key, value)
    expected = torch.full_like(found, 1 / (1 + math.exp(-1)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    check_autocast(criss_cross_attention, operands(dtype=torch.float32, device=device), device)


@pytest.mark.parametrize("logits", LOGITS)
def test_compiled_and_exported(logits):
    check_compiled_and_exported(
        lambda *terms: criss_cross_attention(*terms, scale=0.5),
        operands(logits=logits, dtype=torch.float32, grad=False),
    )


def test_compiled_gradients_of_any_size():
    torch._dynamo.reset()
    compiled = torch.compile(criss_cross_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in ((5, 7), (9, 4)):
        terms = operands(size, dtype=torch.float32)
        grad = torch.randn_like(terms[2])
        wanted = torch.autograd.grad(criss_cross_attention(*terms), terms, grad)
        for a, b in zip(torch.autograd.grad(compiled(*terms), terms, grad), wanted):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_views_give_what_copies_give(device):
    """Heads of channels-last, fused and channels-first projections, a crop, and expanded heads."""
    B, M, H, W, d = 2, 3, 5, 6, 4

    def gradients(*tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        output = criss_cross_attention(*leaves)
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device)

    position = draw(B, H, W, M * (H + W)).unflatten(-1, (M, H + W)).permute(0, 3, 1, 2, 4)
    views = {
        "projections": [draw(B, H, W, M * d).unflatten(-1, (M, d)).permute(0, 3, 1, 2, 4) for _ in range(3)],
        "fused": [part.unflatten(-1, (M, d)).permute(0, 3, 1, 2, 4) for part in draw(B, H, W, 3 * M * d).chunk(3, -1)],
        "channels first": [draw(B, M, d, H, W).permute(0, 1, 3, 4, 2) for _ in range(3)],
        "crop": [draw(B, M, H + 2, W + 3, d)[:, :, 1:-1, 2:-1] for _ in range(3)],
        "stretched": [draw(B, 1, H, W, d).expand(B, M, H, W, d) for _ in range(3)],
        "every second": [draw(B, M, H, W, 2 * d)[..., ::2] for _ in range(3)],
    }
    for name, tensors in views.items():
        for logits in (position, position.transpose(2, 3).contiguous().transpose(2, 3)):
            found = gradients(*tensors, logits)
            expected = gradients(*(t.contiguous() for t in (*tensors, logits)))
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_projections_are_read_in_few_products():
    """Channels-last heads need no copy: one product per head for rows, one per image for columns."""
    B, M, H, W, d = 2, 3, 5, 6, 4
    query, key = (torch.randn(B, H, W, M, d).permute(0, 3, 1, 2, 4) for _ in range(2))
    logits = torch.empty(B, H, W, M, 16).permute(0, 3, 1, 2, 4)
    column, row = logits[..., :H].transpose(2, 3), logits[..., 8 : 8 + W]
    batches = list(products._batches(row, query, key.mT))
    assert len(batches) == M
    assert all(view.data_ptr() < query.data_ptr() + query.nbytes for _, view, _ in batches)
    assert len(list(products._batches(column, query.transpose(2, 3), key.transpose(2, 3).mT))) == B


def test_nothing_uninitialised_is_read():
    """Results, padding and workspace start as NaN."""
    terms = operands((5, 7), dtype=torch.float32)
    grad = torch.randn_like(terms[2])
    expected = torch.autograd.grad(criss_cross_attention(*terms), terms, grad)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        assert torch.empty(3).isnan().all()
        found = torch.autograd.grad(criss_cross_attention(*terms), terms, grad)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_batches_and_shapes_without_data(batch, device):
    terms = operands(batch=batch, dtype=torch.float32, device=device)
    output = criss_cross_attention(*terms)
    assert output.shape == (batch, 3, 5, 7, 5)
    if device == "cpu":
        output.sum().backward()
        assert all(t.grad.shape == t.shape for t in terms)


def test_the_result_may_be_changed_in_place():
    """The backward does not read the result, so that a residual added in place costs no memory."""
    terms, x = operands(), torch.randn(2, 3, 5, 7, 5, dtype=torch.float64)
    expected = torch.autograd.grad(criss_cross_attention(*terms).square().sum(), terms)
    output = criss_cross_attention(*terms)
    output += x
    found = torch.autograd.grad((output - x).square().sum(), terms)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_flops():
    terms = operands((6, 7), batch=2, heads=3, d=4, dv=5)
    with FlopCounterMode(display=False) as counter:
        output = criss_cross_attention(*terms)
    pairs = 2 * 2 * 3 * 42 * 13
    assert counter.get_total_flops() == pairs * (4 + 5)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == pairs * 2 * (4 + 5)


def test_only_wanted_gradients():
    terms = operands(grad=False)
    every = [t.clone().requires_grad_() for t in terms]
    expected = torch.autograd.grad(criss_cross_attention(*every).square().sum(), every)
    for wanted in range(4):
        leaves = list(terms)
        leaves[wanted] = leaves[wanted].clone().requires_grad_()
        criss_cross_attention(*leaves).square().sum().backward()
        torch.testing.assert_close(leaves[wanted].grad, expected[wanted])


def test_threads_change_nothing():
    terms = operands((20, 30), d=16, dv=16, dtype=torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            output = criss_cross_attention(*terms)
            results.append([output, *torch.autograd.grad(output.square().sum(), terms)])
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(key=None), "query and key must be given together"),
        (dict(query=None, key=None, position_logits=None), "query and key, or position_logits, must be given"),
        (dict(value=torch.randn(2, 3, 0, 7, 5)), "value must have at least one position"),
        (dict(value=torch.randn(2, 3, 5, 5)), r"value must have shape \(B, M, H, W, dv\), got \(2, 3, 5, 5\)"),
        (dict(key=torch.randn(2, 3, 5, 6, 4)), r"key must have query's shape \(2, 3, 5, 7, 4\)"),
        (dict(query=torch.randn(2, 2, 5, 7, 4)), r"query must have value's first axes \(2, 3, 5, 7\)"),
        (dict(query=torch.randn(2, 3, 5, 4)), r"query must have shape \(B, M, H, W, d\)"),
        (
            dict(position_logits=torch.randn(2, 3, 5, 7, 11)),
            r"must have shape \(2, 3, 5, 7, 12\), H \+ W logits per position of value",
        ),
        (dict(position_logits=torch.randn(2, 2, 5, 7, 12)), "or size 1 in either of the first two axes"),
        (dict(position_logits=torch.randn(5, 7, 12)), r"position_logits must have shape \(B, M, H, W, H \+ W\)"),
        (dict(value=torch.zeros(2, 3, 5, 7, 5, dtype=torch.int64)), "value must be float16"),
        (dict(key=torch.randn(2, 3, 5, 7, 4, dtype=torch.float64)), "key must have value's dtype"),
        (dict(position_logits=[1.0]), "position_logits must be a Tensor, got list"),
    ],
)
def test_bad_input_is_one_clear_error(change, words):
    query, key, value, position = operands(dtype=torch.float32, grad=False)
    arguments = dict(query=query, key=key, value=value, position_logits=position) | change
    with pytest.raises((ValueError, TypeError), match=words):
        criss_cross_attention(**arguments)
