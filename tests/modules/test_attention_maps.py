"""The attention that modules show: weights make the output, logits the weights, and a term's logits are its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins import modules
from attn_plugins.modules import (
    AAConv2d,
    BilateralNonLocal2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    MultiheadSpatialAttention,
    NonLocal2d,
    SpatialSelfAttention,
    WindowSelfAttention,
    attention_layers,
    capture_attention,
)
from attn_plugins.modules.common.capture import softmax_over_keys
from tests.helpers.attention_terms import BOTH, NAMES, entry
from tests.helpers.cuda_checks import moved, randomized
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
    "GeneralizedAttention2d, 1101": partial(
        GeneralizedAttention2d, 16, 2, attention_type="1101", q_stride=2, kv_stride=3
    ),
    "LocalBilateralConv2d, content": partial(LocalBilateralConv2d, 16, 16, num_heads=2, dilation=2, geometric=False),
    "LocalBilateralConv2d, geometric": partial(LocalBilateralConv2d, 16, 16, num_heads=2, content=False),
    "MultiheadSpatialAttention, near": partial(MultiheadSpatialAttention, 16, 2, attention_range=5, causal=True),
    "NonLocal2d, both": partial(NonLocal2d, 16, sub_sample=True, position="relative", input_size=(4, 5)),
    "WindowSelfAttention, whole": partial(WindowSelfAttention, 16, 2, (7, 4), (0, 1), position="table+relative"),
    "WindowSelfAttention, whole V2": partial(WindowSelfAttention, 16, 2, (1, 4), (0, 3), "v2"),
    "WindowSelfAttention, centred none": partial(WindowSelfAttention, 16, 2, 5, 0, "v2", "none", window="centred"),
}  # fmt: skip
# Of some queries, whose windows reach beyond the map, or see padding alone.
BELOW_ONE = {
    "BilateralSelfAttention, window", "MultiheadSpatialAttention, range",
    *(name for name in LAYERS if name.startswith("DynamicConv")),
    *(name for name in LAYERS if name.startswith("WindowSelfAttention") and not {"centred", "whole"} & {*name.split()}),
}  # fmt: skip
# Of layers that compute a term's weights themselves.
PARTS = {
    "WindowSelfAttention": "content table",
    "WindowSelfAttention, bilateral": "content table predicted",
    "WindowSelfAttention, centred": "content positions",
    "WindowSelfAttention, centred none": "",
    "WindowSelfAttention, relative": "content content_position position",
    "WindowSelfAttention, whole": "content content_position position table",
}
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
NEIGHBORHOOD = (
    lambda layer, x: layer.qkv(x)[:, 2 * x.shape[1] :],
    lambda layer, x, y: x + layer.gamma.scale * layer.proj(y),
)
OUTPUTS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("BilateralCrissCross2d", "CrissCrossAttention2d"), CRISS_CROSS),
    "BilateralNonLocal2d": (lambda layer, x: layer.g(x), lambda layer, x, y: x + layer.conv_out(y)),
    **dict.fromkeys(("BilateralSelfAttention", "MultiheadAttention", "MultiheadSpatialAttention",
                     "RelativeSelfAttention, causal"), IN_STEPS),  # the last has no table of values
    **dict.fromkeys(("DynamicConv1d", "DynamicConv2d"), CONVOLVED),
    "LocalBilateralConv2d": (
        lambda layer, x: _channels_second(layer._logits(x).value), lambda layer, x, y: layer.output(y)
    ),
    **dict.fromkeys(("NeighborhoodAttention1d", "NeighborhoodAttention2d"), NEIGHBORHOOD),
    **dict.fromkeys(("NonLocal1d", "NonLocal2d", "NonLocal3d"), NON_LOCAL),
    **dict.fromkeys((name for name in LAYERS if name.startswith("WindowSelf") and name not in BELOW_ONE), (
        lambda layer, x: layer._project(x)[..., 32:].movedim(3, 1), lambda layer, x, y: layer.proj(y.movedim(1, 3))
    )),
}  # fmt: skip


def _channels_second(heads: Tensor) -> Tensor:
    """Turn (B, M, H, W, d) into (B, M * d, H, W)."""
    return heads.movedim(-1, 2).flatten(1, 2)


def terms_of(name: str, layer: Any) -> list[str]:
    """Return the names of the terms that ``attention_logits`` is to show."""
    if not hasattr(layer, "attention_logits"):
        return []
    if hasattr(layer, "attention_type"):
        return [term for term, bit in zip(TERMS, layer.attention_type) if bit == "1"]
    return entry(NAMES, name).split()


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_weights_make_the_output_and_logits_the_weights(name):
    layer = randomized(LAYERS[name](dtype=torch.float64)).eval()
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
    asked = chosen[:, 0] if one and not name.startswith("NonLocal") else chosen

    def at(whole: Tensor) -> Tensor:
        return torch.stack([whole[(slice(None), slice(None), *place)] for place in chosen.tolist()], 2)

    names, parts = terms_of(name, layer), captured["layer"].parts()
    torch.testing.assert_close(captured["layer"].maps(asked), at(maps))
    if not one or name.startswith("NonLocal"):
        for axis, beyond in [(axis, number) for axis, n in enumerate(places) for number in (n, -1)]:
            off = torch.zeros(1, len(places), dtype=torch.long)
            off[0, axis] = beyond
            with pytest.raises(ValueError, match=r"queries must lie on (the|a) map of"):
                captured["layer"].maps(off)
            if parts and name.startswith("Window"):
                with pytest.raises(ValueError, match="queries must lie on the map of"):
                    captured["layer"].parts(off)
        for wrong in (chosen[:, :0], chosen.double()):
            with pytest.raises(ValueError, match=r"queries must be whole numbers of shape \(Q, "):
                captured["layer"].maps(wrong)
    if len(places) == 2 and not one and x.dim() == 4:
        assert captured["layer"].size == tuple(places)

    of_parts = entry(PARTS, name)
    assert list(parts) == ((names if len(names) > 1 else []) if of_parts is None else of_parts.split())
    whole_keys = tuple(range(2 + len(places), maps.dim()))
    for part, of_some in zip(parts.values(), captured["layer"].parts(asked).values(), strict=True):
        torch.testing.assert_close(of_some, at(part))
        assert name in BELOW_ONE or torch.allclose(part.sum(whole_keys), torch.ones_like(totals))
    if parts and name not in BELOW_ONE:  # the normalized product of softmaxes is the softmax of the sum
        product = torch.stack([*parts.values()]).prod(0)
        torch.testing.assert_close(product / product.sum(whole_keys, keepdim=True), maps)

    if names:
        logits = layer.attention_logits(*args, **kwargs)
        assert list(logits) == names
        assert {part.shape for part in logits.values()} == {maps.shape}
        shown = maps / totals[(..., *[None] * len(places))] if name.startswith("DynamicConv") else maps  # taps outside
        torch.testing.assert_close(softmax_over_keys(sum(logits.values())), shown)
        assert all(not (maps[part == -torch.inf] > 0).any() for part in logits.values())
        for part, whole in zip(layer.attention_logits(*args, **kwargs, queries=asked).values(), logits.values()):
            torch.testing.assert_close(part, at(whole))


def test_layers_without_weights_raise():
    for name in WITHOUT_WEIGHTS:
        with pytest.raises(ValueError, match="has no attention"):
            VARIANTS[name]().attention_maps(*inputs(name)[0])


# --- a term alone ---------------------------------------------------------------------------------------------------


def one_term(build: Any, layer: nn.Module, term: str) -> nn.Module:
    """Return a layer with one term, of the same weights."""
    single = build(attention_type=TERMS[term], dtype=torch.float64)
    weights = layer.state_dict()
    single.load_state_dict({key: weights[key] for key in single.state_dict()})
    return single.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith(("General", "MultiheadSpatial"))])
def test_a_term_is_that_of_a_module_without_the_others(name):
    """Also with a context or a source, padded on the left."""
    layer = randomized(LAYERS[name](dtype=torch.float64)).eval()
    x, source = torch.randn(2, 7, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    calls = [moved(inputs(name), "cpu", torch.float64)]
    if name.startswith("General"):
        calls.append((torch.randn(2, 1, 16, 5, 4, dtype=torch.float64).unbind(), {}))
    elif not layer.causal:
        calls.append(((x, source), dict(key_padding_mask=torch.tensor([[False] * 5, [True, True] + [False] * 3]))))
    for args, kwargs in calls:
        logits = layer.attention_logits(*args, **kwargs)
        torch.testing.assert_close(softmax_over_keys(sum(logits.values())), layer.attention_maps(*args, **kwargs))
        for term, part in logits.items():
            alone = one_term(LAYERS[name], layer, term).attention_maps(*args, **kwargs)
            torch.testing.assert_close(softmax_over_keys(part), alone)


def weights_by_term(layer: nn.Module, compute: Callable[[], dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    """Return what the logits of one term alone depend on: parameters, or rows of those that several depend on."""
    logits, weights = compute(), [*layer.parameters()]
    own: dict[str, list[Tensor]] = {term: [] for term in logits}
    for weight in weights:
        weight += 1
        changed = [term for term, part in compute().items() if not torch.equal(part, logits[term])]
        weight -= 1
        if len(changed) == 1:
            own[changed[0]].append(weight)
        elif changed and isinstance(weight, nn.Parameter):
            weights += [*weight]  # as a joint projection has rows of the keys
    return own


TWO_TERMS = [name for name in LAYERS if entry(NAMES, name) in (BOTH, "content geometric")
             and name != "LocalBilateralConv2d, shared"]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", TWO_TERMS)
def test_a_term_is_what_is_left_without_the_other(name):
    layer = randomized(LAYERS[name](dtype=torch.float64)).eval()
    args, kwargs = moved(inputs(name), "cpu", torch.float64)
    logits = layer.attention_logits(*args, **kwargs)
    (content, position), before = logits.values(), copy.deepcopy(layer.state_dict())
    own = weights_by_term(layer, partial(layer.attention_logits, *args, **kwargs))
    for term, other in zip(logits, reversed(logits)):
        if term == "content" and not torch.equal(content.isneginf(), position.isneginf()):
            continue  # positions hide keys
        layer.load_state_dict(before)
        for weight in own[other]:
            weight.zero_()
        torch.testing.assert_close(softmax_over_keys(logits[term]), layer.attention_maps(*args, **kwargs))
    layer.load_state_dict(before)
    for term, part in layer.attention_logits(torch.ones_like(args[0]), *args[1:], **kwargs).items():
        weights, keys = softmax_over_keys(part), tuple(range(part.dim() // 2 + 1, part.dim()))
        even = torch.isclose(weights, weights.amax(keys, keepdim=True)) | part.isneginf()
        assert even.all() == (term == "content")  # which cannot tell equal pixels apart


@torch.no_grad()
@pytest.mark.parametrize("shift", [(0, 0), (1, 1)])
def test_a_part_of_windows_is_what_it_is_without_the_others(shift):
    options = dict(embed_dim=12, num_heads=3, window_size=(2, 3), shift_size=shift, dtype=torch.float64)
    layer, x = randomized(WindowSelfAttention(**options)), torch.randn(2, 3, 5, 12, dtype=torch.float64)  # with padding
    parts, plain = layer.attention_parts(x), WindowSelfAttention(**options, position="none")
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "table" not in name})
    torch.testing.assert_close(parts["content"], plain.attention_maps(x))
    layer.qkv.weight[:12] = 0
    layer.qkv.bias[:12] = 0
    torch.testing.assert_close(parts["table"], layer.attention_maps(x))


@torch.no_grad()
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
def test_tokens_on_a_grid(options, prefix, masks):
    build = partial(SpatialSelfAttention, 8, 2, **options)
    layer, T = randomized(build(dtype=torch.float64)), prefix + 6
    x = torch.randn(2, T, 8, dtype=torch.float64)
    given = dict(grid=(2, 3), prefix_tokens=prefix)
    if masks == "padding":
        given["key_padding_mask"] = torch.arange(T).expand(2, -1) == T - 1
    if masks == "bool":
        given["attn_mask"] = torch.rand(T, T) < 0.3
    if masks == "added":
        given["attn_mask"] = torch.randn(T, T, dtype=torch.float64)
    logits = layer.attention_logits(x, **given)
    names = terms_of("", layer)
    assert list(logits) == names + ["predicted"] * ("kernel_size" in options)
    value = F.linear(x, layer.in_proj_weight[16:], layer.in_proj_bias[16:]).unflatten(2, (2, 4)).transpose(1, 2)

    def mixed(part: Tensor) -> Tensor:
        return layer.out_proj((softmax_over_keys(part) @ value).transpose(1, 2).flatten(2))

    torch.testing.assert_close(mixed(sum(logits.values())), layer(x, **given))
    if masks != "added" and "kernel_size" not in options:
        for name in names:
            torch.testing.assert_close(mixed(logits[name]), one_term(build, layer, name)(x, **given))


# --- capturing ----------------------------------------------------------------------------------------------------


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
