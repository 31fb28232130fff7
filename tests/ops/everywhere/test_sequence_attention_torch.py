"""Sequence attention in torch: gradients, dtypes, compilation, export, views, memory, errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.ops import sequence_attention
from tests.helpers.operator_checks import DEVICES, given
from tests.ops.everywhere.sequence_operands import ALL, TERMS, attend, gradients, operands, padding

NAMES = ("query", "key", "value", "band_logits", "outside_logits", "position_logits")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", TERMS)
def test_gradients_of_both_orders(terms, causal, shared, device):
    arguments = operands(terms, T=3, S=4, B=2, M=2, d=2, dv=2, device=device, shared=shared)
    mask = torch.tensor([[False, True, False, False], [False, False, False, True]], device=device)

    def function(*tensors: Tensor) -> Tensor:
        found = iter(tensors)
        return attend(tuple(None if t is None else next(found) for t in arguments), mask, causal=causal, scale=0.7)

    assert torch.autograd.gradcheck(function, given(*arguments), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given(*arguments), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [ALL, (True, True, False, False), (False, True, False, False)])
def test_opcheck(terms, dtype):
    arguments = (*operands(terms, dtype=dtype), padding(2, 7), 2, True, 0.5, None)
    torch.library.opcheck(torch.ops.attn_plugins.sequence_attention, arguments)
    output, lse = torch.ops.attn_plugins.sequence_attention(*arguments)
    needs = [t is not None for t in arguments[:6]]
    detached = [None if t is None else t.detach() for t in arguments[:6]]
    torch.library.opcheck(
        torch.ops.attn_plugins.sequence_attention_backward,
        (torch.randn_like(output), *detached[:6], output.detach(), lse.detach(), *arguments[6:], needs),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype, device):
    torch.manual_seed(5)
    arguments = operands(T=60, S=70, K=5, d=32, dv=32, dtype=dtype, device=device, shared=True)
    exact = tuple(t.detach().double().requires_grad_() for t in arguments)
    mask = padding(2, 70).to(device)
    found = attend(arguments, mask, scale=32**-0.5)
    expected = attend(exact, mask, scale=32**-0.5)
    assert found.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * tolerance, atol=2 * tolerance)
    grad = torch.randn_like(found)
    for a, b in zip(gradients(found, arguments, grad), gradients(expected, exact, grad.double())):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=4 * tolerance, atol=4 * tolerance * b.abs().max().item())


@pytest.mark.parametrize("outside", [None, -math.inf])
@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device, outside):
    query, key, value, band, _, _ = operands(T=7, dtype=torch.float32, device=device)
    mask = padding(2, 7).to(device)
    with torch.autocast(device, torch.bfloat16):
        output = sequence_attention(
            query.to(torch.bfloat16), key, value, band_logits=band, outside_logits=outside, key_padding_mask=mask
        )
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in (query, key, value, band))


class Layer(torch.nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.outside = outside

    def forward(self, query, key, value, band, mask):
        return sequence_attention(
            query, key, value, band_logits=band, outside_logits=self.outside, causal=True, key_padding_mask=mask
        )


@pytest.mark.parametrize("outside", [None, 0.5, -math.inf])
def test_compiled_and_exported(outside):
    layer = Layer(outside)
    arguments = (*operands(T=7, dtype=torch.float32, grad=False)[:4], padding(2, 7))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    T = torch.export.Dim("T", min=2, max=4096)
    along = [{2: T}, {2: T}, {2: T}, {2: T}, {1: T}]
    exported = torch.export.export(layer, arguments, dynamic_shapes=along).module()
    longer = (*operands(T=9, S=9, dtype=torch.float32, grad=False)[:4], padding(2, 9))
    for some in (arguments, longer):
        torch.testing.assert_close(compiled(*some), layer(*some))
        torch.testing.assert_close(exported(*some), layer(*some))


@pytest.mark.parametrize("outside", [None, -math.inf])
def test_onnx_runtime_gives_the_same(outside, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    layer, file = Layer(outside), tmp_path / "layer.onnx"
    arguments = (*operands(T=7, dtype=torch.float32, grad=False)[:4], padding(2, 7))
    torch.onnx.export(layer, arguments, file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    feeds = {node.name: tensor.numpy() for node, tensor in zip(session.get_inputs(), arguments)}
    (found,) = session.run(None, feeds)
    torch.testing.assert_close(torch.from_numpy(found), layer(*arguments), rtol=1e-5, atol=1e-5)


def test_views_give_what_copies_give(path):
    """Heads of a fused projection, time first as in fairseq; expanded heads; every other channel."""
    T, B, M, d, K = 60, 2, 3, 4, 5
    projected = torch.randn(T, B, M * (3 * d + K))
    q, k, v = (t.unflatten(-1, (M, d)).permute(1, 2, 0, 3) for t in projected[..., : 3 * M * d].chunk(3, -1))
    band = projected[..., 3 * M * d :].unflatten(-1, (M, K)).permute(1, 2, 0, 3)
    views = [(q, k, v, band), (q[..., ::2], k[..., ::2], v[..., 1::2], band[..., ::2])]
    views.append((q, k, v[:, :1].expand(-1, M, -1, -1), band[:1].expand(B, -1, -1, -1)))
    for some in views:
        leaves = [t.contiguous().requires_grad_() for t in some]
        expected = sequence_attention(*leaves[:3], band_logits=leaves[3], causal=True)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        some = [t.detach().requires_grad_() for t in some]
        found = sequence_attention(*some[:3], band_logits=some[3], causal=True)
        torch.testing.assert_close(found, expected)
        for a, b in zip(torch.autograd.grad(found.square().sum(), some), wanted):
            torch.testing.assert_close(a, b)


def test_the_result_may_be_changed_in_place():
    arguments = operands()
    output = attend(arguments)
    expected = output.detach() + 1
    output += 1
    torch.testing.assert_close(output, expected)
    output.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("B, T", [(0, 5), (2, 0), (2, 5)])
def test_empty_batches_and_shapes_without_data(B, T, device):
    arguments = operands(B=B, T=T, dtype=torch.float32, device=device)
    output = attend(arguments)
    assert output.shape == (B, 3, T, 5)
    if device == "cpu":
        output.sum().backward()
        assert all(t.grad.shape == t.shape and t.grad.isfinite().all() for t in arguments)


def test_flops():
    arguments = operands(T=6, S=8, B=2, M=3, d=4, dv=5)
    with FlopCounterMode(display=False) as counter:
        output = attend(arguments)
    pairs = 2 * 2 * 3 * 6 * 8
    assert counter.get_total_flops() == pairs * (4 + 5)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == pairs * (3 * 4 + 2 * 5)


def test_only_wanted_gradients(path):
    detached = operands(grad=False, shared=True)
    every = [t.clone().requires_grad_() for t in detached]
    expected = torch.autograd.grad(attend(every).square().sum(), every)
    for wanted in range(6):
        arguments = list(detached)
        arguments[wanted] = detached[wanted].clone().requires_grad_()
        attend(arguments).square().sum().backward()
        torch.testing.assert_close(arguments[wanted].grad, expected[wanted])


def test_threads_change_nothing():
    torch.manual_seed(6)
    arguments = operands(T=130, S=130, K=7, dtype=torch.float32, shared=True)
    threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            output = attend(arguments, causal=True)
            results.append([output, *torch.autograd.grad(output.square().sum(), arguments)])
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_memory_is_that_of_the_arguments(path):
    """Neither pass stores all logits: the test counts bytes beyond arguments and their gradients."""
    from tools.bench.memory import peak_memory

    B, M, T, d = 1, 4, 2048, 16
    arguments = operands((True, True, True, False), B=B, M=M, T=T, S=T, d=d, dv=d, K=7, dtype=torch.float32)
    logits = B * M * T * T * 4
    held = peak_memory(
        lambda: torch.autograd.grad(attend(arguments, causal=True).square().sum(), given(*arguments)), "cpu"
    )
    assert held < logits // 4


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(band_logits=torch.randn(2, 3, 5, 4)), "an odd number of them unless causal, got 4"),
        (dict(band_logits=torch.randn(2, 3, 5, 0)), "band_logits must have at least one tap"),
        (dict(band_logits=torch.randn(2, 3, 4, 3)), r"band_logits must have shape \(2, 3, 5, 3\), batch and heads"),
        (dict(outside_logits=torch.randn(2, 3)), r"outside_logits must have shape \(B, M, T\)"),
        (dict(outside_logits=torch.randn(2, 2, 5)), r"outside_logits must have shape \(2, 3, 5\)"),
        (dict(outside_logits=math.inf), "outside_logits must be finite or -inf, got inf"),
        (dict(outside_logits=math.nan), "outside_logits must be finite or -inf, got nan"),
        (dict(outside_logits="zero"), "outside_logits must be a Tensor, got str"),
        (dict(band_logits=None), "outside_logits needs band_logits"),
        (dict(position_logits=torch.randn(2, 3, 5, 5)), r"position_logits must have shape \(2, 3, 5, 7\)"),
        (dict(key=None), "query and key must be given together"),
        (
            dict(query=None, key=None, band_logits=None, outside_logits=None, position_logits=None),
            "query and key, band_logits or position_logits must be given",
        ),
        (dict(value=torch.randn(2, 3, 0, 5)), "value must have at least one key"),
        (dict(value=torch.randn(2, 3)), r"value must have shape \(B, M, S, dv\)"),
        (dict(value=torch.zeros(2, 3, 7, 5, dtype=torch.int64)), "value must be float16"),
        (dict(key=torch.randn(2, 3, 6, 4)), r"key must have shape \(2, 3, 7, 4\)"),
        (dict(key=torch.randn(2, 3, 7, 4, dtype=torch.float64)), "key must have value's dtype"),
        (dict(query=torch.randn(2, 2, 5, 4)), r"query must have value's batch and heads \(2, 3\)"),
        (dict(key_padding_mask=torch.zeros(2, 7)), "key_padding_mask must be a bool Tensor, True for padding, got"),
        (dict(key_padding_mask=[False]), "key_padding_mask must be a bool Tensor, True for padding, got list"),
        (dict(key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)), r"must have shape \(2, 7\)"),
        (dict(start=-1), "start must be at least 0 and below 2"),
        (
            dict(query=torch.randn(2, 3, 8, 4), band_logits=None, outside_logits=None, position_logits=None,
                 causal=True),
            "takes the 8 queries of query as the last positions of value, which has only 7 keys",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(change, words):
    arguments = dict(zip(NAMES, operands(dtype=torch.float32, grad=False))) | change
    with pytest.raises((ValueError, TypeError), match=words):
        sequence_attention(**arguments)
