"""The logits of every term: their sum's softmax is the attention, and each equals those of a module with one term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.modules import (
    AAConv2d,
    BilateralCrissCross2d,
    BilateralNonLocal2d,
    BilateralSelfAttention,
    CrissCrossAttention2d,
    DynamicConv2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    MultiheadSpatialAttention,
    NonLocal2d,
    SequenceCache,
    SpatialSelfAttention,
    capture_attention,
)
from attn_plugins.modules.common.capture import softmax_over_keys

TERMS = dict(content="1000", content_position="0100", saliency="0010", position="0001")


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


MAPS = {
    "aaconv": lambda: (AAConv2d(6, 8, 3, 8, 4, 2, input_size=(4, 5)), ["content", "position"]),
    "aaconv_resized": lambda: (AAConv2d(6, 8, 3, 8, 4, 2, input_size=7, stride=2), ["content", "position"]),
    "aaconv_sine": lambda: (AAConv2d(8, 8, 3, 8, 4, 2, position="sine"), ["content"]),
    "bilateral": lambda: (BilateralNonLocal2d(8, kernel_size=3), ["content", "position"]),
    "bilateral_inf": lambda: (
        BilateralNonLocal2d(8, kernel_size=3, outside="-inf", smoothing="sqrt_d"), ["content", "position"]
    ),
    "bilateral_criss_cross": lambda: (BilateralCrissCross2d(8, 2, kernel_size=3), ["content", "position"]),
    "criss_cross": lambda: (CrissCrossAttention2d(8, 2), ["content"]),
    "criss_cross_relative": lambda: (
        CrissCrossAttention2d(8, 2, "relative", (4, 5), 0.5), ["content", "position"]
    ),
    "non_local": lambda: (NonLocal2d(8), ["content"]),
    "non_local_relative": lambda: (
        NonLocal2d(8, sub_sample=True, position="relative", input_size=(4, 5)), ["content", "position"]
    ),
    "local_bilateral": lambda: (
        LocalBilateralConv2d(8, 8, stride=2, dilation=2, num_heads=2, iterations=2), ["content", "geometric"]
    ),
    "local_geometric": lambda: (LocalBilateralConv2d(8, 8, num_heads=2, content=False), ["geometric"]),
    "generalized": lambda: (GeneralizedAttention2d(8, 2), list(TERMS)),
    "generalized_0011": lambda: (GeneralizedAttention2d(8, 2, "0011"), ["saliency", "position"]),
    "generalized_strided": lambda: (
        GeneralizedAttention2d(8, 2, "1101", q_stride=2, kv_stride=3), ["content", "content_position", "position"]
    ),
    "generalized_range": lambda: (GeneralizedAttention2d(8, 2, spatial_range=3, scale=0.4), list(TERMS)),
    "mmcv": lambda: (GeneralizedAttention2d.mmcv_compatible(8, num_heads=2, spatial_range=2), list(TERMS)),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_the_sum_of_the_logits_makes_the_maps(name):
    layer, names = MAPS[name]()
    layer = drawn(layer)
    x = torch.randn(2, layer.in_channels, 4, 5, dtype=torch.float64)
    maps, logits = layer.attention_maps(x), layer.attention_logits(x)
    assert list(logits) == names
    assert {part.shape for part in logits.values()} == {maps.shape}
    torch.testing.assert_close(softmax_over_keys(sum(logits.values())), maps)
    assert all(not (maps[part == -torch.inf] > 0).any() for part in logits.values())
    queries = torch.tensor([[0, 1], [1, 0], [1, 1]])
    for part, whole in zip(layer.attention_logits(x, queries=queries).values(), logits.values()):
        torch.testing.assert_close(part, whole[:, :, queries[:, 0], queries[:, 1]])


def one_term(whole: nn.Module, single: nn.Module) -> nn.Module:
    """Copy the shared weights from ``whole`` into ``single``, which has one term."""
    weights = whole.state_dict()
    single.load_state_dict({name: weights[name] for name in single.state_dict()})
    return single.double().eval()


@pytest.mark.parametrize("options", [{}, dict(spatial_range=3), dict(q_stride=2, kv_stride=2)])
@pytest.mark.parametrize("name", TERMS)
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
    "options", [{}, dict(causal=True), dict(attention_range=3), dict(causal=True, attention_range=5)]
)
@pytest.mark.parametrize("attention_type", ["1111", "0111", "1010", "0011", "0010", "0100"])
def test_sequences(attention_type, options):
    layer = drawn(MultiheadSpatialAttention(8, 2, attention_type, **options))
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, -2:] = True
    maps = layer.attention_maps(x, key_padding_mask=padding)
    logits = layer.attention_logits(x, key_padding_mask=padding)
    assert list(logits) == [name for name, bit in zip(TERMS, attention_type) if bit == "1"]
    assert all(part.shape == maps.shape for part in logits.values())
    torch.testing.assert_close(softmax_over_keys(sum(logits.values())), maps)
    for name, part in logits.items():
        single = one_term(layer, MultiheadSpatialAttention(8, 2, TERMS[name], **options))
        torch.testing.assert_close(softmax_over_keys(part), single.attention_maps(x, key_padding_mask=padding))
    some = layer.attention_logits(x, key_padding_mask=padding, queries=torch.tensor([4, 0]))
    torch.testing.assert_close(some[name], logits[name][:, :, [4, 0]])


def test_the_source_of_cross_attention_padded_on_the_left_and_a_step_of_decoding():
    layer = drawn(MultiheadSpatialAttention(8, 2))
    x, source = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    logits = layer.attention_logits(x, source, key_padding_mask=padding)
    maps = layer.attention_maps(x, source, key_padding_mask=padding)
    torch.testing.assert_close(softmax_over_keys(sum(logits.values())), maps)
    for causal in (
        drawn(MultiheadSpatialAttention(8, 2, causal=True)),
        drawn(BilateralSelfAttention(8, 2, causal=True)),
    ):
        cache = SequenceCache()
        causal(x[:, :2], cache=cache)
        logits = causal.attention_logits(x[:, 2:], cache=cache)
        assert cache.steps == 2
        torch.testing.assert_close(
            softmax_over_keys(sum(logits.values())), causal.attention_maps(x[:, 2:], cache=cache)
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("outside", "smoothing"), [("zero", "sqrt_d"), ("-inf", "sqrt_d"), ("learned", "zscore")])
def test_bilateral_sequences(outside, smoothing, causal):
    layer = drawn(BilateralSelfAttention(8, 2, 3, outside, smoothing, causal))
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, -1] = True
    logits = layer.attention_logits(x, key_padding_mask=padding)
    assert list(logits) == ["content", "position"]
    torch.testing.assert_close(
        softmax_over_keys(sum(logits.values())), layer.attention_maps(x, key_padding_mask=padding)
    )
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
    "options",
    [
        {},
        dict(attention_type="0110"),
        dict(attention_type="1010", spatial_range=3),
        dict(attention_type="1001", kernel_size=3),
        dict(attention_type="1000", kernel_size=3, outside="-inf", smoothing="sqrt_d"),
    ],
)
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("masks", ["none", "padding", "bool", "added"])
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
