"""``attn_layer='attn1111'`` in timm's vision transformers, and our registered models."""

from __future__ import annotations

import copy
import logging

import pytest
import timm
import torch
from timm.models import _registry
from timm.models.vision_transformer import ATTN_LAYERS
from timm.utils import AttentionExtract
from torch import nn

from attn_plugins.modules.tokens.parts.grid_terms import ADDED
from attn_plugins.timm import ViTAttention, vit_attention
from attn_plugins.timm.vit_attention import LAYERS
from tests.helpers.small_vits import SMALL, build, layers_of, open_gates, picture

# timm lets us choose the ``attn_layer`` of these families only; others have no such argument.
LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("vision_transformer", "vision_transformer_hybrid")]
FAMILIES = ["deit", "naflexvit", "vitamin", *LARGE]
# These do not use timm's Attention: attention and MLP are one layer, or the attention is differential.
OTHER_BLOCKS = {
    "vit_base_patch16_xp_224", "vit_large_patch14_xp_224", "vit_huge_patch14_xp_224",
    "vit_dpwee_patch16_reg1_gap_256", "vit_pwee_patch16_reg1_gap_256",
}  # fmt: skip
NAFLEX = dict(img_size=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_that_takes_an_attention_layer_takes_ours(family):
    logging.getLogger("timm").setLevel(logging.ERROR)
    names, without = [name for name in timm.list_models() if _registry._model_to_module[name] == family], set()
    assert names
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name, attn_layer="attn1111", depth=1)
        if not layers_of(model):
            without.add(name)
        assert all(layer.places.model is model for layer in layers_of(model))
    assert without == {name for name in names if name in OTHER_BLOCKS}


@pytest.mark.parametrize("name", LAYERS)
def test_the_start_is_timms(name):
    """timm's weights load strictly; with the content term and all keys, the output is timm's."""
    stock, model = build(None), build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(stock.state_dict(), strict=True)
    for key in set(before) - set(stock.state_dict()):
        assert torch.equal(model.state_dict()[key], before[key])
    assert not any(layer.gate is not None and layer.gate.any() for layer in layers_of(model))
    expected = stock(picture())
    same = LAYERS[name]["attention_type"][0] == "1"  # the range of 7 covers all 3 × 4 tokens
    assert torch.allclose(model(picture()), expected, rtol=1e-4, atol=1e-5) == same


@pytest.mark.parametrize("attn_layer", ["attn1111", "attn_bilateral"])
@pytest.mark.parametrize("name, options", [("vit_tiny_patch16_224", {}), ("naflexvit_base_patch16_gap", NAFLEX)])
def test_terms_start_by_their_own_rule(attn_layer, name, options):
    """timm draws all linear layers again once the model is built, and in ``init_weights``."""
    model = build(attn_layer, name, **options)
    for _ in range(2):
        for layer in layers_of(model):
            weights = [p for key, p in layer.named_parameters() if key.split(".")[0] in ADDED and p.dim() > 1]
            bounds = [(6 / sum(weight.shape)) ** 0.5 for weight in weights]  # Glorot's
            assert [weight.abs().max().item() for weight in weights] == pytest.approx(bounds, rel=0.05)
            assert len(weights) == 2
        model.init_weights()


@pytest.mark.parametrize(
    "name, options",
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", dict(reg_tokens=3, no_embed_class=True)),
        ("vit_tiny_patch16_224", dict(class_token=False, global_pool="avg", qk_norm=True, scale_attn_norm=True)),
        ("deit_tiny_distilled_patch16_224", {}),
        ("naflexvit_base_patch16_gap", NAFLEX),
    ],
)
def test_places_are_found(name, options):
    """Each layer equals the token module with the model's grid and prefix."""
    from attn_plugins.modules import SpatialSelfAttention

    options = {k: v for k, v in {**SMALL, **options}.items() if v is not None}
    model = open_gates(timm.create_model(name, attn_layer="attn1111", **options).eval())
    seen: list[tuple] = []
    layer = layers_of(model)[-1]
    layer.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    model(picture())
    (x, output), prefix = seen[0], model.num_prefix_tokens
    assert x.shape[1] == prefix + 12
    plain = SpatialSelfAttention(32, 2)
    if isinstance(layer.q_norm, nn.Identity):
        weights = {k: v for k, v in layer.state_dict().items() if k.split(".")[0] not in ("qkv", "proj")}
        weights |= {"in_proj_weight": layer.qkv.weight, "in_proj_bias": layer.qkv.bias}
        plain.load_state_dict(weights | {f"out_proj.{k}": v for k, v in layer.proj.state_dict().items()}, strict=True)
        torch.testing.assert_close(output, plain(x, grid=(3, 4), prefix_tokens=prefix), rtol=1e-4, atol=1e-5)


def test_other_picture_sizes_agree_however_they_are_set():
    """dynamic_img_size, set_input_size and another img_size at creation agree; only patches have positions."""
    options = dict(pos_embed="none")
    model = open_gates(build(**options, dynamic_img_size=True))
    small, wide = model(picture(32, 48)), model(picture(48, 64))
    fixed = build(**options)
    fixed.load_state_dict(model.state_dict())
    torch.testing.assert_close(fixed(picture()), wide)
    fixed.set_input_size(img_size=(32, 48))
    torch.testing.assert_close(fixed(picture(32, 48)), small)
    other = build(**options, img_size=(32, 48))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(picture(32, 48)), small)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "attn_vit_tiny_patch16_224"])
