"""Layers keep the memory format of their input; the conversions that make this possible."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from attn_plugins import modules
from attn_plugins.modules.maps import memory_format
from attn_plugins.modules.maps.memory_format import in_format_of, to_channels_last
from tests.helpers.memory_format_checks import FORMATS, check_memory_format, has_format

LAYERS = {
    "AAConv2d": lambda: modules.AAConv2d(16, 24, 3, dk=16, dv=8, num_heads=2, input_size=(6, 9)),
    "AAConv2d, attention alone": lambda: modules.AAConv2d(16, 24, 3, dk=16, dv=24, num_heads=2, input_size=(6, 9)),
    "AAConv2d, pool and stride": lambda: modules.AAConv2d(16, 24, 3, 16, 8, 2, stride=2, pool=True, input_size=(6, 9)),
    "AAConv2d, a plain convolution": lambda: modules.AAConv2d(16, 24, 3, dk=0, dv=0, num_heads=2),
    "BilateralCrissCross2d": lambda: modules.BilateralCrissCross2d(16, kernel_size=5),
    "BilateralNonLocal2d": lambda: modules.BilateralNonLocal2d(16, kernel_size=5),
    "CrissCrossAttention2d": lambda: modules.CrissCrossAttention2d(16),
    "CrissCrossAttention2d, relative": lambda: modules.CrissCrossAttention2d(16, 8, "relative", (6, 9)),
    "DeformableConv2d": lambda: modules.DeformableConv2d(16, 12, 3, padding=1),
    "DeformableConv2d, modulated": lambda: modules.DeformableConv2d(16, 12, 3, 2, 1, groups=2, modulated=True),
    "DynamicConv2d": lambda: modules.DynamicConv2d(16, 3),
    "DynamicConv2d, no residual": lambda: modules.DynamicConv2d(16, 3, residual=False),
    "GeneralizedAttention2d": lambda: modules.GeneralizedAttention2d(16, num_heads=2),
    "GeneralizedAttention2d, 0010": lambda: modules.GeneralizedAttention2d(16, 2, "0010"),
    "GeneralizedAttention2d, window": lambda: modules.GeneralizedAttention2d(16, 2, spatial_range=3),
    "GeneralizedAttention2d, strides": lambda: modules.GeneralizedAttention2d(16, 2, q_stride=2, kv_stride=2),
    "GeneralizedAttention2d, mmcv": lambda: modules.GeneralizedAttention2d.mmcv_compatible(16, num_heads=2, q_stride=2),
    "LocalBilateralConv2d": lambda: modules.LocalBilateralConv2d(16, 24, 3, iterations=2),
    "LocalBilateralConv2d, stride": lambda: modules.LocalBilateralConv2d(16, 24, 3, 2, padding=0, content=False),
    "NonLocal2d": lambda: modules.NonLocal2d(16, sub_sample=True),
    "NonLocal2d, gaussian": lambda: modules.NonLocal2d(16, mode="gaussian"),
    "NonLocal2d, dot_product": lambda: modules.NonLocal2d(16, mode="dot_product", norm_layer=nn.BatchNorm2d),
    "NonLocal2d, concatenation": lambda: modules.NonLocal2d(16, mode="concatenation"),
}


def test_every_layer_on_maps_is_here():
    on_maps = {name for name in modules.__all__ if name.endswith("2d") and inspect.isclass(getattr(modules, name))}
    assert on_maps == {name.split(",")[0] for name in LAYERS}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("size", [(6, 9), (9, 6), (7, 7)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_answers_in_the_format_of_its_input(name, size, autocast):
    torch.manual_seed(0)
    check_memory_format(LAYERS[name](), (2, 16, *size), autocast)


TRACED = ("AAConv2d", "CrissCrossAttention2d", "GeneralizedAttention2d", "LocalBilateralConv2d")


@pytest.mark.parametrize(
    "name", ["AAConv2d", "CrissCrossAttention2d", "GeneralizedAttention2d", "LocalBilateralConv2d"]
)
def test_a_traced_an_exported_and_a_compiled_layer_do(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    for kind, layout in FORMATS.items():
        x = torch.randn(2, 16, 6, 9).contiguous(memory_format=layout)
        expected = layer(x).detach()
        ways = {
            "traced": torch.jit.trace(layer, x),
            "exported": torch.export.export(layer, (x,)).module(),
            "compiled": torch.compile(layer, backend="aot_eager", fullgraph=True),
        }
        for way, function in ways.items():
            output = function(x)
            assert has_format(output, kind), way
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()


# --- the conversions ----------------------------------------------------------------------------------------------

# (B, C, H, W), with images both above and below the size for the copy by transposed matrices
SHAPES = [(2, 3, 4, 5), (3, 65, 61, 67), (1, 512, 32, 32), (0, 4, 5, 6), (2, 1, 520, 600), (2, 270_000, 1, 1)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("few_threads", [0, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_conversions_equal_pytorchs(shape, dtype, few_threads, monkeypatch):
    monkeypatch.setattr(memory_format, "_FEW_THREADS", few_threads)
    x = torch.randn(shape).to(dtype)
    last = to_channels_last(x)
    assert torch.equal(last, x)
    assert last.stride() == x.contiguous(memory_format=torch.channels_last).stride()
    back = in_format_of(x, last)
    assert torch.equal(back, x)
    assert back.stride() == last.contiguous().stride()


def test_what_has_the_format_is_not_copied():
    x = torch.randn(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert to_channels_last(last) is last
    assert in_format_of(x, x) is x
    assert in_format_of(last, last) is last
    for ambiguous in (torch.randn(2, 1, 4, 5), torch.randn(2, 3, 1, 1)):  # both formats at once counts as contiguous
        assert to_channels_last(ambiguous) is ambiguous
        assert in_format_of(ambiguous, x) is x
        assert has_format(in_format_of(ambiguous, last), "contiguous")


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 512, 32, 32)])
def test_gradients_have_the_format_of_what_was_converted(shape):
    x = torch.randn(shape)
    for kind, layout in FORMATS.items():
        source = x.contiguous(memory_format=layout).requires_grad_()
        other = x if kind == "channels_last" else x.contiguous(memory_format=torch.channels_last)
        weight = torch.randn(shape).contiguous(memory_format=FORMATS[kind])
        converted = in_format_of(other, source)
        (grad,) = torch.autograd.grad((converted * weight).square().sum(), source, create_graph=True)
        assert has_format(grad, kind)
        torch.testing.assert_close(grad, 2 * x * weight.square())
        (second,) = torch.autograd.grad(grad.sum(), source)
        torch.testing.assert_close(second, 2 * weight.square())


def test_a_strided_view_is_converted():
    x = torch.randn(2, 8, 9, 10)
    for view in (x[:, ::2], x[:, :, 1:], x[..., ::3], x.transpose(2, 3), x[:1].expand(3, -1, -1, -1)):
        assert torch.equal(to_channels_last(view), view)
        assert to_channels_last(view).is_contiguous(memory_format=torch.channels_last)
        assert in_format_of(x, view).is_contiguous()
