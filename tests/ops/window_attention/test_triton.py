"""Window attention in Triton against its definition: on CUDA, or interpreted where there is no device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.ops import backend, explain, window_attention
from attn_plugins.ops.common import library, triton_launch
from attn_plugins.ops.common.backends import Failure
from attn_plugins.ops.window_attention import triton as triton_window
from attn_plugins.ops.window_attention.operands import Options, Terms
from attn_plugins.ops.window_attention.window_attention import ATTEND
from tests.helpers.triton_checks import DEVICE, check, needs_triton, randn

pytestmark = needs_triton
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def make(
    size=(3, 4), kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), border="exclude",
    B=1, M=2, d=4, dv=5, present="content position", dtype=SINGLE,
) -> tuple[Terms, Options]:  # fmt: skip
    """Random terms; the position logits are shared by images."""
    grid = [
        (n + 2 * p - step * (k - 1) - 1) // s + 1 for n, p, step, k, s in zip(size, padding, dilation, kernel, stride)
    ]
    content, position = "content" in present, "position" in present
    terms = Terms(
        randn(B, M, *grid, d, dtype=dtype) if content else None,
        randn(B, M, *size, d, dtype=dtype, seed=1) if content else None,
        randn(B, M, *size, dv, dtype=dtype, seed=2),
        randn(1, M, *grid, kernel[0] * kernel[1], dtype=dtype, seed=3) if position else None,
    )
    return terms, Options(kernel, stride, padding, dilation, border, 0.7)


CASES = {
    "two images": dict(B=2, size=(2, 3)),
    "content": dict(present="content", border="zero"),
    "position": dict(present="position", border="zero", dtype=HALF),
    "even windows": dict(kernel=(2, 4), padding=(1, 2), dtype=BRAIN),
    "dilation": dict(kernel=(3, 2), dilation=(2, 3), padding=(2, 1), border="zero"),
    "stride": dict(size=(5, 7), kernel=(1, 3), stride=(2, 3), padding=(0, 2)),
    "stride beyond the window": dict(size=(4, 5), kernel=(1, 1), stride=(2, 3), padding=(0, 0), d=1, dv=1),
    "several blocks": dict(size=(2, 3), kernel=(1, 3), padding=(0, 1), M=1, d=300, dv=512, dtype=HALF),
    "one pixel": dict(size=(1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_definition(case):
    check(ATTEND, *make(**CASES[case]))


def test_blocks_of_queries_and_keys(monkeypatch):
    monkeypatch.setattr(triton_window, "_SIZE", 32)
    check(ATTEND, *make((3, 5), d=8, dv=3, M=1))


@pytest.mark.parametrize("missing", ["key", "value", "position_logits"])
def test_gradients_that_are_not_wanted(missing):
    terms, options = make((2, 3), M=1, dtype=HALF)
    needs = [name != missing for name in Terms._fields]
    with backend("triton"):
        output, lse = ATTEND._forward(*terms, *options)
        arguments = torch.ones_like(output), *terms, output, lse, *options
        grads, every = ATTEND._backward(*arguments, needs), ATTEND._backward(*arguments, [True] * 4)
    for ours, full, need in zip(grads, every, needs):
        torch.testing.assert_close(ours, full if need else full.new_empty(0), rtol=0, atol=0)  # no atomic sums


def test_refusals():
    assert [row.name for row in ATTEND.table] == ["cpu", "cuda", "triton", "eager"]
    refuses = triton_window.BACKEND.refuses
    terms, options = make()
    if DEVICE == "cpu":
        assert refuses(terms, options) == "its kernels are for CUDA, and the tensors are on cpu"
    with backend("triton"):
        assert refuses(terms, options) is None
        assert refuses(*make(dtype=torch.float64)) == "its kernels take no float64"
        assert refuses(*make(dv=600)) == "its kernels take heads of up to 512 channels, got 600"
        far = options._replace(padding=(2**31 - 1, 1))
        assert "an image or the reach of a window has 2147483" in refuses(terms, far)
        many = terms._replace(value=terms.value[:, :, :1, :1].expand(1, 2, 2**15, 2**16, 5))
        assert refuses(many, options).startswith("its kernels count to 2**31")


@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
def test_serves_cuda_where_no_binary_does(monkeypatch):
    missing = "there is no _C_cuda binary"
    refusal = library.refusal
    monkeypatch.setattr(
        library, "refusal", lambda device, kind: Failure(missing) if kind == "cuda" else refusal(device, kind)
    )
    monkeypatch.setattr(triton_launch, "_refusal", lambda index: None)
    with FakeTensorMode():
        maps = torch.empty(2, 2, 5, 6, 8, device="cuda")
        choice = explain(window_attention, maps, maps, maps, None, 3)
    assert (choice.serves, choice.refusals["cuda"]) == ("triton", missing)
