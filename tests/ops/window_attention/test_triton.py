"""Window attention in Triton against its definition: on CUDA, or interpreted where there is no device."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops.window_attention import triton as triton_window
from attn_plugins.ops.window_attention.operands import Options, Terms
from tests.helpers.triton_checks import DEVICE, SLOW_INTERPRETED, needs_triton, randn
from tests.ops.test_contract import example
from tests.ops.test_contract_backends import check

pytestmark = needs_triton
NAME = "window_attention"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


CONTENT, POSITION = "window_attention, content", "window_attention, position"
CASES = {
    "two images": (NAME, SINGLE, dict(B=2, map=(2, 3))),
    "content": (CONTENT, SINGLE, dict(M=1, options=dict(border="zero"))),
    "position": (POSITION, HALF, {}),
    "even windows": (NAME, BRAIN, dict(M=1, kernel=(2, 4), options=dict(padding=(1, 2)))),
    "dilation": (NAME, SINGLE, dict(M=1, kernel=(3, 2), options=dict(dilation=(2, 3), padding=(2, 1), border="zero"))),
    "stride": (NAME, SINGLE, dict(M=1, map=(5, 7), kernel=(1, 3), stride=(2, 3))),
    "stride beyond the window": (NAME, SINGLE, dict(map=(4, 5), kernel=(1, 1), stride=(2, 3), d=1, dv=1)),
    "several blocks": (NAME, HALF, dict(map=(2, 3), kernel=(1, 3), M=1, d=300, dv=512)),
    "one pixel": (NAME, SINGLE, dict(map=(1, 1))),
}


@pytest.mark.parametrize(
    "name, dtype, extents",
    [
        pytest.param(*case, id=n, marks=SLOW_INTERPRETED if n in ("two images", "one pixel") else ())
        for n, case in CASES.items()
    ],
)
def test_equals_the_reference(name, dtype, extents):
    check(example(name, "tiny", DEVICE, dtype, **extents), "triton", dtype, times=2)


def test_blocks_of_queries_and_keys(monkeypatch):
    monkeypatch.setattr(triton_window, "_SIZE", 32)
    check(example(NAME, "tiny", DEVICE, map=(2, 5), d=8, dv=3, M=1), "triton", SINGLE)


def test_calls_that_triton_cannot_compute_are_refused_in_words():
    cannot = triton_window.BACKEND.cannot
    terms = Terms(*example(NAME, "tiny", DEVICE).tensors.values())
    options = Options((3, 3), (1, 1), (1, 1), (1, 1), "exclude", 0.7)
    assert cannot(terms, options) is None
    assert cannot(Terms(*(t.to("meta") for t in terms)), options).endswith("and the tensors are on meta")
    assert cannot(Terms(*(t.double() for t in terms)), options) == "its kernels take no float64"
    words = "its kernels take heads of up to 512 channels, got 600"
    assert cannot(terms._replace(value=randn(1, 2, 3, 4, 600)), options) == words
    far = options._replace(padding=(2**31 - 1, 1))
    assert "an image or the reach of a window has 2147483" in cannot(terms, far)
    many = terms._replace(value=terms.value[:, :, :1, :1].expand(1, 2, 2**15, 2**16, 3))
    assert cannot(many, options).startswith("its kernels count to 2**31")
