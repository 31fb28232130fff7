"""The attention that modules show: weights make the output, logits the weights, and a term's logits are its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins import modules
from attn_plugins.modules import (
    AAConv2d,
    BilateralCrissCross2d,
    BilateralNonLocal2d,
    BilateralSelfAttention,
    DynamicConv2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    MultiheadSpatialAttention,
    NonLocal2d,
    SpatialSelfAttention,
    attention_layers,
    capture_attention,
)
from attn_plugins.modules.common.capture import softmax_over_keys
from tests.helpers.cuda_checks import moved, randomised
from tests.helpers.module_inputs import inputs
from tests.helpers.public_modules import VARIANTS

TERMS = dict(content="1000", content_position="0100", saliency="0010", position="0001")
WITHOUT_WEIGHTS = ("AAConv2d, no attention", "NonLocal2d, dot product", "NonLocal2d, concatenation",
                   "NonLocal3d, concatenation")  # fmt: skip
LAYERS = {
    **{name: build for name, build in VARIANTS.items()
       if name not in WITHOUT_WEIGHTS and hasattr(getattr(modules, name.split(",")[0]), "attention_maps")},
    "BilateralNonLocal2d, -inf": partial(BilateralNonLocal2d, 16, kernel_size=3, outside="-inf", smoothing="sqrt_d"),
    "CrissCrossAttention2d, resized": partial(modules.CrissCrossAttention2d, 16, 2, "relative", (4, 5), 0.5),
    "GeneralizedAttention2d, 1101": partial(GeneralizedAttention2d, 16, 2, "1101", q_stride=2, kv_stride=3),
    "LocalBilateralConv2d, content": partial(LocalBilateralConv2d, 16, 16, num_heads=2, dilation=2, geometric=False),
    "LocalBilateralConv2d, geometric": partial(LocalBilateralConv2d, 16, 16, num_heads=2, content=False),
    "NonLocal2d, both": partial(NonLocal2d, 16, sub_sample=True, position="relative", input_size=(4, 5)),
}  # fmt: skip
# Of some queries, whose windows reach beyond the map, or see padding alone.
BELOW_ONE = {
    "BilateralSelfAttention, window", "MultiheadSpatialAttention, range",
    *(name for name in LAYERS if name.startswith(("DynamicConv", "WindowSelfAttention")) and "centred" not in name),
}  # fmt: skip
# Terms of the logits by class, and of the variants that have others.
NAMES: dict[str, list[str]] = {
    "AAConv2d": ["content", "position"],
    "AAConv2d, no convolution": ["content"],
    "AAConv2d, sine": ["content"],
    "BilateralCrissCross2d": ["content", "position"],
    "BilateralNonLocal2d": ["content", "position"],
    "BilateralSelfAttention": ["content", "position"],
    "CrissCrossAttention2d": ["content"],
    "CrissCrossAttention2d, relative": ["content", "position"],
    "CrissCrossAttention2d, resized": ["content", "position"],
    "DynamicConv2d": ["position"],
    "GeneralizedAttention2d": list(TERMS),
    "GeneralizedAttention2d, 0010": ["saliency"],
    "GeneralizedAttention2d, 0110": ["content_position", "saliency"],
    "GeneralizedAttention2d, 1101": ["content", "content_position", "position"],
    "GeneralizedAttention2d, strides": ["position"],
    "LocalBilateralConv2d": ["content", "geometric"],
    "LocalBilateralConv2d, content": ["content"],
    "LocalBilateralConv2d, geometric": ["geometric"],
    "MultiheadAttention": ["content"],
    "MultiheadSpatialAttention": list(TERMS),
    "MultiheadSpatialAttention, 0010": ["saliency"],
    "MultiheadSpatialAttention, range": ["content_position", "saliency", "position"],
    "NonLocal2d": ["content"],
    "NonLocal2d, both": ["content", "position"],
    "NonLocal2d, relative": ["content", "position"],
    "RelativeSelfAttention": ["content", "position"],
}  # fmt: skip
# The values that the weights multiply, (B, C, *keys), and the output from their sum, by class.
IN_STEPS = (lambda layer, x: layer.v_proj(x).mT, lambda layer, x, y: layer.out_proj(y.mT))
CONVOLVED = (
    lambda layer, x: F.glu(layer.input(x.mT), -1).mT if x.dim() == 3 else _channels_second(layer._logits(x).value),
    lambda layer, x, y: layer.output(y.mT).mT if x.dim() == 3 else x + layer.gamma * layer.output(y),
)
CRISS_CROSS = (lambda layer, x: layer.value_conv(x), lambda layer, x, y: x + layer.gamma.scale * y)
NON_LOCAL = (
    lambda layer, x: layer.projected(x)[2],
    lambda layer, x, y: x + (layer.norm or nn.Identity())(layer.conv_out(y)),
)
OUTPUTS: dict[str, tuple[Any, Any]] = {
    "BilateralCrissCross2d": CRISS_CROSS,
    "BilateralNonLocal2d": (lambda layer, x: layer.g(x), lambda layer, x, y: x + layer.conv_out(y)),
    "BilateralSelfAttention": IN_STEPS,
    "CrissCrossAttention2d": CRISS_CROSS,
    "DynamicConv1d": CONVOLVED,
    "DynamicConv2d": CONVOLVED,
    "LocalBilateralConv2d": (
        lambda layer, x: _channels_second(layer._logits(x).value), lambda layer, x, y: layer.output(y)
    ),
    "MultiheadAttention": IN_STEPS,
    "MultiheadSpatialAttention": IN_STEPS,
    "NonLocal1d": NON_LOCAL,
    "NonLocal2d": NON_LOCAL,
    "NonLocal3d": NON_LOCAL,
}  # fmt: skip
OUTPUTS["RelativeSelfAttention, causal"] = IN_STEPS  # which has no table of values


def _channels_second(heads: Tensor) -> Tensor:
    """Turn (B, M, H, W, d) into (B, M * d, H, W)."""
    return heads.movedim(-1, 2).flatten(1, 2)


def entry(table: dict[str, Any], name: str) -> Any:
    return table.get(name) or table.get(name.split(",")[0])


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_weights_make_the_output_and_logits_the_weights(name):
    layer = randomised(LAYERS[name](dtype=torch.float64)).eval()
    args, kwargs = moved(inputs(name), "cpu", torch.float64)
    with capture_attention(nn.ModuleDict({"layer": layer})) as captured:
        output = layer(*args, **kwargs)
    x, maps = args[0], captured["layer"].maps()
    (B, M), sequence = maps.shape[:2], maps.dim() == 4 and x.dim() == 3
    queries = (2, 3, 4) if x.dim() == 5 else (2,) if sequence else (2, 3)
    totals, places = maps.flatten(2 + len(queries)).sum(-1), maps.shape[2 : 2 + len(queries)]
    assert (totals < 1 + 1e-9).all()
    assert torch.allclose(totals, torch.ones_like(totals)) != (name in BELOW_ONE)
    if outputs := entry(OUTPUTS, name):
        value, finish = outputs
        values = value(layer, x).reshape(B, M, -1, maps[0, 0].numel() // places.numel())
        mixed = (values @ maps.reshape(B, M, places.numel(), -1).mT).reshape(B, -1, *places)
        torch.testing.assert_close(finish(layer, x, mixed), output)

    one = len(places) == 1
    chosen = torch.tensor([[n - 1 for n in places], [0] * len(places)])
    some = torch.stack([maps[(slice(None), slice(None), *place)] for place in chosen.tolist()], 2)
    asked = chosen[:, 0] if one and not name.startswith("NonLocal") else chosen
    torch.testing.assert_close(captured["layer"].maps(asked), some)
    if not one or name.startswith("NonLocal"):
        for axis, beyond in [(axis, number) for axis, n in enumerate(places) for number in (n, -1)]:
            off = torch.zeros(1, len(places), dtype=torch.long)
            off[0, axis] = beyond
            with pytest.raises(ValueError, match=r"queries must lie on (the|a) map of"):
                captured["layer"].maps(off)
        for wrong in (chosen[:, :0], chosen.double()):
            with pytest.raises(ValueError, match=r"queries must be whole numbers of shape \(Q, "):
                captured["layer"].maps(wrong)
    if len(places) == 2 and not one and x.dim() == 4:
        assert captured["layer"].size == tuple(places)

    if names := entry(NAMES, name):
        logits = layer.attention_logits(*args, **kwargs)
        assert list(logits) == names
        assert {part.shape for part in logits.values()} == {maps.shape}
        shown = maps / totals[(..., *[None] * len(places))] if name.startswith("DynamicConv") else maps  # taps outside
        torch.testing.assert_close(softmax_over_keys(sum(logits.values())), shown)
        assert all(not (maps[part == -torch.inf] > 0).any() for part in logits.values())
        for part, whole in zip(layer.attention_logits(*args, **kwargs, queries=asked).values(), logits.values()):
            index = torch.stack([whole[(slice(None), slice(None), *place)] for place in chosen.tolist()], 2)
            torch.testing.assert_close(part, index)


def test_every_module_with_logits_is_here():
    with_logits = {name for name in modules.__all__ if hasattr(getattr(modules, name), "attention_logits")}
    assert with_logits - {"SpatialSelfAttention"} <= {name.split(",")[0] for name in NAMES}
    for name in WITHOUT_WEIGHTS:
        with pytest.raises(ValueError, match="has no attention"):
            VARIANTS[name]().attention_maps(*inputs(name)[0])


# --- a term alone ---------------------------------------------------------------------------------------------------


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def one_term(whole: nn.Module, single: nn.Module) -> nn.Module:
    """Copy the shared weights from ``whole`` into ``single``, which has one term."""
    weights = whole.state_dict()
    single.load_state_dict({name: weights[name] for name in single.state_dict()})
    return single.double().eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [("content", dict(q_stride=2, kv_stride=2)), ("content_position", dict(spatial_range=3)), ("saliency", {}),
     ("position", dict(spatial_range=3)), ("position", dict(q_stride=2, kv_stride=2)), ("content_position", {})],
)  # fmt: skip
def test_a_term_of_generalized_attention_is_that_of_its_own_module(name, options):
    whole = drawn(GeneralizedAttention2d(8, 2, **options))
    single = one_term(whole, GeneralizedAttention2d(8, 2, TERMS[name], **options))
    x, context = torch.randn(2, 1, 8, 5, 4, dtype=torch.float64)
    for given in (dict(), dict(context=context)):
        part = softmax_over_keys(whole.attention_logits(x, **given)[name])
        torch.testing.assert_close(part, single.attention_maps(x, **given))


@pytest.mark.parametrize("layer", [BilateralNonLocal2d(8, kernel_size=3), BilateralCrissCross2d(8, kernel_size=3)])
def test_both_parts_of_bilateral_attention(layer):
    layer, x = drawn(layer), torch.randn(1, 8, 4, 3, dtype=torch.float64)
    parts = {name: softmax_over_keys(part) for name, part in layer.attention_logits(x).items()}
    query = layer.theta if isinstance(layer, BilateralNonLocal2d) else layer.query_conv
    for name, silent in (("content", layer.position), ("position", query)):
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        for parameter in silent.parameters():
            nn.init.zeros_(parameter)
        torch.testing.assert_close(layer.attention_maps(x), parts[name])
        layer.load_state_dict(before)


def test_both_parts_of_an_augmented_convolution():
    layer, x = drawn(AAConv2d(6, 8, 3, 8, 4, 2, input_size=(4, 5))), torch.randn(1, 6, 4, 5, dtype=torch.float64)
    parts = {name: softmax_over_keys(part) for name, part in layer.attention_logits(x).items()}
    without = drawn(AAConv2d(6, 8, 3, 8, 4, 2, position="none"))
    without.load_state_dict({name: value for name, value in layer.state_dict().items() if "_rel" not in name})
    torch.testing.assert_close(without.attention_maps(x), parts["content"])
    nn.init.zeros_(layer.qkv.weight[8:16])  # keys only
    torch.testing.assert_close(layer.attention_maps(x), parts["position"])


# --- sequences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention_type", "options"),
    [("1111", {}), ("0111", dict(causal=True)), ("1010", dict(attention_range=3)), ("0010", {}),
     ("0011", dict(causal=True, attention_range=5)), ("0100", dict(attention_range=3))],
)  # fmt: skip
def test_sequences(attention_type, options):
    layer = drawn(MultiheadSpatialAttention(8, 2, attention_type, **options))
    x, given = torch.randn(2, 6, 8, dtype=torch.float64), dict(key_padding_mask=torch.zeros(2, 6, dtype=torch.bool))
    given["key_padding_mask"][1, -2:] = True
    logits = layer.attention_logits(x, **given)
    assert list(logits) == [name for name, bit in zip(TERMS, attention_type) if bit == "1"]
    torch.testing.assert_close(softmax_over_keys(sum(logits.values())), layer.attention_maps(x, **given))
    for name, part in logits.items():
        single = one_term(layer, MultiheadSpatialAttention(8, 2, TERMS[name], **options))
        torch.testing.assert_close(softmax_over_keys(part), single.attention_maps(x, **given))


def test_the_source_of_cross_attention_padded_on_the_left():
    layer = drawn(MultiheadSpatialAttention(8, 2))
    x, source = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    logits = layer.attention_logits(x, source, key_padding_mask=padding)
    maps = layer.attention_maps(x, source, key_padding_mask=padding)
    torch.testing.assert_close(softmax_over_keys(sum(logits.values())), maps)


@pytest.mark.parametrize(
    ("outside", "smoothing", "causal"),
    [("zero", "sqrt_d", False), ("-inf", "sqrt_d", True), ("learned", "zscore", False), ("learned", "zscore", True)],
)
def test_bilateral_sequences(outside, smoothing, causal):
    layer = drawn(BilateralSelfAttention(8, 2, 3, outside, smoothing, causal))
    x, padding = torch.randn(2, 6, 8, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.bool)
    padding[0, -1] = True
    logits = layer.attention_logits(x, key_padding_mask=padding)
    maps = layer.attention_maps(x, key_padding_mask=padding)
    torch.testing.assert_close(softmax_over_keys(sum(logits.values())), maps)
    nn.init.zeros_(layer.q_proj.weight)
    nn.init.zeros_(layer.q_proj.bias)
    torch.testing.assert_close(softmax_over_keys(logits["position"]), layer.attention_maps(x, key_padding_mask=padding))


# --- tokens on a grid ---------------------------------------------------------------------------------------------


def read_off(layer: SpatialSelfAttention, x: Tensor, **options) -> Tensor:
    """Read the attention weights off the outputs for values that are 1 at a single key."""
    T, C = x.shape[1:]
    with torch.no_grad():
        layer.in_proj_weight[2 * C :] = layer.out_proj.weight[:] = torch.eye(C)
        layer.in_proj_bias[2 * C :] = layer.out_proj.bias[:] = 0
    columns = []
    for key in range(T):
        value = torch.zeros_like(x)
        value[:, key] = 1
        columns.append(layer(x, x, value, **options).unflatten(2, (layer.num_heads, -1))[..., 0].transpose(1, 2))
    return torch.stack(columns, -1)


@pytest.mark.parametrize(
    ("options", "prefix", "masks"),
    [
        ({}, 0, "none"),
        ({}, 2, "padding"),
        (dict(attention_type="0110"), 2, "bool"),
        (dict(attention_type="1010", spatial_range=3), 2, "none"),
        (dict(attention_type="1010", spatial_range=3), 0, "added"),
        (dict(attention_type="1001", kernel_size=3), 2, "padding"),
        (dict(attention_type="1000", kernel_size=3, outside="-inf", smoothing="sqrt_d"), 0, "bool"),
    ],
)
def test_tokens(options, prefix, masks):
    layer = drawn(SpatialSelfAttention(8, 2, **options))
    T = prefix + 6
    x = torch.randn(2, T, 8, dtype=torch.float64)
    given = dict(grid=(2, 3), prefix_tokens=prefix)
    if masks == "padding":
        given["key_padding_mask"] = torch.arange(T).expand(2, -1) == T - 1
    if masks == "bool":
        given["attn_mask"] = torch.rand(T, T) < 0.3
    if masks == "added":
        given["attn_mask"] = torch.randn(T, T, dtype=torch.float64)
    logits = layer.attention_logits(x, **given)
    names = [name for name, bit in zip(TERMS, options.get("attention_type", "1111")) if bit == "1"]
    assert list(logits) == names + ["predicted"] * ("kernel_size" in options)
    weights = softmax_over_keys(sum(logits.values()))
    torch.testing.assert_close(weights, read_off(layer, x, **given))
    if masks != "added" and "kernel_size" not in options:
        for name in names:
            single = one_term(layer, SpatialSelfAttention(8, 2, TERMS[name], options.get("spatial_range", -1)))
            torch.testing.assert_close(softmax_over_keys(logits[name]), read_off(single, x, **given))


# --- capturing ----------------------------------------------------------------------------------------------------


def test_parts_of_what_is_captured():
    layer, x = drawn(BilateralNonLocal2d(8, kernel_size=3)), torch.randn(1, 8, 3, 4, dtype=torch.float64)
    holder = nn.ModuleDict({"layer": layer, "kernels": DynamicConv2d(16, 3), "plain": NonLocal2d(8).double()})
    with capture_attention(holder) as captured, torch.no_grad():
        layer(x)
        holder["kernels"](torch.randn(1, 16, 3, 4))
        holder["plain"](x)
    queries = torch.tensor([[2, 3]])
    parts = captured["layer"].parts(queries)
    assert list(parts) == ["content", "position"]
    torch.testing.assert_close(parts["content"].sum((-2, -1)), torch.ones(1, 1, 1, dtype=torch.float64))
    product = parts["content"] * parts["position"]  # the normalised product of softmaxes is the softmax of the sum
    torch.testing.assert_close(product / product.sum((-2, -1), keepdim=True), captured["layer"].maps(queries))
    assert captured["kernels"].parts() == captured["plain"].parts() == {}  # a single term has no parts


def test_what_is_captured_is_what_the_layer_computes():
    torch.manual_seed(0)
    model = nn.Sequential(
        AAConv2d(3, 8, 3, 4, 4, 2, position="none"),
        nn.ReLU(),
        nn.Sequential(AAConv2d(8, 8, 3, 4, 4, 2, 2, position="none")),
    ).eval()
    x, inputs = torch.randn(2, 3, 8, 12), {}
    handle = model[2][0].register_forward_pre_hook(lambda _, given: inputs.update(x=given[0]))
    expected = model(x)
    handle.remove()
    with capture_attention(model, ["2.*"]) as captured, torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        assert [name for name, m in model.named_modules() if m._forward_pre_hooks] == list(captured) == ["2.0"]
    maps = captured["2.0"].maps()
    assert captured["2.0"].size == (4, 6)
    torch.testing.assert_close(maps, model[2][0].attention_maps(inputs["x"]))
    some = captured["2.0"].maps(torch.tensor([[0, 5], [3, 1]]))
    torch.testing.assert_close(some, torch.stack([maps[:, :, 0, 5], maps[:, :, 3, 1]], 2))
    assert list(attention_layers(model)) == ["0", "2.0"]
    assert not attention_layers(nn.Sequential(AAConv2d(3, 8, 3, 0, 0, 2)))
    with pytest.raises(ValueError, match="x must have shape"), capture_attention(model):
        model(torch.randn(1, 5, 8, 8))
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="got Linear without any"), capture_attention(nn.Linear(1, 1)):
        pass
    with pytest.raises(ValueError, match=r"none is called 'stage\*': 0, 2.0"), capture_attention(model, "stage*"):
        pass
