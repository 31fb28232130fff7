"""bfloat16 on CPUs: kernels that read and write it give the float32 result rounded once."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.core import library
from attn_plugins.ops import sequence_attention
from attn_plugins.ops.sequence_attention import sdpa as sdpa_sequence
from tests.ops.contract_examples import Example
from tests.ops.test_contract import example

pytestmark = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")
SEGMENTS, BAND = "sequence_attention, segments", "sequence_attention, causal band"


def in_both(some: Example) -> tuple[dict, dict]:
    """Return results in bfloat16, and in float32 of the same numbers."""
    halves, both = some.to("cpu", torch.bfloat16), []
    for one in (halves, halves.to("cpu", torch.float32)):
        leaves = one.leaves()
        output, floats = one.call(**leaves), list(one.floats())
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(output)
        grads = torch.autograd.grad(output, [leaves[n] for n in floats], grad)
        both.append(dict(zip(["output", *floats], [output.detach(), *grads])))
    return both[0], both[1]


@pytest.mark.parametrize(
    "name, extents",
    [
        ("sequence_attention", dict(T=60, S=60, K=5, d=9, dv=17)), ("sequence_attention", dict(T=3, S=40, d=8, dv=8)),
        ("sequence_attention", dict(T=7, S=11, d=5, dv=6, B=3)), ("sequence_attention, range", dict(T=50, S=60)),
        (SEGMENTS, dict(T=49, S=49, d=32, dv=32)),  # a whole window
        (SEGMENTS, dict(T=70, S=70, d=16, dv=16)), (SEGMENTS, dict(T=450, S=450, d=8, dv=8, M=1)),
        (BAND, dict(T=60, S=60, K=4, d=8, dv=8)),
        *(("window_attention", dict(map=(9, 13), dv=16, options=dict(dilation=n))) for n in (1, 2)),
        ("window_attention, content", dict(map=(9, 13), d=7)), ("window_attention, position", dict(map=(9, 70), dv=17)),
        ("window_attention, position", dict(map=(9, 20), kernel=(3, 3), dv=3)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads_innermost", [False, True])
def test_attention_is_that_of_float32_rounded(name, extents, heads_innermost, monkeypatch):
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: False)  # our kernels, on CPUs with AMX too
    some = example(name, **extents)
    if heads_innermost:
        for n in set(some.tensors) & {"query", "value"}:
            some.tensors[n] = some.tensors[n].transpose(1, -2).contiguous().transpose(1, -2)
    half, single = in_both(some)
    for n, result in half.items():
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, single[n].bfloat16()), n


@pytest.mark.parametrize("name", ["deform_conv2d", "deform_conv2d, version 1"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_deform_conv2d_is_close_to_that_of_float32(name, layout):
    some = example(name, C=12, map=(19, 23), out=10)
    some.tensors["input"] = some.tensors["input"].to(memory_format=layout)
    half, single = in_both(some)
    for n, result in half.items():
        # Columns and their gradients are rounded, as results are.
        assert (result.float() - single[n]).norm() <= 6e-3 * single[n].norm()
        assert (result.float() - single[n]).abs().max() <= 1.5e-2 * single[n].abs().max()


def test_rounding_is_torchs():
    """Round to nearest even; infinities and NaN stay."""
    numbers = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, float("inf"), float("-inf")])
    value = numbers.view(1, 1, 1, -1).expand(1, 1, 6, -1).contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        output = sequence_attention(None, None, value.to(dtype), position_logits=torch.zeros(1, 1, 6, 6, dtype=dtype))
        assert torch.equal(output.bfloat16(), value.bfloat16())
    query, key, value = (torch.randn(1, 1, 6, 4).bfloat16() for _ in range(3))
    value[0, 0, 2, 1] = float("nan")
    output = sequence_attention(query, key, value)
    assert output[..., 1].isnan().all()
    assert not output[..., 0].isnan().any()
