"""Conventions of all public modules: initialisation, factory arguments, and choices."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins import modules
from attn_plugins.modules.checks import one_of
from attn_plugins.modules.non_local_block import Mode
from tests.helpers.public_modules import MODULES, VARIANTS, public_modules

# Their parameters are drawn in another order than by apply, so a seed gives other numbers of the same distribution.
OTHER_ORDER = {
    "CrissCrossAttention2d, relative", "DualWayEncoder", "EntangledAttention", "MultiheadAttention",
    "MultimodalDecoderBlock", "NonLocal2d, relative",
}  # fmt: skip
UNCHANGING = [
    "BilateralCrissCross2d", "BilateralNonLocal2d", "CrissCrossAttention2d", "CrissCrossAttention2d, relative",
    "DynamicConv2d", "GeneralizedAttention2d", "GeneralizedAttention2d, as mmcv's", "NonLocal2d",
    "NonLocal2d, concatenation", "NonLocal2d, relative",
]  # fmt: skip


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def spoil(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(7)


def kind_of(parameter: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation."""
    return parameter.float().mean().item(), parameter.float().std(correction=0).item()


def test_every_public_module_is_tested():
    assert set(MODULES) == set(public_modules())


# --- reset_parameters -------------------------------------------------------------------------------------------------


def test_what_owns_parameters_draws_them():
    for name, make in VARIANTS.items():
        for module in make().modules():
            if list(module.parameters(recurse=False)):
                assert callable(getattr(module, "reset_parameters", None)), (name, type(module))


@pytest.mark.parametrize("name", VARIANTS)
def test_reset_from_the_children_on_draws_what_the_constructor_does(name):
    torch.manual_seed(3)
    made = VARIANTS[name]()
    module = VARIANTS[name]()
    spoil(module)
    torch.manual_seed(3)
    module.apply(reset)
    for key, tensor in module.state_dict().items():
        expected = made.state_dict()[key]
        if name not in OTHER_ORDER or tensor.numel() == 1 or expected.std() == 0:
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0, msg=key)
        elif tensor.numel() < 16:  # too few numbers to estimate a deviation
            assert tensor.abs().max() < 1, key
        else:
            (mean, deviation), (wanted_mean, wanted) = kind_of(tensor), kind_of(expected)
            assert deviation == pytest.approx(wanted, rel=0.5), key
            assert abs(mean - wanted_mean) < wanted, key


@pytest.mark.parametrize("children_first", [True, False])
@pytest.mark.parametrize("name", UNCHANGING)
def test_reset_in_any_order_is_the_identity_again(name, children_first):
    module, x = VARIANTS[name](), torch.randn(2, 16, 5, 7)
    spoil(module)
    assert not torch.allclose(module(x), x)
    parts = list(module.modules())
    for part in reversed(parts) if children_first else parts:
        reset(part)
    assert torch.equal(module(x), x)


def test_a_normalised_residual_is_the_identity_again():
    module, x = VARIANTS["NonLocal2d, normalised"](), torch.randn(2, 16, 5, 7)
    spoil(module)
    module.apply(reset)
    assert torch.equal(module(x), x)


@pytest.mark.parametrize("children_first", [True, False])
def test_reset_in_any_order_is_the_plain_convolution_again(children_first):
    module, x = MODULES["DeformableConv2d"](), torch.randn(2, 4, 5, 7)
    spoil(module)
    parts = list(module.modules())
    for part in reversed(parts) if children_first else parts:
        reset(part)
    torch.testing.assert_close(module(x), F.conv2d(x, module.weight, module.bias, padding=1))


def test_made_without_memory_and_then_drawn():
    for name, make in VARIANTS.items():
        module = make(device="meta").to_empty(device="cpu")
        spoil(module)
        module.apply(reset)
        assert all(tensor.isfinite().all() for tensor in module.state_dict().values()), name
        assert not any((parameter == 7).any() for parameter in module.parameters()), name


# --- device and dtype -------------------------------------------------------------------------------------------------


def test_factory_arguments_are_keyword_only():
    for name, module in public_modules().items():
        parameters = inspect.signature(module).parameters
        for argument in ("device", "dtype"):
            assert parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY, name
            assert parameters[argument].default is None, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_parameters_and_buffers_follow(device, dtype):
    for name, make in VARIANTS.items():
        module = make(device=device, dtype=dtype)
        tensors = [*module.parameters(), *module.buffers()]
        assert tensors, name
        for tensor in tensors:
            assert tensor.device.type == device, name
            assert tensor.dtype == dtype or not tensor.is_floating_point(), name  # the counter of a BatchNorm


# --- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: modules.AAConv2d(8, 8, 3, 4, 4, 2, position="polar"), "position must be one of relative, none, sine"),
        (lambda: modules.AlignmentAttention("bilinear", 4), "score must be one of cosine, additive, general, dot"),
        (lambda: modules.BilateralNonLocal2d(8, outside="same"), "outside must be one of -inf, zero, learned, min"),
        (
            lambda: modules.BilateralSelfAttention(8, smoothing="none"),
            "smoothing must be one of sqrt_d, sqrt_embed_dim, ",
        ),
        (lambda: modules.CrissCrossAttention2d(8, position=None), "position must be one of none, relative, got None"),
        (lambda: modules.GatedBilateralController(8, ["relu"]), "activation must be one of identity, relu, .* got "),
        (lambda: modules.MultimodalDecoderBlock(fusion="mean"), "fusion must be one of entangled, parallel, stacked"),
        (lambda: modules.NonLocal2d(8, mode="softmax"), "mode must be one of gaussian, embedded_gaussian, dot_product"),
    ],
)
def test_a_choice_that_there_is_not(build, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        build()


def test_one_of_takes_each_choice():
    for mode in ("gaussian", "embedded_gaussian", "dot_product", "concatenation"):
        one_of(Mode, mode=mode)
