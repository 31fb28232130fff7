"""Attention weights of timm's vision transformers: they give the layers' outputs; rollout; where tokens lie."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

timm = pytest.importorskip("timm")

from attn_plugins.modules import capture_attention  # noqa: E402
from attn_plugins.timm import ViTAttention  # noqa: E402
from tests.tools.show_attention_helpers import SMALL_VIT, VIT  # noqa: E402
from tools.attention_view import view, vit  # noqa: E402
from tools.pictures import open_picture  # noqa: E402


def build(name: str = VIT, sharp: float = 8, **options) -> nn.Module:
    """Build a small model with weights far from uniform, in which all of our terms have an effect."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL_VIT, **options}).eval()
    with torch.no_grad():
        for layer in vit.vit_layers(model).values():
            layer.qkv.weight *= sharp
            for key, parameter in layer.named_parameters():
                if key.split(".")[0] not in ("qkv", "proj", "norm", "q_norm", "k_norm", "gate_proj"):
                    nn.init.normal_(parameter, std=0.5)
    return model


def seen_by(model: nn.Module, x: Tensor, **keywords) -> tuple[dict[str, vit.PatchMaps], dict[str, Tensor]]:
    """Return the captured weights, and the outputs of every layer."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, inputs: tuple, output: Tensor) -> None:
        outputs[name] = output

    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in vit.vit_layers(model).items()]
    with torch.no_grad(), vit.capture_vit(model) as captured:
        model(x, **keywords)
    for hook in hooks:
        hook.remove()
    return captured, outputs


def output_of(layer: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    """Compute the layer's output from its values and these weights."""
    B, T, _ = x.shape
    value = layer.qkv(x).view(B, T, 3, layer.num_heads, -1)[:, :, 2].transpose(1, 2)
    return layer.proj(layer.norm((weights @ value).transpose(1, 2).reshape(B, T, -1)))


def check(model: nn.Module, x: Tensor, **keywords) -> dict[str, vit.PatchMaps]:
    """Check that the weights and values of every layer give its output; return what was captured."""
    captured, outputs = seen_by(model, x, **keywords)
    assert list(captured) == list(outputs) == list(vit.vit_layers(model))
    assert captured
    for name, found in captured.items():
        weights = found.weights()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            expected = output_of(model.get_submodule(name), found.x, weights)
        torch.testing.assert_close(expected, outputs[name], rtol=1e-3, atol=1e-4)
    return captured


