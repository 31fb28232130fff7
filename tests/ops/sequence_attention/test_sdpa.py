"""Sequence attention by PyTorch's SDPA: on CPUs with AMX, and by flash attention on CUDA."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.core import flash, library
from attn_plugins.ops import backend, explain, sequence_attention
from attn_plugins.ops.sequence_attention import sdpa as sdpa_sequence
from attn_plugins.ops.sequence_attention.operands import Options, Terms
from attn_plugins.ops.sequence_attention.sequence_attention import ATTEND
from tests.ops.contract_examples import Example
from tests.ops.sequence_attention import operands
from tests.ops.test_contract import FIRST, assert_close, differentiate
from tests.ops.test_contract_backends import BRAIN, DOUBLE, HALF, LAYOUTS, SINGLE, check

ROWS_ALONE = "it supports neither key_padding_mask nor segment_ids nor causal"
OPTIONS = Options(None, 0, False, 0.7)
needs_binary = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")
without_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")


def drawn(*, position=False, dtype=BRAIN, device="cpu", **extents) -> Example:
    terms = "query key position_logits" if position else "query key"
    return operands.drawn(terms, dtype, device, **{**dict(B=2, M=3, T=5, S=9, d=16, dv=16), **extents})


def terms_of(some: Example) -> Terms:
    return Terms(*map(some.tensors.get, Terms._fields))


@pytest.fixture
def tiles(monkeypatch):
    """Let SDPA serve on any CPU, whatever the number of keys."""
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: True)
    monkeypatch.setattr(sdpa_sequence, "SHORT", 0)
    monkeypatch.setattr(sdpa_sequence, "SHORT_BACKWARD", 0)


@needs_binary
@pytest.mark.parametrize("lone", [None, (0,), (), (1, 2)], ids=str)
def test_on_the_cpu(lone, tiles):
    some = drawn(position=lone is not None, lone=dict(position_logits=lone or ()))
    if lone in ((0,), ()):
        some.tensors["position_logits"][0, -1, 2] = -math.inf
    assert explain(sequence_attention, **some.tensors).serves == "sdpa"
    check(some, FIRST, BRAIN, times=2)


@needs_binary
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE])
def test_other_dtypes_on_the_cpu_are_refused(dtype, tiles):
    refusals = explain(sequence_attention, **drawn(dtype=dtype).tensors).refusals
    assert refusals["sdpa"] == "it supports only bfloat16 on CPUs"


@needs_binary
@pytest.mark.parametrize("innermost", ["heads", "positions"])
def test_gradients_are_stored_as_tracing_assumes(innermost, tiles):
    some, layout = drawn(), LAYOUTS["heads innermost"] if innermost == "heads" else torch.clone
    leaves = [layout(t).requires_grad_() for t in some.tensors.values()]
    query, key, value = leaves[1], leaves[2], leaves[0]
    torch.library.opcheck(ATTEND._forward_operator, (query, key, value, None, None, None, *OPTIONS))
    output = sequence_attention(query, key, value)
    for grad, leaf in zip(torch.autograd.grad(output.sum(), leaves), leaves):
        assert grad.stride() == torch.empty_like(leaf).stride()


@needs_binary
def test_log_sum_exps_are_those_of_our_kernels(tiles):
    terms = terms_of(drawn(position=True, B=1, M=2, S=7, d=8, dv=8))
    terms.query[0, 0, 0] = 0
    terms.position_logits[..., 3, :] = terms.position_logits[0, 0, 0] = -math.inf  # the former masks all keys
    terms.position_logits[0, 0, 0, 2] = 0  # the sum of one key's weights is exactly 1, its logarithm 0
    results = []
    for name in ("sdpa", "cpu"):
        with backend(name):
            results.append(ATTEND._forward(*terms, *OPTIONS))
    (output, lse), (expected_output, expected) = results
    assert lse[0, 0, 0] == 0
    assert (lse[:, :, 3] == math.inf).all()
    torch.testing.assert_close(lse, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(output, expected_output, atol=1e-2, rtol=1e-2)
    assert (output.stride(), lse.stride()) == (expected_output.stride(), expected.stride())


@needs_binary
@pytest.mark.parametrize("first, second", [("cpu", "sdpa"), ("sdpa", "cpu"), ("sdpa", "sdpa")])
def test_a_backward_of_another_forward_and_without_the_output(first, second, tiles):
    some = drawn()
    terms, expected = terms_of(some), check(some, "cpu", BRAIN)
    grad = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=DOUBLE).bfloat16()
    with backend(first):
        output, lse = ATTEND._forward(*terms, *OPTIONS)
    for kept in (output, None):
        with backend(second):
            grads = ATTEND._backward(grad, *terms, kept, lse, *OPTIONS, [True, False, True, False, False, False])
        assert grads[1].numel() == 0
        assert_close(dict(query=grads[0], value=grads[2]), {n: expected[n] for n in ("query", "value")}, 3e-2)


@pytest.mark.parametrize(
    "change,reason",
    [
        (dict(causal=True), ROWS_ALONE),
        (dict(segment_ids=torch.zeros(1, 6, dtype=torch.int32)), ROWS_ALONE),
        (dict(key_padding_mask=torch.zeros(1, 6, dtype=torch.bool)), ROWS_ALONE),
        (dict(band_logits=torch.zeros(1, 1, 6, 3, dtype=BRAIN)), "it supports content and position logits only"),
    ],
)
def test_what_sdpa_does_not_know(change, reason, tiles):
    choice = explain(sequence_attention, *[torch.zeros(1, 1, 6, 4, dtype=BRAIN)] * 3, **change)
    assert choice.serves != "sdpa"
    assert choice.refusals["sdpa"] == reason


def test_few_keys_and_other_cpus(monkeypatch):
    few, many = ([torch.zeros(1, 1, S, 4, dtype=BRAIN)] * 3 for S in (6, 64))
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: False)
    assert explain(sequence_attention, *few).refusals["sdpa"] == "this CPU has no AMX for bfloat16"
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: True)
    preferred = explain(sequence_attention, *few).preferences["sdpa"]
    assert preferred == "below 64 keys our kernels are faster, and there are 6"
    assert explain(sequence_attention, *many).serves == "sdpa"
    terms = Terms(*many, None, None, None)
    assert sdpa_sequence.cannot_backward(terms, OPTIONS) is None
    reason = sdpa_sequence.BACKEND.refusal(terms, OPTIONS, backward=True)
    assert reason == "below 1024 keys our kernels are faster, and there are 64"
    assert sdpa_sequence.BACKEND.refusal(Terms(*few, None, None, None), OPTIONS, backward=True, forced=True) is None
    position = terms._replace(position_logits=torch.zeros(1, 1, 64, 64))
    assert "no gradients of position logits" in sdpa_sequence.cannot_backward(position, OPTIONS)


@without_cuda
@pytest.mark.parametrize("layout", ["heads outermost", "heads innermost", "crop", "turned", "odd offset", "rows of 20"])
def test_flash_attention_takes_content_alone(layout, monkeypatch):
    """Check the calls of flash attention on tensors without data, which needs no GPU."""
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
        query = laid_out(torch.empty(2, 3, 5, 16, device="cuda", dtype=HALF))
        key, value = (laid_out(torch.empty(2, 3, 9, 16, device="cuda", dtype=HALF)) for _ in range(2))
        assert explain(sequence_attention, query, key, value).serves == "sdpa"
        assert explain(sequence_attention, query[..., :6], key[..., :6], value[..., :6]).serves != "sdpa"
        assert explain(sequence_attention, query.float(), key.float(), value.float()).serves != "sdpa"
        terms = Terms(query, key, value, None, None, None)
        assert sdpa_sequence.cannot_backward(terms, OPTIONS) is None
        output, lse = sdpa_sequence.forward(terms, OPTIONS)
        expected = ATTEND.fake(terms, OPTIONS)
        for result, right in zip((output, lse), expected):
            assert (result.shape, result.stride(), result.dtype) == (right.shape, right.stride(), right.dtype)
        needs = dict.fromkeys(terms._fields, False) | dict(query=True, value=True)
        grads = sdpa_sequence.backward(torch.empty_like(output), terms, OPTIONS, output, lse, needs)
        assert grads.keys() == {"query", "value"}
        for grad, term in ((grads["query"], query), (grads["value"], value)):
            assert grad.shape == term.shape
            assert grad.stride() == torch.empty_like(term).stride()


@without_cuda
def test_flash_attention_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(flash, "_has_flash", lambda index: True)
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 2, 4, 16, device="cuda", dtype=HALF) for _ in range(3))
        position = torch.empty(1, 2, 4, 4, device="cuda", dtype=HALF)

        def reason(*tensors, **options):
            return explain(sequence_attention, *tensors, **options).refusals["sdpa"]

        assert reason(query, key, value, position_logits=position) == "it supports content only"
        assert reason(query, key, value, causal=True) == ROWS_ALONE
        assert "equal query and value widths (got 16 and 8)" in reason(query, key, value[..., :8])
        for scale in (-2.0, 0.0):
            assert f"the scale is not positive, and it is {scale:g}" in reason(query, key, value, scale=scale)
        many = query.expand(65536, 2, 4, 16)
        assert "up to 65535 images and heads, not 65536 and 2" in reason(many, many, many)
        long = torch.empty(1, 32, 2**19, 128, device="cuda", dtype=HALF)
        assert f"backward takes up to 2**31 - 1 sums, and there are {2**31}" in reason(long, *[long[:, :, :4]] * 2)
        monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
        assert "switched flash attention off" in reason(query, key, value)


@without_cuda
def test_flash_attention_is_explained_without_a_device():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    flash._has_flash.cache_clear()
    with FakeTensorMode():
        content = [torch.empty(1, 2, 4, 16, device="cuda", dtype=HALF)] * 3
        reason = explain(sequence_attention, *content).refusals["sdpa"]
    assert reason == "this device or build of torch has no flash attention"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("T, S, d", [(64, 64, 64), (33, 70, 24), (1, 5, 8), (200, 130, 128)])
def test_on_cuda(T, S, d, dtype):
    some = drawn(dtype=dtype, device="cuda", T=T, S=S, d=d, dv=d)
    assert explain(sequence_attention, **some.tensors).serves == "sdpa"
    check(some, FIRST, dtype, times=4)


@needs_binary
@pytest.mark.parametrize("turned", ["query", "key", "value", "output"])
def test_widths_that_are_not_contiguous(turned, tiles):
    """PyTorch's kernels for AMX would read other numbers."""
    some, turn = drawn(T=70, S=96), LAYOUTS["last two axes exchanged"]
    if turned == "output":
        some = some._replace(call=lambda call=some.call, **tensors: call(**tensors).mT)
    expected = check(some, FIRST, BRAIN, times=2)
    views = {n: (turn(t) if n == turned else t).requires_grad_() for n, t in some.tensors.items()}
    assert_close(differentiate(some.call, views), expected, 1e-2)
