"""DeformableConv2d and DeformableConv1d: equality with a convolution at initialisation, state_dict, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attn_plugins.modules import DeformableConv1d, DeformableConv2d
from attn_plugins.ops import deform_conv1d, deform_conv2d

LAYERS = {"2d": (DeformableConv2d, (2, 6, 5, 8), F.conv2d), "1d": (DeformableConv1d, (2, 6, 9), F.conv1d)}
OPTIONS = {
    "plain": dict(kernel_size=3, padding=1),
    "strided": dict(kernel_size=3, stride=2, padding=2, dilation=2),
    "grouped": dict(kernel_size=1, groups=2, offset_groups=3, bias=False),
    "even": dict(kernel_size=2, offset_groups=2),
}


def perturbed(layer):
    """Return the layer with random offsets, as if it had been trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    return layer


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_starts_as_the_convolution_it_replaces(layer: str, options: str) -> None:
    cls, shape, convolve = LAYERS[layer]
    options = OPTIONS[options]
    x = torch.randn(shape)
    module = cls(6, 4, **options)
    arguments = {k: v for k, v in options.items() if k in ("stride", "padding", "dilation", "groups")}
    plain = convolve(x, module.weight, module.bias, **arguments)
    torch.testing.assert_close(module(x), plain, rtol=1e-5, atol=1e-5)
    # masks of v2 start at 1/2: half of the convolution, before the bias
    modulated = cls(6, 4, modulated=True, **{**options, "bias": False})
    plain = convolve(x, modulated.weight, None, **arguments)
    torch.testing.assert_close(modulated(x), plain / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("modulated", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_is_its_operator_on_what_it_predicts(layer: str, modulated: bool) -> None:
    cls, shape, _ = LAYERS[layer]
    module = perturbed(cls(6, 4, 3, padding=1, offset_groups=3, modulated=modulated))
    assert set(module.state_dict()) == {"weight", "bias", "conv_offset.weight", "conv_offset.bias"}
    x = torch.randn(shape)
    predicted = module.conv_offset(x)
    components = 2 if layer == "2d" else 1
    taps = 3 * 3**components
    offset, mask = predicted[:, : components * taps], predicted[:, components * taps :]
    operator = deform_conv2d if layer == "2d" else deform_conv1d
    expected = operator(x, offset, module.weight, module.bias, 1, 1, 1, mask.sigmoid() if modulated else None)
    assert predicted.abs().max() > 0.5
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_parameter_gets_a_gradient_at_the_start(layer: str) -> None:
    cls, shape, _ = LAYERS[layer]
    module = cls(6, 4, 3, padding=1, modulated=True)
    module(torch.randn(shape)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_a_map_smaller_than_the_kernel() -> None:
    with pytest.raises(ValueError, match="input is too small"):
        DeformableConv2d(6, 4, 3)(torch.zeros(1, 6, 1, 1))