@pytest.mark.parametrize("options", [{}, dict(qk_norm=True, scale_attn_norm=True)], ids=["plain", "norms"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_stock_layers_weights_give_its_output(fused, options):
    model = build(reg_tokens=2, **options)
    for layer in vit.vit_layers(model).values():
        assert not isinstance(layer, ViTAttention)
        layer.fused_attn = fused
    captured = check(model, torch.randn(2, 3, 48, 64))
    assert {(n.size, n.cls, len(n.prefix)) for n in captured.values()} == {((3, 4), True, 3)}
    assert max(float(n.weights().max()) for n in captured.values()) > 0.5


@pytest.mark.parametrize("reg_tokens", [0, 2])
@pytest.mark.parametrize("kind", ["attn0000", "attn0110", "attn1111", "attn_bilateral", "attn_range7"])
def test_our_layers_weights_give_their_output(kind, reg_tokens):
    model = build(attn_layer=kind, reg_tokens=reg_tokens)
    assert all(isinstance(layer, ViTAttention) for layer in vit.vit_layers(model).values())
    captured = check(model, torch.randn(2, 3, 48, 64))
    assert {(n.size, n.cls, len(n.prefix)) for n in captured.values()} == {((3, 4), True, 1 + reg_tokens)}


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
@pytest.mark.parametrize("added", [True, False])
def test_masked_tokens(kind, added):
    mask = torch.rand(13, 13) > 0.3
    mask.fill_diagonal_(True)
    given = torch.zeros(13, 13).masked_fill(~mask, -torch.inf) if added else mask
    captured = check(build(attn_layer=kind), torch.randn(2, 3, 48, 64), attn_mask=given)
    for layer in captured.values():
        assert (layer.weights()[:, :, ~mask] == 0).all()
        np.testing.assert_allclose(layer.look(["cls", (2, 1)]).uniform, 1 / mask[[0, 10]].sum(1), rtol=1e-6)


def test_causal_weights():
    layer = next(iter(vit.vit_layers(build()).values()))
    x = torch.randn(2, 13, 32)
    with torch.no_grad():
        weights = vit.stock_weights(layer, x, is_causal=True)
        torch.testing.assert_close(output_of(layer, x, weights), layer(x, is_causal=True), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name, options, size, prefix, grid",
    [
        (VIT, dict(dynamic_img_size=True), (80, 32), ["cls"], (5, 2)),
        (VIT, dict(dynamic_img_size=True, dynamic_img_pad=True), (70, 33), ["cls"], (5, 3)),
        (VIT, dict(class_token=False, global_pool="avg", reg_tokens=3), (48, 64), ["registers"] * 3, (3, 4)),
        (VIT, dict(class_token=False, global_pool="avg"), (48, 64), [], (3, 4)),
        ("deit_tiny_distilled_patch16_224", {}, (48, 64), ["cls", "dist"], (3, 4)),
        ("naflexvit_base_patch16_gap", {}, (64, 48), ["registers"] * 4, (4, 3)),
        ("naflexvit_base_patch16_gap", dict(class_token=True, reg_tokens=1), (64, 48), ["cls", "registers"], (4, 3)),
    ],
    ids=["dynamic", "padded", "registers alone", "patches alone", "distilled", "naflex", "naflex with cls"],
)
@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_where_tokens_lie(kind, name, options, size, prefix, grid):
    captured = check(build(name, attn_layer=kind, **options), torch.randn(1, 3, *size))
    for layer in captured.values():
        assert (layer.prefix, layer.size) == (prefix, grid)


def test_a_look_is_rows_of_the_weights():
    captured, _ = seen_by(build(reg_tokens=2, attn_layer="attn1111"), torch.randn(1, 3, 48, 64))
    layer = captured["blocks.1.attn"]
    weights, found = layer.weights()[0], layer.look(["cls", (2, 1)])
    assert found.names == ["mean of heads", "head 1", "head 2"]
    for q, token in enumerate((0, 3 + 2 * 4 + 1)):
        for head in range(2):
            expected = weights[head, token]
            torch.testing.assert_close(found.maps[1 + head, q].flatten(), expected[3:])
            torch.testing.assert_close(found.elsewhere[1 + head, q], expected[:3].sum())
        torch.testing.assert_close(found.maps[0, q].flatten(), weights[:, token, 3:].mean(0))
    torch.testing.assert_close(found.uniform, torch.full((2,), 1 / 15))


def test_uniform_weight_of_a_range():
    with_range = build(attn_layer="attn_range7", img_size=(160, 16), sharp=30)  # 10 rows, reach of 3
    captured, _ = seen_by(with_range, torch.randn(1, 3, 160, 16))
    found = captured["blocks.0.attn"].look(["cls", (0, 0), (5, 0)])
    np.testing.assert_allclose(1 / found.uniform, [11, 5, 8], rtol=1e-6)


def test_our_layers_are_captured_in_python():
    model = build(attn_layer="attn1111", reg_tokens=2)
    x = torch.randn(2, 3, 48, 64)
    with capture_attention(model, "blocks.2.*") as captured, torch.no_grad():
        model(x)
    found, other = captured["blocks.2.attn"], seen_by(model, x)[0]["blocks.2.attn"]
    assert found.size == (3, 4)
    whole = found.maps()
    torch.testing.assert_close(whole.flatten(4).flatten(2, 3), other.weights()[:, :, 3:, 3:])
    torch.testing.assert_close(found.maps(torch.tensor([[2, 1], [0, 3]])), whole[:, :, [2, 0], [1, 3]])
    with pytest.raises(ValueError, match="queries must lie on the map of 3 rows and 4 columns"):
        found.maps(torch.tensor([[3, 0]]))
    layer = model.blocks[0].attn
    with pytest.raises(ValueError, match="is_causal must be False"):
        layer.attention_maps(torch.randn(1, 15, 32), is_causal=True)
    with pytest.raises(ValueError, match="grid must hold the 13 tokens behind the prefix of 3"):
        layer.attention_maps(torch.randn(1, 16, 32))
    with pytest.raises(ValueError, match="this layer is in no such model"):
        ViTAttention(32, 2).attention_maps(torch.randn(1, 15, 32))


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_rollout_by_plain_loops(kind):
    model = build(attn_layer=kind, reg_tokens=1, depth=3)
    captured, _ = seen_by(model, torch.randn(1, 3, 48, 64))
    (found,) = vit.rollouts(model, captured).values()
    T, product = 14, None
    for layer in captured.values():
        weights = layer.weights()[0].double().numpy()
        mixed = np.zeros((T, T))
        for i in range(T):
            for j in range(T):
                mixed[i, j] = sum(weights[m, i, j] for m in range(2)) / 2 + (i == j)
            mixed[i] /= mixed[i].sum()
        if product is None:
            product = mixed
            continue
        after = np.zeros((T, T))
        for i in range(T):
            for j in range(T):
                after[i, j] = sum(mixed[i, n] * product[n, j] for n in range(T))
        product = after
    np.testing.assert_allclose(found.weights()[0, 0], product, rtol=1e-4, atol=1e-6)
    look = found.look(["cls", (1, 2)])
    assert look.names == ["rollout"]
    np.testing.assert_allclose(look.maps[0].flatten(1), product[[0, 2 + 6], 2:], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(look.elsewhere[0], product[[0, 8], :2].sum(1), rtol=1e-4)


def test_nothing_stays_in_the_model():
    model = build(dynamic_img_size=True)
    seen_by(model, torch.randn(1, 3, 48, 64))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_picture_is_padded_as_the_patches_are(photograph):
    model = build(dynamic_img_size=True, dynamic_img_pad=True)
    seen = view.view_timm(model, open_picture(photograph), [], (70, 33))
    assert (seen.size, seen.inside) == ((80, 48), (70, 33))
    assert seen.cell((5, 3), (299, 450)) == (4, 2)
    assert not seen.picture[70:].any()
