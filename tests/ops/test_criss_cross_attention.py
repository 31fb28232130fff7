"""Criss-cross attention: the reference against plain loops, the products against the reference, torch's machinery."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.ops import _criss_cross_products as products
from attn_plugins.ops import criss_cross_attention, global_attention, reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LOGITS = ["content", "position", "both"]
SIZES = [(5, 7), (7, 5), (8, 8), (1, 6), (6, 1), (1, 1), (17, 3)]


def operands(
    size=(5, 7), logits="both", *, batch=2, heads=3, d=4, dv=5, dtype=torch.float64, device="cpu", grad=True
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    def draw(width: int) -> Tensor:
        return torch.randn(batch, heads, *size, width, dtype=dtype, device=device, requires_grad=grad)

    content = logits in ("content", "both")
    return (
        draw(d) if content else None,
        draw(d) if content else None,
        draw(dv),
        draw(sum(size)) if logits in ("position", "both") else None,
    )


def given(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def by_loops(query, key, value, position, scale) -> Tensor:
    """Every query, key and channel by itself; the own position once, with the logit that the row has for it."""
    B, M, H, W, _ = value.shape
    output = torch.zeros_like(value)
    for b, m, h, w in itertools.product(range(B), range(M), range(H), range(W)):
        keys = {(i, w): i for i in range(H) if i != h} | {(h, j): H + j for j in range(W)}
        assert len(keys) == H + W - 1
        weights = {}
        for (i, j), entry in keys.items():
            logit = 0.0 if position is None else position[b, m, h, w, entry].item()
            if query is not None:
                logit += scale * sum(
                    query[b, m, h, w, n].item() * key[b, m, i, j, n].item() for n in range(query.shape[-1])
                )
            weights[i, j] = math.exp(logit)
        for (i, j), weight in weights.items():
            output[b, m, h, w] += weight / sum(weights.values()) * value[b, m, i, j]
    return output


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("size", [(3, 4), (4, 2), (1, 3), (3, 1), (1, 1)])
def test_reference_is_the_formula(size, logits):
    terms = operands(size, logits, batch=1, heads=2, grad=False)
    torch.testing.assert_close(reference.criss_cross_attention(*terms, 0.7), by_loops(*terms, 0.7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("size", SIZES)
def test_products_equal_the_reference(size, batch, heads, logits, dtype, device):
    torch.manual_seed(0)
    terms = operands(size, logits, batch=batch, heads=heads, d=19, dv=18, dtype=dtype, device=device)
    expected = reference.criss_cross_attention(*terms, 0.3)
    found = criss_cross_attention(*terms, scale=0.3)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, given(*terms), grad)
    for gradient, other in zip(torch.autograd.grad(found, given(*terms), grad), wanted):
        torch.testing.assert_close(gradient, other, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-5)


def test_mmcv_agrees():
    """mmcv's module around our operator: the own position is the row's, the logits are not scaled."""
    module = pytest.importorskip("mmcv.ops.cc_attention").CrissCrossAttention(16).double()
    torch.nn.init.ones_(module.gamma.scale)
    x = torch.randn(2, 16, 6, 5, dtype=torch.float64)
    query, key, value = (
        conv(x).unsqueeze(1).permute(0, 1, 3, 4, 2) for conv in (module.query_conv, module.key_conv, module.value_conv)
    )
    output = criss_cross_attention(query, key, value).squeeze(1).permute(0, 3, 1, 2)
    torch.testing.assert_close(x + output, module(x))


def test_a_map_of_one_row_or_column_is_global_attention():
    for size in ((1, 9), (9, 1)):
        query, key, value, _ = operands(size, grad=False)
        torch.testing.assert_close(
            criss_cross_attention(query, key, value, scale=0.5), global_attention(query, key, value, scale=0.5)
        )


def test_two_rounds_reach_every_position():
    """What recurrence is for: after one round a value is on its cross, after two it is everywhere."""
    query, key, value, _ = operands((4, 5), batch=1, heads=1, grad=False)
    changed = value.clone()
    changed[:, :, 1, 2] += 1
    once, again = criss_cross_attention(query, key, value), criss_cross_attention(query, key, changed)
    cross = torch.zeros(4, 5, dtype=torch.bool)
    cross[1], cross[:, 2] = True, True
    assert torch.equal((once != again).any(-1)[0, 0], cross)
    assert (criss_cross_attention(query, key, once) != criss_cross_attention(query, key, again)).any(-1).all()


def test_probabilities_are_the_weights():
    terms = operands(grad=False)
    H, W = terms[2].shape[2:4]
    found = reference.criss_cross_probabilities(*terms, 0.3)
    weights = torch.ops.attn_plugins.criss_cross_attention(*terms, 0.3)[1]
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))
    torch.testing.assert_close(weights[..., :H], found[..., :H])
    torch.testing.assert_close(weights[..., products.aligned(H) :][..., :W], found[..., H:])
    assert not found[..., :H].diagonal(dim1=2, dim2=4).any()


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
def test_opcheck(logits, dtype):
    terms = operands((4, 9), logits, batch=1, heads=2, dtype=dtype)
    torch.library.opcheck(torch.ops.attn_plugins.criss_cross_attention, (*terms, 0.5))
    output, weights = torch.ops.attn_plugins.criss_cross_attention(*terms, 0.5)
    needs = [t is not None for t in terms]
    detached = [None if t is None else t.detach() for t in terms]
    torch.library.opcheck(
        torch.ops.attn_plugins.criss_cross_attention_backward,
        (torch.randn_like(output), *detached, weights.detach(), 0.5, needs),
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
    """Two keys whose logits differ by 1 in 2000: in half precision both would be equal."""
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
    terms = operands(dtype=torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = criss_cross_attention(*terms)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in terms)


@pytest.mark.parametrize("logits", LOGITS)
def test_compiled_and_exported(logits):
    terms = operands(logits=logits, dtype=torch.float32, grad=False)

    class Layer(torch.nn.Module):
        def forward(self, query, key, value, position):
            return criss_cross_attention(query, key, value, position, scale=0.5)

    layer = Layer()
    expected = layer(*terms)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(*terms), expected)
    torch.testing.assert_close(torch.export.export(layer, terms).module()(*terms), expected)


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
    """Heads of a channels-last projection, of a fused one, of a channels-first one, a crop, a stretched head."""
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
    """Channels-last heads need no copy: rows take one product per head, columns one per image."""
    B, M, H, W, d = 2, 3, 5, 6, 4
    query, key = (torch.randn(B, H, W, M, d).permute(0, 3, 1, 2, 4) for _ in range(2))
    logits = torch.empty(B, H, W, M, 16).permute(0, 3, 1, 2, 4)
    column, row = logits[..., :H].transpose(2, 3), logits[..., 8 : 8 + W]
    batches = list(products._batches(row, query, key.mT))
    assert len(batches) == M
    assert all(view.data_ptr() < query.data_ptr() + query.nbytes for _, view, _ in batches)
    assert len(list(products._batches(column, query.transpose(2, 3), key.transpose(2, 3).mT))) == B


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (1, 1)])
def test_shared_position_logits(shape):
    query, key, value, position = operands()
    shared = position[: shape[0], : shape[1]].detach().requires_grad_()
    spread = shared.detach().expand_as(position).clone().requires_grad_()
    one, other = criss_cross_attention(query, key, value, shared), criss_cross_attention(query, key, value, spread)
    torch.testing.assert_close(one, other)
    grad = torch.randn_like(one)
    one.backward(grad)
    other.backward(grad)
    torch.testing.assert_close(shared.grad, spread.grad.sum_to_size(shared.shape))


@pytest.mark.parametrize("device", DEVICES)
def test_masked_positions_and_extreme_logits(device):
    query, key, value, position = operands((3, 4), device=device, grad=False)
    position[0, 0, 1, 2] = -math.inf
    position[1, :, :, :, 5] = -math.inf
    leaves = [t.requires_grad_() for t in (query, key, value, position)]
    output = criss_cross_attention(*leaves)
    torch.testing.assert_close(output, reference.criss_cross_attention(*leaves, 1.0))
    assert not output[0, 0, 1, 2].any()
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[3][0, 0, 1, 2].any()
    assert not gradients[3][1, :, :, :, 5].any()
    large = torch.full((1, 1, 2, 2, 4), 3e4, device=device)
    large[..., 2] = 6e4  # column 0 of the own row
    one = torch.randn(1, 1, 2, 2, 3, device=device)
    expected = one[:, :, :, :1].expand_as(one)
    torch.testing.assert_close(criss_cross_attention(None, None, one, large), expected)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 7.0])
def test_the_own_entry_of_the_column_is_not_read(number):
    query, key, value, position = operands((3, 4))
    expected = criss_cross_attention(query, key, value, position)
    other = position.detach().clone()
    other[..., :3].diagonal(dim1=2, dim2=4).fill_(number)
    other.requires_grad_()
    found = criss_cross_attention(query, key, value, other)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    gradient = torch.autograd.grad(found.square().sum(), other)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), position)[0])
    assert not gradient[..., :3].diagonal(dim1=2, dim2=4).any()


def test_nothing_uninitialised_is_read():
    """Results, padding and scratch come from memory that holds NaN."""
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
    """The gradient does not read it: a residual costs no memory."""
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
        (dict(position_logits=torch.randn(2, 3, 5, 7, 11)), r"must have shape \(2, 3, 5, 7, 12\), H \+ W logits"),
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
