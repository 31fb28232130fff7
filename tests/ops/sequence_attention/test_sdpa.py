"""Sequence attention by PyTorch's SDPA: on CPUs with AMX, and by flash attention on CUDA."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops import backend, explain, sequence_attention
from attn_plugins.ops.common import flash, library
from attn_plugins.ops.sequence_attention import sdpa as sdpa_sequence
from attn_plugins.ops.sequence_attention.operands import Options, Terms
from attn_plugins.ops.sequence_attention.sequence_attention import ATTEND

ROWS_ALONE = "it supports neither key_padding_mask nor segment_ids nor causal"
needs_binary = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")


def draw(*shapes, seed=0, dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def by_reference(tensors, grad_output):
    """Return the output and the gradients, in float32."""
    leaves = [t.detach().float().requires_grad_() for t in tensors]
    with backend("reference"):
        output = sequence_attention(*leaves[:3], position_logits=leaves[3] if len(leaves) > 3 else None, scale=0.3)
        return output, torch.autograd.grad(output, leaves, grad_output.float())


@pytest.fixture
def tiles(monkeypatch):
    """Let SDPA serve on any CPU, whatever the number of keys."""
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: True)
    monkeypatch.setattr(sdpa_sequence, "SHORT", 0)
    monkeypatch.setattr(sdpa_sequence, "SHORT_BACKWARD", 0)


@needs_binary
@pytest.mark.parametrize("position", [None, (1, 3, 5, 9), (2, 3, 5, 9), (2, 1, 1, 9)])
def test_on_the_cpu(position, tiles):
    tensors = draw((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16), *([] if position is None else [position]))
    if position is not None and position[2] > 1:
        tensors[3][0, -1, 2] = float("-inf")
    logits = dict(position_logits=tensors[3] if position else None, scale=0.3)
    assert explain(sequence_attention, *tensors[:3], **logits).serves == "sdpa"
    leaves = [t.requires_grad_() for t in tensors]
    output = sequence_attention(*leaves[:3], **logits)
    (grad_output,) = draw(output.shape, seed=1)
    expected, gradients = by_reference(leaves, grad_output)
    torch.testing.assert_close(output.float(), expected, atol=1e-2, rtol=1e-2)
    for gradient, right in zip(torch.autograd.grad(output, leaves, grad_output), gradients):
        torch.testing.assert_close(gradient.float(), right, atol=2e-2, rtol=2e-2)


@needs_binary
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_on_the_cpu_are_refused(dtype, tiles):
    tensors = draw((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16), dtype=dtype)
    assert explain(sequence_attention, *tensors).refusals["sdpa"] == "it supports only bfloat16 on CPUs"


@needs_binary
@pytest.mark.parametrize("innermost", ["heads", "positions"])
def test_gradients_are_stored_as_tracing_assumes(innermost, tiles):
    query, key, value = draw((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16))
    if innermost == "heads":
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    torch.library.opcheck(ATTEND._forward_operator, (*leaves, None, None, None, *Options(None, 0, False, 0.3)))
    output = sequence_attention(*leaves, scale=0.3)
    for grad, leaf in zip(torch.autograd.grad(output.sum(), leaves), leaves):
        assert grad.stride() == torch.empty_like(leaf).stride()


@needs_binary
def test_log_sum_exps_are_those_of_our_kernels(tiles):
    query, key, value, position = draw((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), (1, 1, 5, 7))
    query[0, 0, 0] = 0
    position[..., 3, :] = float("-inf")  # masks all keys
    position[0, 0, 0] = float("-inf")
    position[0, 0, 0, 2] = 0  # the sum of one key's weights is exactly 1, its logarithm 0
    terms, options = Terms(query, key, value, None, None, position), Options(None, 0, False, 0.3)
    results = []
    for name in ("sdpa", "cpu"):
        with backend(name):
            results.append(ATTEND._forward(*terms, *options))
    (output, lse), (expected_output, expected) = results
    assert lse[0, 0, 0] == 0
    assert (lse[:, :, 3] == float("inf")).all()
    torch.testing.assert_close(lse, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(output, expected_output, atol=1e-2, rtol=1e-2)
    assert (output.stride(), lse.stride()) == (expected_output.stride(), expected.stride())


@needs_binary
@pytest.mark.parametrize("first, second", [("cpu", "sdpa"), ("sdpa", "cpu"), ("sdpa", "sdpa")])
def test_a_backward_of_another_forward_and_without_the_output(first, second, tiles):
    query, key, value, grad = draw((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 5, 16))
    terms, options = Terms(query, key, value, None, None, None), Options(None, 0, False, 0.3)
    with backend(first):
        output, lse = ATTEND._forward(*terms, *options)
    for kept in (output, None):
        with backend(second):
            grads = ATTEND._backward(grad, *terms, kept, lse, *options, [True, False, True, False, False, False])
        assert grads[1].numel() == 0
        for one, right in zip(grads[:3:2], by_reference([query, key, value], grad)[1][::2]):
            torch.testing.assert_close(one.float(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "change,reason",
    [
        (dict(causal=True), ROWS_ALONE),
        (dict(segment_ids=torch.zeros(1, 6, dtype=torch.int32)), ROWS_ALONE),
        (dict(key_padding_mask=torch.zeros(1, 6, dtype=torch.bool)), ROWS_ALONE),
        (
            dict(band_logits=torch.zeros(1, 1, 6, 3, dtype=torch.bfloat16)),
            "it supports content and position logits only",
        ),
    ],
)
def test_what_sdpa_does_not_know(change, reason, tiles):
    query, key, value = draw(*[(1, 1, 6, 4)] * 3)
    choice = explain(sequence_attention, query, key, value, **change)
    assert choice.serves != "sdpa"
    assert choice.refusals["sdpa"] == reason


def test_few_keys_and_other_cpus(monkeypatch):
    query, key, value = draw(*[(1, 1, 6, 4)] * 3)
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: False)
    refused = explain(sequence_attention, query, key, value).refusals["sdpa"]
    assert refused == "this CPU has no AMX for bfloat16"
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: True)
    refused = explain(sequence_attention, query, key, value).refusals["sdpa"]
    assert refused == "below 64 keys our kernels are faster, and there are 6"
    query, key, value = draw(*[(1, 1, 64, 4)] * 3)
    assert explain(sequence_attention, query, key, value).serves == "sdpa"
    terms, options = Terms(query, key, value, None, None, None), Options(None, 0, False, 1.0)
    reason = sdpa_sequence.refuses_backward(terms, options)
    assert reason == "below 1024 keys our kernels are faster, and there are 64"
    position = terms._replace(position_logits=torch.zeros(1, 1, 64, 64))
    assert "no gradients of position logits" in sdpa_sequence.refuses_backward(position, options)


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
@pytest.mark.parametrize("layout", ["heads outermost", "heads innermost", "crop", "turned", "odd offset", "rows of 20"])
def test_flash_attention_takes_content_alone(layout, monkeypatch):
    """Check the calls of flash attention on tensors without data, which needs no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(flash, "_has_flash", lambda index: True)

    def laid_out(tensor):
        if layout == "heads outermost":
            return tensor
        if layout == "crop":
            return tensor.repeat(1, 1, 2, 1)[:, :, ::2]
        if layout == "turned":
            return tensor.mT.contiguous().mT
        if layout == "odd offset":
            return torch.cat((tensor.new_empty(3), tensor.flatten()))[3:].view(tensor.shape)
        if layout == "rows of 20":
            return torch.cat((tensor, tensor[..., :4]), -1)[..., :16]
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    with FakeTensorMode():
        query = laid_out(torch.empty(2, 3, 5, 16, device="cuda", dtype=torch.float16))
        key, value = (laid_out(torch.empty(2, 3, 9, 16, device="cuda", dtype=torch.float16)) for _ in range(2))
        assert explain(sequence_attention, query, key, value).serves == "sdpa"
        assert explain(sequence_attention, query[..., :6], key[..., :6], value[..., :6]).serves != "sdpa"
        assert explain(sequence_attention, query.float(), key.float(), value.float()).serves != "sdpa"
        terms, options = Terms(query, key, value, None, None, None), Options(None, 0, False, 0.3)
        assert sdpa_sequence.refuses_backward(terms, options) is None
        output, lse = sdpa_sequence.forward(terms, options)
        expected = ATTEND.fake(terms, options)
        for result, right in zip((output, lse), expected):
            assert (result.shape, result.stride(), result.dtype) == (right.shape, right.stride(), right.dtype)
        needs = dict.fromkeys(terms._fields, False) | dict(query=True, value=True)
        grads = sdpa_sequence.backward(torch.empty_like(output), terms, options, output, lse, needs)
        assert grads.keys() == {"query", "value"}
        for grad, term in ((grads["query"], query), (grads["value"], value)):
            assert grad.shape == term.shape
            assert grad.stride() == torch.empty_like(term).stride()


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
def test_flash_attention_is_refused_in_words(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(flash, "_has_flash", lambda index: True)
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 2, 4, 16, device="cuda", dtype=torch.float16) for _ in range(3))
        position = torch.empty(1, 2, 4, 4, device="cuda", dtype=torch.float16)

        def reason(*tensors, **options):
            return explain(sequence_attention, *tensors, **options).refusals["sdpa"]

        assert reason(query, key, value, position_logits=position) == "it supports content only"
        assert reason(query, key, value, causal=True) == ROWS_ALONE
        assert "one width, not 16 and 8" in reason(query, key, value[..., :8])
        for scale in (-2.0, 0.0):
            assert f"the scale is not positive, and it is {scale:g}" in reason(query, key, value, scale=scale)
        many = query.expand(65536, 2, 4, 16)
        assert "up to 65535 images and heads, not 65536 and 2" in reason(many, many, many)
        long = torch.empty(1, 32, 2**19, 128, device="cuda", dtype=torch.float16)
        assert f"backward takes up to 2**31 - 1 sums, and there are {2**31}" in reason(long, *[long[:, :, :4]] * 2)
        monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
        assert "switched flash attention off" in reason(query, key, value)


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
def test_flash_attention_is_explained_without_a_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    flash._has_flash.cache_clear()
    with FakeTensorMode():
        content = [torch.empty(1, 2, 4, 16, device="cuda", dtype=torch.float16)] * 3
        reason = explain(sequence_attention, *content).refusals["sdpa"]
    assert reason == "this device or build of torch has no flash attention"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("T, S, d", [(64, 64, 64), (33, 70, 24), (1, 5, 8), (200, 130, 128)])
