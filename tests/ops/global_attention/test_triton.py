"""Global attention in Triton against its definition: on CUDA where there is a device, else interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops import backend, explain, global_attention
from attn_plugins.ops.global_attention import sdpa as folding
from attn_plugins.ops.global_attention import triton as triton_global
from attn_plugins.ops.global_attention.global_attention import ATTEND
from attn_plugins.ops.global_attention.operands import Options, Terms
from tests.helpers.triton_checks import DEVICE, check, needs_triton
from tests.ops.global_attention import operands
from tests.ops.global_attention.operands import ALL, COMBINATIONS

pytestmark = needs_triton
OPTIONS = Options(0.7)


def make(present=ALL, **sizes) -> Terms:
    """Random terms."""
    sizes = dict(M=2, grid=(3, 5), keys=(4, 6), d=8, dv=12, dtype=torch.float32) | sizes
    return Terms(*(None if t is None else t.to(DEVICE) for t in operands.make(present, **sizes)))


# All terms are in every other test.
@pytest.mark.parametrize("present", [*COMBINATIONS[1:15:2], (False,) * 4])
def test_any_terms(present):
    check(ATTEND, make(present), OPTIONS)


@pytest.mark.parametrize(
    "grid, keys, d, dv",
    [
        ((1, 1), (2, 2), 1, 1),
        ((9, 8), (7, 7), 16, 16),  # several rows a tile
        pytest.param((2, 3), (33, 2), 8, 40, marks=pytest.mark.slow),
        ((5, 4), (3, 33), 17, 8),  # one column too many
        ((2, 3), (1, 130), 8, 8),  # rows in pieces
        pytest.param((1, 70), (1, 40), 8, 8, marks=pytest.mark.slow),
        ((2, 1), (20, 1), 130, 3),
        ((2, 2), (3, 3), 2, 256),
    ],
)
def test_sizes(grid, keys, d, dv):
    present = (True, keys[0] > 1, keys[1] > 1, True)  # of one row or column, logits have no gradient but rounding
    dtype = torch.float16 if max(d, dv) > triton_global.WIDEST_FLOAT else torch.float32
    check(ATTEND, make(present, B=1, grid=grid, keys=keys, d=d, dv=dv, dtype=dtype), OPTIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_row_gradients_of_wide_maps_are_added_in_float32(dtype):
    check(ATTEND, make(B=1, grid=(2, 3), keys=(3, 150), dtype=dtype), OPTIONS)


def crop(tensor):
    """Every second row of a larger map, so that its cells are not evenly spaced."""
    return torch.stack((tensor, tensor), 3).flatten(2, 3)[:, :, ::2]


def test_the_first_tiles_are_masked():
    terms = make((True, True, False, False), B=1, grid=(2, 3), keys=(20, 3))
    terms.row_logits[..., :13] = -float("inf")
    check(ATTEND, terms, OPTIONS)


def test_offsets_of_64_bits(monkeypatch):
    monkeypatch.setattr(triton_global, "_long", lambda strides, shape: True)
    check(ATTEND, make(B=1, grid=(5, 4), keys=(3, 4)), OPTIONS)
    terms = make(B=1, grid=(5, 4), keys=(3, 4))
    check(ATTEND, terms._replace(query=crop(terms.query)), OPTIONS)


def test_refusals():
    terms = make(B=1)
    if DEVICE == "cpu":
        kwargs = dict(zip(Terms._fields[3:], terms[3:]))
        assert explain(global_attention, *terms[:3], **kwargs).refusals["triton"].startswith("its kernels are for CUDA")
    with backend("triton"):
        for dtype, widest in ((torch.float32, 128), (torch.float16, 256)):
            message = f"queries are 300 and values 12 wide, and {widest} is the widest that its kernels hold"
            assert triton_global.refuses(make(B=1, d=300, dtype=dtype), OPTIONS) == message
        assert "float64" in triton_global.refuses(make(dtype=torch.float64), OPTIONS)
        assert triton_global.refuses(terms, OPTIONS) is None


def test_leaves_to_pytorch_what_that_computes_faster(monkeypatch):
    assert [row.name for row in ATTEND.table][:2] == ["triton", "sdpa"]
    monkeypatch.setattr(triton_global.triton_launch, "refusal", lambda tensor: None)
    monkeypatch.setattr(folding, "refuses", lambda terms, options: None)
    words = "PyTorch's fused attention is faster without content"
    given = make()
    assert triton_global.refuses(given, Options(1.0)) is None
    without = given._replace(query=None, key=None)
    assert triton_global.refuses(without, Options(1.0)).startswith(words)
    with backend("triton"):
        assert triton_global.refuses(without, Options(1.0)) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert triton_global.refuses(without, Options(1.0)) is None


@pytest.mark.parametrize("dtype, numbers", [(torch.float32, 4), (torch.float16, 8)])
def test_strides_of_one_image_or_head_are_no_alignment(dtype, numbers):
    """They are multiplied by 0, whatever they are."""
    shape = triton_global._Shape(B=1, M=1, Hq=2, Wq=3, Hk=2, Wk=3, D=16, DV=16)
    key = torch.zeros(96, dtype=dtype).as_strided((1, 1, 2, 3, 16), (5, 7, 48, 16, 1))
    assert triton_global._alignment({"key": triton_global._strides("key", key, shape)}, dtype) == numbers
