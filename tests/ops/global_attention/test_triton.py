"""Global attention in Triton against its definition: on CUDA where there is a device, else interpreted on the CPU."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from attn_plugins.ops import backend, explain, global_attention, reference
from attn_plugins.ops.global_attention import sdpa as folding
from attn_plugins.ops.global_attention import triton as triton_global
from attn_plugins.ops.global_attention.global_attention import ATTEND
from attn_plugins.ops.global_attention.operands import Options, Terms
from tests.helpers.triton_checks import DEVICE, DTYPES, check, needs_triton, randn
from tests.ops.global_attention.operands import COMBINATIONS

pytestmark = [needs_triton, pytest.mark.sampled(4, every_value=False)]
OPTIONS = Options(0.7)
LOGITS = ("row_logits", "column_logits", "key_logits")
NAMES = ("query", "key", "value", *LOGITS)
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="what torch dispatches to differs")


def make(present=(True,) * 4, B=2, M=2, grid=(3, 5), keys=(4, 6), d=8, dv=12, dtype=torch.float32) -> Terms:
    """Random terms."""
    content, row, column, key = present
    shapes = (
        (B, M, *grid, d) if content else None,
        (B, M, *keys, d) if content else None,
        (B, M, *keys, dv),
        (B, M, *grid, keys[0]) if row else None,
        (B, M, *grid, keys[1]) if column else None,
        (B, M, *keys) if key else None,
    )
    return Terms(*(None if s is None else randn(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes)))


@pytest.mark.parametrize("present", COMBINATIONS)
def test_any_terms(present):
    check(ATTEND, make(present), OPTIONS)


@pytest.mark.parametrize(
    "grid, keys, d, dv",
    [
        ((1, 1), (2, 2), 1, 1),
        ((9, 8), (7, 7), 16, 16),  # several rows a tile
        ((2, 3), (33, 2), 8, 40),
        ((5, 15), (3, 33), 17, 8),  # one column too many
        ((4, 3), (2, 130), 8, 8),  # rows in pieces
        ((1, 70), (1, 40), 8, 8),
        ((70, 1), (20, 1), 8, 8),
        ((2, 2), (3, 3), 130, 3),
        ((2, 2), (3, 3), 2, 256),
    ],
)
def test_sizes(grid, keys, d, dv):
    present = (True, keys[0] > 1, keys[1] > 1, True)  # of one row or column, logits have no gradient but rounding
    dtype = torch.float16 if max(d, dv) > triton_global.WIDEST_FLOAT else torch.float32
    check(ATTEND, make(present, B=1, grid=grid, keys=keys, d=d, dv=dv, dtype=dtype), OPTIONS)


def test_maps_of_one_row_or_column_of_keys():
    for keys, present in itertools.product(((1, 9), (9, 1), (1, 1)), ((True,) * 4, (False, True, True, False))):
        terms = make(present, B=1, keys=keys)
        with backend("triton"):
            output = ATTEND._forward(*terms, *OPTIONS)[0]
        torch.testing.assert_close(output, reference.global_attention(*terms, 0.7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_row_gradients_of_wide_maps_are_added_in_float32(dtype):
    check(ATTEND, make(B=1, grid=(2, 3), keys=(3, 150), dtype=dtype), OPTIONS)


def crop(tensor):
    """Every second row of a larger map, so that its cells are not evenly spaced."""
    return torch.stack((tensor, tensor), 3).flatten(2, 3)[:, :, ::2]


@DTYPES
def test_masked_keys_and_masked_queries(dtype):
    terms = make(grid=(3, 4), keys=(4, 9), dtype=dtype)
    terms.row_logits[:, :, 0, :, 1:] = -float("inf")
    terms.column_logits[:, :, 0, :, 1:] = -float("inf")  # query row 0 sees one key
    terms.row_logits[:, :, 1] = -float("inf")  # row 1 none
    terms.key_logits[:, :, 2] = -float("inf")
    check(ATTEND, terms, OPTIONS)
    with backend("triton"):
        output, lse = ATTEND._forward(*terms, *OPTIONS)
    assert (output[:, :, 1] == 0).all()
    assert (lse[:, :, 1] == float("inf")).all()
    assert lse[:, :, 0].isfinite().all()


def test_the_first_tiles_are_masked():
    terms = make((True, True, False, False), B=1, grid=(2, 3), keys=(20, 3))
    terms.row_logits[..., :13] = -float("inf")
    check(ATTEND, terms, OPTIONS)


def test_large_logits():
    terms = make(dtype=torch.float32)
    terms = terms._replace(row_logits=terms.row_logits - 3e4, column_logits=terms.column_logits + 3e4)
    check(ATTEND, terms, OPTIONS, tolerance=1e-2)  # of 3e4 in float32, differences are off by 0.004


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_nan_is_not_hidden():
    terms = make(B=1, M=1)
    terms.query[0, 0, 0, 0, 0] = float("nan")
    with backend("triton"):
        output = ATTEND._forward(*terms, *OPTIONS)[0]
    assert output[0, 0, 0, 0].isnan().all()
    assert output[0, 0, 1:].isfinite().all()


def test_log_sum_exp_is_that_of_the_other_backends():
    terms = make()
    sums = []
    for name in ("triton", "eager"):
        with backend(name):
            sums.append(ATTEND._forward(*terms, *OPTIONS)[1])
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


@interpreted
def test_empty_batches_and_widths():
    with backend("triton"):
        for sizes in (dict(B=0), dict(M=0), dict(grid=(0, 3)), dict(dv=0), dict(d=0)):
            terms = [t.requires_grad_() for t in make(**sizes)]
            output = global_attention(*terms[:3], **dict(zip(LOGITS, terms[3:])))
            grads = torch.autograd.grad(output.sum(), terms)
            assert [g.shape for g in grads] == [t.shape for t in terms]
            assert all(g.isfinite().all() for g in grads)


@interpreted
def test_gradients_through_the_operator_twice():
    terms = [t.requires_grad_() for t in make(B=1, M=1, grid=(2, 3), keys=(2, 2), d=3, dv=2)]
    gradients = []
    for name in ("triton", "reference"):
        with backend(name):
            output = global_attention(*terms[:3], **dict(zip(LOGITS, terms[3:])), scale=0.7)
            first = torch.autograd.grad(output.square().sum(), terms, create_graph=True)
            gradients.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), terms)])
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)


def test_offsets_of_64_bits(monkeypatch):
    monkeypatch.setattr(triton_global, "_long", lambda strides, shape: True)
    check(ATTEND, make(B=1, grid=(5, 4), keys=(3, 4)), OPTIONS)
    terms = make(B=1, grid=(5, 4), keys=(3, 4))
    check(ATTEND, terms._replace(query=crop(terms.query)), OPTIONS)


def test_refusals():
    terms = make(B=1)
    if DEVICE == "cpu":
        kwargs = dict(zip(LOGITS, terms[3:]))
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


COMPILED = """
import torch
from attn_plugins.ops.global_attention.global_attention import ATTEND
from attn_plugins.ops.global_attention.operands import Options
from tests.helpers.triton_checks import compiled_variants
from tests.helpers.triton_compile import everywhere