def test_on_cuda(T, S, d, dtype):
    tensors = draw((2, 3, T, d), (2, 3, S, d), (2, 3, S, d), dtype=dtype, device="cuda")
    assert explain(sequence_attention, *tensors).serves == "sdpa"
    leaves = [t.requires_grad_() for t in tensors]
    output = sequence_attention(*leaves, scale=0.3)
    (grad_output,) = draw(output.shape, seed=1, dtype=dtype, device="cuda")
    expected, gradients = by_reference(leaves, grad_output)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)
    for gradient, right in zip(torch.autograd.grad(output, leaves, grad_output), gradients):
        torch.testing.assert_close(gradient.float(), right, atol=tolerance * right.abs().max().item(), rtol=tolerance)


@needs_binary
@pytest.mark.parametrize("turned", range(4))
def test_widths_that_are_not_contiguous(turned, tiles):
    """PyTorch's kernels for AMX would read other numbers."""
    tensors = draw((2, 3, 70, 16), (2, 3, 96, 16), (2, 3, 96, 16))
    if turned < 3:
        tensors[turned] = tensors[turned].mT.contiguous().mT
    (grad_output,) = draw((2, 3, 70, 16), seed=1)
    if turned == 3:
        grad_output = grad_output.mT.contiguous().mT
    leaves = [t.requires_grad_() for t in tensors]
    output = sequence_attention(*leaves, scale=0.3)
    expected, gradients = by_reference(leaves, grad_output)
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
    for gradient, right in zip(torch.autograd.grad(output, leaves, grad_output), gradients):
        torch.testing.assert_close(gradient.float(), right, atol=4e-2, rtol=4e-2)
