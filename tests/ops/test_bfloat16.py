"""bfloat16 on CPUs: kernels that read and write it give the float32 result rounded once."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops import deform_conv2d, sequence_attention, window_attention
from attn_plugins.ops.common import library
from attn_plugins.ops.sequence_attention import sdpa as sdpa_sequence

pytestmark = pytest.mark.skipif(not library.has_kernel("cpu"), reason="no CPU binary is compiled")


def draw(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def heads(tensor):
    """Store the same numbers as (B, T, M, d)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def sequence(T, S, d, dv, *logits, **options):
    query, key, value, *rest = draw((3, 2, T, d), (3, 2, S, d), (3, 2, S, dv), *logits)
    names = options.pop("names", ())
    return (
        lambda q, k, v, *given: sequence_attention(q, k, v, **dict(zip(names, given)), scale=0.3, **options),
        [heads(query), key, heads(value), *rest],
    )


def window(size, kernel, d, dv, position=False, **options):
    shapes = [(2, 2, *size, d)] * 2 if d else []
    tensors = draw(*shapes, (2, 2, *size, dv), *([(2, 2, *size, kernel * kernel)] if position else []))
    value, logits = tensors[len(shapes)], tensors[len(shapes) + 1 :]

    def call(*given):
        q, k = given[:2] if d else (None, None)
        v, *rest = given[2 * bool(d) :]
        return window_attention(q, k, v, rest[0] if rest else None, kernel, **options)

    return call, [*tensors[: len(shapes)], value, *logits]


POSITION, BAND = ("position_logits",), ("band_logits", "outside_logits")
EXACT = {
    "content": lambda: sequence(7, 11, 5, 6),
    "whole windows, logits of all": lambda: sequence(49, 49, 32, 32, (1, 2, 49, 49), names=POSITION),
    "logits of each": lambda: sequence(70, 70, 16, 16, (3, 2, 70, 70), names=POSITION),
    "slots": lambda: sequence(450, 450, 8, 8, (1, 2, 450, 450), names=POSITION),
    "logits of a query": lambda: sequence(50, 30, 8, 8, (3, 2, 1, 30), names=POSITION),
    "band": lambda: sequence(60, 60, 9, 17, (3, 2, 60, 5), (3, 2, 60), names=BAND),
    "causal band": lambda: sequence(60, 60, 8, 8, (1, 2, 60, 4), names=BAND[:1], causal=True),
    "few queries": lambda: sequence(3, 40, 8, 8, (3, 2, 3, 40), names=POSITION),
    "window": lambda: window((9, 13), 3, 7, 5),
    "window and logits": lambda: window((9, 13), 3, 8, 16, position=True),
    "dilated window": lambda: window((9, 13), 3, 8, 16, position=True, dilation=2),
    "predicted logits": lambda: window((9, 70), 7, 0, 17, position=True),
    "predicted logits, few channels": lambda: window((9, 20), 3, 0, 3, position=True),
}


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT.keys())
def test_attention_is_that_of_float32_rounded(case, monkeypatch):
    monkeypatch.setattr(sdpa_sequence, "multiplies_tiles", lambda: False)  # our kernels, on CPUs with AMX too
    call, tensors = case()
    assert all(t.dtype == torch.bfloat16 for t in tensors)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        output = call(*leaves)
        (grad_output,) = draw(output.shape, seed=1)
        results.append([output, *torch.autograd.grad(output, leaves, grad_output.to(dtype))])
    for half, single in zip(*results):
        assert half.dtype == torch.bfloat16
        assert torch.equal(half, single.bfloat16())


@pytest.mark.parametrize(
    "groups,offset_groups,bias,mask", [(1, 1, True, True), (2, 3, False, True), (1, 2, True, False)]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_deform_conv2d_is_close_to_that_of_float32(groups, offset_groups, bias, mask, layout):
    x, offset, weight, given_bias, given_mask = draw(
        (3, 12, 19, 23),
        (3, 18 * offset_groups, 19, 23),
        (10, 12 // groups, 3, 3),
        (10,),
        (3, 9 * offset_groups, 19, 23),
    )
    tensors = [x.to(memory_format=layout), offset, weight]
    tensors += [given_bias] if bias else []
    tensors += [given_mask.sigmoid()] if mask else []

    def call(x, offset, weight, *rest):
        rest = list(rest)
        return deform_conv2d(
            x, offset, weight, rest.pop(0) if bias else None, padding=1, mask=rest.pop(0) if mask else None
        )

    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        output = call(*leaves)
        (grad_output,) = draw(output.shape, seed=1)
        results.append([output, *torch.autograd.grad(output, leaves, grad_output.to(dtype))])
    for half, single in zip(*results):
        assert half.dtype == torch.bfloat16
        # Columns and their gradients are rounded, as results are.
        assert (half.float() - single).norm() <= 6e-3 * single.norm()
        assert (half.float() - single).abs().max() <= 1.5e-2 * single.abs().max()


def test_rounding_is_torchs():
    """Round to nearest even; infinities and NaN stay."""
    numbers = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, float("inf"), float("-inf")])
    value = numbers.view(1, 1, 1, -1).expand(1, 1, 6, -1).contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        output = sequence_attention(None, None, value.to(dtype), position_logits=torch.zeros(1, 1, 6, 6, dtype=dtype))
        assert torch.equal(output.bfloat16(), value.bfloat16())


def test_nan_stays_nan():
    (query, key, value) = draw(*[(1, 1, 6, 4)] * 3)
    value[0, 0, 2, 1] = float("nan")
    output = sequence_attention(query, key, value)
    assert output[..., 1].isnan().all()
    assert not output[..., 0].isnan().any()
