"""Global attention in Triton against its definition: on CUDA where there is a device, else interpreted on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.core.backends import survey
from attn_plugins.ops import explain, global_attention
from attn_plugins.ops.global_attention import sdpa as folding
from attn_plugins.ops.global_attention import triton as triton_global
from attn_plugins.ops.global_attention.global_attention import ATTEND
from attn_plugins.ops.global_attention.operands import Options, Terms
from tests.helpers.triton_checks import DEVICE, SLOW_INTERPRETED, needs_triton, slow_interpreted
from tests.ops.contract_examples import Example
from tests.ops.global_attention import operands
from tests.ops.global_attention.operands import ALL, COMBINATIONS, FULL
from tests.ops.test_contract_backends import BRAIN, HALF, SINGLE, check

pytestmark = needs_triton
without_cuda = pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only torch")
OPTIONS = Options(0.7)
SMALL = dict(B=1, M=2, grid=(3, 5), keys=(4, 6), d=8, dv=12, lone=FULL)


def drawn(terms=ALL, dtype=SINGLE, **extents) -> Example:
    return operands.drawn(terms, dtype, DEVICE, **{**SMALL, **extents})


def terms_of(some: Example) -> Terms:
    return Terms(*map(some.tensors.get, Terms._fields))


# All terms are in every other test.
@pytest.mark.parametrize(
    "terms",
    [pytest.param(terms, marks=SLOW_INTERPRETED if n % 4 else ()) for n, terms in enumerate(COMBINATIONS[:-1:2])],
)
def test_any_terms_equal_the_reference(terms):
    check(drawn(terms, B=2), "triton", SINGLE)


@pytest.mark.parametrize(
    "grid, keys, d, dv",
    [
        ((1, 1), (2, 2), 1, 1),
        pytest.param((9, 8), (7, 7), 16, 16, marks=SLOW_INTERPRETED),  # several rows a tile
        pytest.param((2, 3), (33, 2), 8, 40, marks=pytest.mark.slow),
        ((5, 4), (3, 33), 17, 8),  # one column too many
        ((2, 3), (1, 130), 8, 8),  # rows in pieces
        pytest.param((1, 70), (1, 40), 8, 8, marks=pytest.mark.slow),
        pytest.param((2, 1), (20, 1), 130, 3, marks=SLOW_INTERPRETED),
        ((2, 2), (3, 3), 2, 256),
    ],
)
def test_any_map_size_equals_the_reference(grid, keys, d, dv):
    dtype = HALF if max(d, dv) > triton_global.WIDEST_FLOAT else SINGLE
    check(drawn(dtype=dtype, M=1, grid=grid, keys=keys, d=d, dv=dv), "triton", dtype)


@slow_interpreted
def test_row_gradients_of_wide_maps_are_added_in_float32():
    check(drawn(dtype=BRAIN, grid=(2, 3), keys=(3, 150)), "triton", BRAIN)


def test_the_first_tiles_are_masked():
    some = drawn("query key row_logits", M=1, grid=(2, 3), keys=(20, 3))
    some.tensors["row_logits"][..., :13] = -float("inf")
    check(some, "triton", SINGLE)


def crop(tensor):
    """Return every second row of a larger map, so that its cells are not evenly spaced."""
    return torch.stack((tensor, tensor), 3).flatten(2, 3)[:, :, ::2]


def test_offsets_of_64_bits(monkeypatch):
    monkeypatch.setattr(triton_global, "_long", lambda strides, shape: True)
    some = drawn(M=1, grid=(5, 4), keys=(3, 4))
    check(some, "triton", SINGLE)
    check(some._replace(call=lambda query, **others: some.call(query=crop(query), **others)), "triton", SINGLE)


def test_calls_that_triton_cannot_compute_are_refused_in_words():
    terms = terms_of(drawn())
    on_meta = [t.to("meta") for t in terms]
    choice = explain(global_attention, *on_meta[:3], **dict(zip(Terms._fields[3:], on_meta[3:])))
    assert choice.refusals["triton"].startswith("its kernels are for GPUs")
    for dtype, widest in ((SINGLE, 128), (HALF, 256)):
        message = f"queries are 300 and values 12 wide, and {widest} is the widest that its kernels hold"
        assert triton_global.cannot(terms_of(drawn(d=300, dtype=dtype)), OPTIONS) == message
    assert "float64" in triton_global.cannot(terms_of(drawn(dtype=torch.float64)), OPTIONS)
    assert triton_global.cannot(terms, OPTIONS) is None


@without_cuda
def test_leaves_to_pytorch_what_that_computes_faster(monkeypatch):
    """Content alone in half precision, and position alone, unless sums are to have one order."""
    monkeypatch.setattr(triton_global.triton_launch, "refusal", lambda tensor: None)
    monkeypatch.setattr(folding, "is_flash", lambda terms, options: False)
    with FakeTensorMode():
        given = Terms(*(torch.empty(t.shape, device="cuda") for t in terms_of(drawn())))
    without = given._replace(query=None, key=None)
    serves = {}
    for terms, deterministic, flash in itertools.product((given, without), (False, True), (False, True)):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda of=deterministic: of)
        monkeypatch.setattr(folding, "is_flash", lambda *_, of=flash: of)
        chosen = survey(ATTEND.table, terms, OPTIONS)
        serves[terms is given, deterministic, flash] = chosen.serves
        if chosen.serves == "triton":
            assert chosen.preferences["sdpa"].startswith("Triton's kernels are faster for content with other terms")
    assert {key for key, name in serves.items() if name == "sdpa"} == {
        (True, False, True), (False, False, False), (False, False, True)
    }  # fmt: skip
    assert {*serves.values()} == {"sdpa", "triton"}
    assert folding.BACKEND.refusal(given, OPTIONS, forced=True) is None
    monkeypatch.setattr(triton_global.triton_launch, "refusal", lambda tensor: "there is no Triton")
    assert survey(ATTEND.table, given, OPTIONS).serves == "sdpa"


@pytest.mark.parametrize("dtype, numbers", [(SINGLE, 4), (HALF, 8)])
def test_strides_of_one_image_or_head_are_no_alignment(dtype, numbers):
    """They are multiplied by 0, whatever they are."""
    shape = triton_global._Shape(B=1, M=1, Hq=2, Wq=3, Hk=2, Wk=3, D=16, DV=16)
    key = torch.zeros(96, dtype=dtype).as_strided((1, 1, 2, 3, 16), (5, 7, 48, 16, 1))
    assert triton_global._alignment({"key": triton_global._strides("key", key, shape)}, dtype) == numbers
