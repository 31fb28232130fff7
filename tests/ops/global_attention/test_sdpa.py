"""Global attention as one dot product: all terms folded into queries and keys for fused attention, as on CUDA."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.core import flash
from attn_plugins.ops import backend, explain, global_attention
from attn_plugins.ops.global_attention import sdpa as folding
from attn_plugins.ops.global_attention.global_attention import ATTEND
from attn_plugins.ops.global_attention.operands import Options, Terms
from tests.ops.global_attention.operands import BROADCAST, COMBINATIONS, FULL, drawn
from tests.ops.test_contract import FIRST, assert_close, differentiate, forced
from tests.ops.test_contract_backends import BRAIN, DOUBLE, HALF, SINGLE, check

CONTENT, SCALE = "query key", Options(0.7)
without_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")


@pytest.fixture
def folded(monkeypatch):
    """Let folding serve on CPUs, whatever the terms and their widths."""
    monkeypatch.setattr(ATTEND, "table", [folding.BACKEND._replace(prefers_not=None)])


@pytest.mark.parametrize("scale", [0.7, -0.7, 40**-0.5, 0.0])
def test_content_alone_is_scaled_by_the_kernel(scale):
    """A scaled query would be rounded to half precision, and a logit of 1,000 with it by up to 0.25."""
    some = drawn(CONTENT, HALF, d=40, dv=40, grid=(5, 7), keys=(5, 6))
    some.tensors["query"] *= 30
    assert explain(global_attention, *(some.tensors[n] for n in Terms._fields[:3]), scale=scale).serves == "sdpa"
    some = some._replace(call=partial(some.call, scale=scale))
    actual = check(some, "sdpa", HALF, times=15)  # PyTorch's backward rebuilds weights from their sum
    with backend("reference"):
        expected = some.call(**{n: t.double() for n, t in some.tensors.items()})
    torch.testing.assert_close(actual["output"].double(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("terms", COMBINATIONS[1:])
def test_folded_terms_equal_the_reference(terms, folded):
    """Fold all terms into one dot product, which runs on CUDA, here through the CPU's fused attention."""
    for lone, dtype in itertools.product((FULL, BROADCAST), (DOUBLE, SINGLE, HALF)):
        check(drawn(terms, dtype, lone=lone), "sdpa", dtype, times=4)


@pytest.mark.parametrize("dtype, other", [(SINGLE, 0.0), (HALF, 0.0), (HALF, -6e4)])
def test_masked_keys_when_folded(dtype, other, folded):
    """Masks do not depend on how low the other row and column logits are."""
    some = drawn(dtype=dtype, lone=FULL)
    row, column = (some.tensors[n] for n in ("row_logits", "column_logits"))
    row += other
    column += other
    row[:, :, 0, :, 1:] = column[:, :, 0, :, 1:] = row[:, :, 1] = -math.inf  # one key, then none
    assert not check(some, "sdpa", dtype, times=4)["output"][:, :, 1].any()


@pytest.mark.parametrize("innermost", [("query",), ("key",), ("value",), ("query", "key", "value")])
def test_folding_of_heads_innermost_in_memory(innermost):
    """torch.cat keeps channels-last memory, and the fused kernels ignore the last stride; the output's gradient too."""
    some = drawn(CONTENT, M=4, grid=(1, 6), keys=(4, 9), d=48, dv=48)
    some = some._replace(call=lambda call=some.call, **tensors: call(**tensors).movedim(1, -1))
    expected = check(some, "sdpa", DOUBLE)
    last = dict.fromkeys(innermost, torch.channels_last_3d)
    views = {n: t.contiguous(memory_format=last.get(n, torch.contiguous_format)) for n, t in some.tensors.items()}
    with forced("sdpa"):
        actual = differentiate(some.call, {n: t.requires_grad_() for n, t in views.items()})
    assert_close(actual, expected, 1e-12)


def check_results_as_promised(terms: Terms) -> None:
    """Check shapes, dtypes and strides of results and gradients, which compiled graphs count on."""
    results, promised = folding.forward(terms, SCALE), ATTEND.fake(terms, SCALE)
    grads = folding.backward(
        torch.empty_like(results[0]), terms, SCALE, *results, {n: t is not None for n, t in terms._asdict().items()}
    )
    given = {name: term for name, term in terms._asdict().items() if term is not None}
    assert grads.keys() == given.keys()
    for tensor, like in zip((*results, *map(grads.get, given)), (*promised, *map(torch.empty_like, given.values()))):
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (like.shape, like.dtype, like.stride())


@without_cuda
def test_folding_calls_what_cuda_offers():
    """Check names, arguments and shapes of the CUDA calls on tensors without data, which needs no GPU."""
    with FakeTensorMode():
        tensors = drawn(dtype=HALF, lone=BROADCAST).tensors
        terms = Terms(**{n: torch.empty(t.shape, device="cuda", dtype=HALF) for n, t in tensors.items()})
        check_results_as_promised(terms)


@without_cuda
def test_more_images_than_a_grid_has_are_refused():
    """PyTorch's kernel raises "invalid configuration argument"."""
    with FakeTensorMode():
        many = torch.empty(65536, 1, 2, 2, 8, device="cuda")
        terms = Terms(None, None, many, many[..., :2], None, None)
        assert "up to 65535 images and heads" in folding.cannot(terms, SCALE)
        assert folding.cannot(Terms(*(None if t is None else t[1:] for t in terms)), SCALE) is None


@without_cuda
@pytest.mark.parametrize("layout", ["heads outermost", "heads innermost", "crop"])
@pytest.mark.parametrize("cudnn", [False, True])
def test_flash_attention_takes_what_cuda_offers_of_content_alone(cudnn, layout, monkeypatch):
    """Check the calls of flash attention on tensors without data, which needs no GPU."""
    monkeypatch.setattr(flash, "_has_flash", lambda index: True)
    monkeypatch.setattr(flash, "_prefers_cudnn", lambda *terms: cudnn)

    def laid_out(*shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, device="cuda", dtype=HALF)
        if layout == "heads outermost":
            return tensor
        if layout == "crop":
            return tensor.repeat(1, 1, 2, 1, 1)[:, :, ::2]
        return tensor.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)

    with FakeTensorMode():
        key = laid_out(2, 3, 2, 5, 8)
        terms = Terms(laid_out(2, 3, 3, 4, 8), key, key, None, None, None)
        assert folding.is_flash(terms, SCALE)
        assert not folding.is_flash(terms._replace(value=terms.value[..., :6]), SCALE)
        assert not folding.is_flash(Terms(*(None if t is None else t.float() for t in terms)), SCALE)
        check_results_as_promised(terms)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("d, dv", [(16, 16), (64, 64), (16, 32), (20, 20)])
def test_content_alone_on_cuda(d, dv, dtype):
    """Flash attention runs, except for widths that differ or are not multiples of 8."""
    check(drawn(CONTENT, dtype, "cuda", grid=(9, 8), keys=(5, 7), d=d, dv=dv), FIRST, dtype, times=20)


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("keys", [(5, 7), (200, 90)])  # the second is too wide to fold
@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
def test_every_dtype_equals_the_reference_on_cuda(dtype, keys, deterministic):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        for lone in (FULL, BROADCAST):
            some = drawn(dtype=dtype, device="cuda", M=2, grid=(6, 7), keys=keys, d=16, dv=16, lone=lone)
            check(some, FIRST, dtype, times=20)
    finally:
        torch.use_deterministic_algorithms(False)