def variants(*maps, dtype=torch.float16, present="1111"):
    return compiled_variants(everywhere(2, 4, *maps, 32, dtype, present))
"""


def test_another_map_needs_no_other_binary(compiling):
    """Launches of tensors without contents, in a process where kernels are compiled, not interpreted."""
    compiling(
        COMPILED
        + """
for dtype in (torch.float32, torch.float16):
    once = variants((50, 84), (17, 33), dtype=dtype)
    assert len(once) == 3, once
    for H, W in ((H, W) for H in (1, 2, 16, 23, 64) for W in (34, 42, 50, 61, 63)):
        assert variants((H * 2, W * 2), (H, W), dtype=dtype) == once, (H, W)
    content = variants((50, 84), (25, 42), dtype=dtype, present="1000")
    for H, W in ((1, 1), (3, 5), (16, 16), (200, 7), (1, 1000)):
        assert variants((H, W), (H, W), dtype=dtype, present="1000") == content, (H, W)
everything = set()
for W in range(1, 140):
    everything |= variants((7, 2 * W), (5, W))
forwards = [variant for variant in everything if variant.kernel == "forward"]
assert len(forwards) <= 10, len(forwards)  # five widths of tiles, logits read one or eight at a time
"""
    )


def test_ahead_of_time(compiling, tmp_path):
    """Compile for a device that is not here."""
    compiling(
        COMPILED
        + """
from tests.helpers.triton_compile import compiled, launches, variants
for variant, kernel in variants(launches(*everywhere(2, 4, (50, 84), (25, 42), 32, torch.bfloat16)())).items():
    row = compiled(variant, kernel, 90)
    assert row["spills"] == 0 and row["shared"] <= 99 << 10, row
""",
        TRITON_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )


def test_large_tensors_have_offsets_of_64_bits(compiling):
    compiling(
        COMPILED
        + """
for variant in variants((4, 4), (4, 4)):
    assert dict(variant.constants)["LONG"] is False
for variant in compiled_variants(everywhere(1, 4, (2**13, 2**13), (4, 4), 32, torch.float16)):
    assert dict(variant.constants)["LONG"] is True, variant
"""
    )