def test_features_and_copies(name):
    options = {} if name.startswith("attn") else dict(attn_layer="attn1111")
    model = open_gates(timm.create_model(name, **options, **SMALL).eval())
    features = timm.create_model(name, features_only=True, out_indices=(0, 1), **options, **SMALL)
    assert [tuple(f.shape) for f in features(picture())] == [(2, 32, 3, 4)] * 2
    twin = copy.deepcopy(model)
    assert all(layer.places.model is twin for layer in layers_of(twin))
    assert type(layers_of(twin)[0]) is type(layers_of(model)[0])


@pytest.mark.slow
def test_a_compiled_model_takes_other_sizes():
    model = open_gates(build(dynamic_img_size=True))
    compiled = torch.compile(model, fullgraph=True)
    for size in ((48, 64), (32, 64), (64, 48)):
        torch.testing.assert_close(compiled(picture(*size)), model(picture(*size)), rtol=1e-3, atol=1e-4)


def test_attention_masks_and_dropout():
    model = open_gates(build(attn_drop_rate=0.3))
    layer, x = layers_of(model)[0], torch.randn(2, 13, 32)
    keep = torch.ones(13, 13, dtype=torch.bool)
    torch.testing.assert_close(layer(x, keep), layer(x), rtol=1e-4, atol=1e-5)
    keep[:, 5] = False
    added = torch.zeros(2, 1, 13, 13).masked_fill(~keep, float("-inf"))
    torch.testing.assert_close(layer(x, keep), layer(x, added))
    assert not torch.allclose(layer(x, keep), layer(x), rtol=1e-2)
    model.train()
    assert not torch.allclose(model(picture()), model(picture()))


@pytest.mark.parametrize("name", ["attn0010", "attn1111", "attn_bilateral", "attn_range7"])
@torch.no_grad()
def test_extracted_weights(name):
    model, x, inputs = open_gates(build(name)), picture(), []
    expected = model(x)
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    weights = AttentionExtract(model, method="hook")(x)
    for layer, tokens, found in zip(layers_of(model), inputs, weights.values()):
        torch.testing.assert_close(found, layer.token_weights(tokens), rtol=1e-5, atol=1e-7)
        assert found.shape == (2, 2, 13, 13)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_our_models_load_timms_weights(size):
    stock = timm.create_model(f"vit_{size}_patch16_224", depth=1)
    options = dict(attention_type="1011", kernel_size=3, gate_init=0.5)
    model = timm.create_model(f"attn_vit_{size}_patch16_224", depth=1, **options)
    model.load_state_dict(stock.state_dict(), strict=True)
    (layer,) = layers_of(model)
    assert (layer.attention_type, layer.kernel_size, layer.num_heads) == ("1011", 3, stock.blocks[0].attn.num_heads)
    assert (layer.gate == 0.5).all()
    assert timm.create_model(f"attn_vit_{size}_patch16_224", depth=1).blocks[0].attn.attention_type == "1111"
    assert model.default_cfg["architecture"] == f"attn_vit_{size}_patch16_224"


def test_a_class_of_other_options():
    wide = vit_attention("Range13", attention_type="1000", spatial_range=13)
    model = build(wide)
    assert type(layers_of(model)[0]) is wide
    assert layers_of(model)[0].spatial_range == 13
    narrow, all_keys = (build(vit_attention("R", attention_type="1000", spatial_range=n)) for n in (3, -1))
    narrow.load_state_dict(all_keys.state_dict())
    assert not torch.allclose(narrow(picture()), all_keys(picture()), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"options must be of attention_type, .*, got 'heads'"):
        vit_attention("Other", heads=3)
    assert all(name in ATTN_LAYERS for name in ("attn", "diff"))  # timm's own layers stay


def test_errors_say_what_is_missing():
    layer = ViTAttention(32, 2)
    with pytest.raises(
        ValueError, match=r"needs the positions of tokens, which a layer of timm's .* gets from its model"
    ):
        layer(torch.randn(2, 13, 32))
    with pytest.raises(ValueError, match="is_causal must be False"):
        layer(torch.randn(2, 13, 32), is_causal=True)
    assert ViTAttention(32, 2, attention_type="1010")(torch.randn(2, 13, 32)).shape == (2, 13, 32)
    model = build(patch_drop_rate=0.5).train()
    with pytest.raises(ValueError, match=r"grid must hold the 6 tokens behind the prefix of 1, got \(3, 4\)"):
        model(picture())
    naflex = timm.create_model("naflexvit_base_patch16_gap", attn_layer="attn1111", embed_dim=32, depth=1, num_heads=2)
    places = torch.cartesian_prod(torch.arange(3), torch.arange(4)).expand(2, -1, -1)
    with pytest.raises(ValueError, match="needs one grid for all images of a batch, but patch_coord gives several"):
        naflex(torch.randn(2, 12, 768), patch_coord=places, patch_valid=torch.ones(2, 12, dtype=torch.bool))
    with pytest.raises(ValueError, match="norm_layer must be given for qk_norm"):
        ViTAttention(32, 2, qk_norm=True)
