"""Attention as ``tools.view`` computes it: weights give the layers' outputs, or are the definition's in plain loops."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

timm = pytest.importorskip("timm")

from attn_plugins.modules import (  # noqa: E402
    AAConv2d,
    BilateralNonLocal2d,
    CrissCrossAttention2d,
    GeneralizedAttention2d,
    LocalBilateralConv2d,
    NonLocal2d,
    capture_attention,
)
from attn_plugins.modules.tokens.space_time_attention import STEPS  # noqa: E402
from attn_plugins.timm import ViTAttention, accelerate  # noqa: E402
from tests.tools.view_helpers import CLIP, SMALL_CLIP, SMALL_VIT, VIT, seen_by  # noqa: E402
from tools.view import clips, models, patches  # noqa: E402

# --- vision transformers ------------------------------------------------------------------------------------------


def build(name: str = VIT, sharp: float = 8, **options) -> nn.Module:
    """Build a small model with weights far from uniform, in which all of our terms have an effect."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL_VIT, **options}).eval()
    with torch.no_grad():
        for layer in map(model.get_submodule, models.known_layers(model)):
            layer.qkv.weight *= sharp
            for key, parameter in layer.named_parameters():
                if key.split(".")[0] not in ("qkv", "proj", "norm", "q_norm", "k_norm", "gate_proj"):
                    nn.init.normal_(parameter, std=0.5)
    return model


def output_of(layer: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    """Compute the layer's output from its values and these weights."""
    B, T, _ = x.shape
    value = layer.qkv(x).view(B, T, 3, layer.num_heads, -1)[:, :, 2].transpose(1, 2)
    return layer.proj(layer.norm((weights @ value).transpose(1, 2).reshape(B, T, -1)))


@torch.no_grad()
def check(model: nn.Module, x: Tensor, **keywords) -> dict[str, patches.Patches]:
    """Check that the weights and values of every layer give its output; return what was captured."""
    captured, outputs = seen_by(model, x, **keywords)
    assert list(captured) == list(outputs) == list(models.known_layers(model))
    for name, layer in captured.items():
        weights = layer.weights()
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]), rtol=1e-4, atol=1e-5)
        expected = output_of(model.get_submodule(name), layer.x, weights)
        torch.testing.assert_close(expected, outputs[name], rtol=1e-3, atol=1e-4)
    return captured


@pytest.mark.parametrize("options", [{}, dict(qk_norm=True, scale_attn_norm=True)], ids=["plain", "norms"])
@pytest.mark.parametrize("fused", [True, False])
def test_stock_layers(fused, options):
    model = build(reg_tokens=2, **options)
    for layer in map(model.get_submodule, models.known_layers(model)):
        assert not isinstance(layer, ViTAttention)
        layer.fused_attn = fused
    captured = check(model, torch.randn(2, 3, 48, 64))
    assert max(float(n.weights().max()) for n in captured.values()) > 0.5


@pytest.mark.parametrize("kind", ["attn0000", "attn0110", "attn1111", "attn_bilateral", "attn_range7"])
def test_our_layers(kind):
    check(build(attn_layer=kind, reg_tokens=2), torch.randn(2, 3, 48, 64))


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
@pytest.mark.parametrize("added", [True, False])
def test_masked_tokens(kind, added):
    mask = torch.rand(13, 13) > 0.3
    mask.fill_diagonal_(True)
    given = torch.zeros(13, 13).masked_fill(~mask, -torch.inf) if added else mask
    for layer in check(build(attn_layer=kind), torch.randn(2, 3, 48, 64), attn_mask=given).values():
        assert (layer.weights()[:, :, ~mask] == 0).all()
        np.testing.assert_allclose(layer.look(["cls", (2, 1)]).uniform, 1 / mask[[0, 10]].sum(1), rtol=1e-6)


def test_causal_weights():
    layer, x = build().blocks[0].attn, torch.randn(2, 13, 32)
    with torch.no_grad():
        weights = patches.stock_weights(layer, x, is_causal=True)
        torch.testing.assert_close(output_of(layer, x, weights), layer(x, is_causal=True), rtol=1e-3, atol=1e-4)


NAFLEX = "naflexvit_base_patch16_gap"


@pytest.mark.parametrize(
    "name, options, size, prefix, grid",
    [
        (VIT, dict(dynamic_img_size=True), (80, 32), ["cls"], (5, 2)),
        (VIT, dict(dynamic_img_size=True, dynamic_img_pad=True), (70, 33), ["cls"], (5, 3)),
        (VIT, dict(class_token=False, global_pool="avg", reg_tokens=3), (48, 64), ["registers"] * 3, (3, 4)),
        (VIT, dict(class_token=False, global_pool="avg"), (48, 64), [], (3, 4)),
        ("deit_tiny_distilled_patch16_224", {}, (48, 64), ["cls", "dist"], (3, 4)),
        (NAFLEX, {}, (64, 48), ["registers"] * 4, (4, 3)),
        (NAFLEX, dict(class_token=True, reg_tokens=1), (64, 48), ["cls", "registers"], (4, 3)),
    ],
    ids=["dynamic", "padded", "registers alone", "patches alone", "distilled", "naflex", "naflex with cls"],
)
@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_where_tokens_lie(kind, name, options, size, prefix, grid):
    captured = check(build(name, attn_layer=kind, **options), torch.randn(1, 3, *size))
    assert all((layer.prefix, layer.size) == (prefix, grid) for layer in captured.values())


def test_a_look_is_rows_of_the_weights():
    captured, _ = seen_by(build(reg_tokens=2, attn_layer="attn1111"), torch.randn(1, 3, 48, 64))
    layer = captured["blocks.1.attn"]
    rows, looked = layer.weights()[0][:, [0, 3 + 2 * 4 + 1]], layer.look(["cls", (2, 1)])
    rows = torch.cat((rows.mean(0, keepdim=True), rows))
    assert looked.names == ["mean of heads", "head 1", "head 2"]
    torch.testing.assert_close(looked.maps.flatten(2), rows[..., 3:])
    torch.testing.assert_close(looked.elsewhere, rows[..., :3].sum(-1))
    torch.testing.assert_close(looked.uniform, torch.full((2,), 1 / 15))
    model = build(attn_layer="attn_range7", img_size=(16, 160), dynamic_img_size=True, sharp=30)
    captured, _ = seen_by(model, torch.randn(1, 3, 160, 16))
    looked = captured["blocks.0.attn"].look(["cls", (0, 0), (5, 0)])  # 10 rows, reach of 3
    np.testing.assert_allclose(1 / looked.uniform, [11, 5, 8], rtol=1e-6)


@pytest.mark.parametrize("kind", ["attn", "attn1111"])
def test_rollout(kind):
    model = build(attn_layer=kind, reg_tokens=1)
    captured, _ = seen_by(model, torch.randn(1, 3, 48, 64))
    (rollout,) = patches.rollouts(model, captured).values()
    total = np.eye(14)
    for layer in captured.values():
        total = (layer.weights()[0].double().mean(0).numpy() + np.eye(14)) / 2 @ total
    looked = rollout.look(["cls", (1, 2)])
    assert looked.names == ["rollout"]
    np.testing.assert_allclose(looked.maps[0].flatten(1), total[[0, 2 + 6], 2:], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(looked.elsewhere[0], total[[0, 8], :2].sum(1), rtol=1e-4)


def test_terms_of_a_vision_transformer_from_its_cls_token():
    model = build(attn_layer="attn1111", depth=1, sharp=1)
    captured, _ = seen_by(model, torch.randn(1, 3, 48, 64))
    (layer,) = captured.values()
    parts = layer.parts()
    titles = ["ε1: query and key content", "ε2: query content and position", "ε3: key content", "ε4: position"]
    assert list(parts) == titles
    # The normalised product of softmaxes is the softmax of the sum.
    product = torch.stack([part.weights().double() for part in parts.values()]).prod(0)
    whole = layer.weights().double()
    torch.testing.assert_close(product / product.sum(-1, keepdim=True), whole, rtol=1e-4, atol=1e-6)
    # The cls token has no position, so ε2 is 0 for all its keys.
    torch.testing.assert_close(parts[titles[1]].look(["cls"]).maps, torch.full((3, 1, 3, 4), 1 / 13))
    assert patches.rollouts(model, captured)["rollout"].parts() == {}


# --- Swin ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_swin(name, faster):
    """Maps of 16 × 24 and 8 × 12 in windows of 4, shifted in every second block."""
    torch.manual_seed(0)
    small = dict(img_size=(64, 96), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)
    model = timm.create_model(name, **small).eval()
    for key, parameter in model.named_parameters():
        if "table" in key or "cpb_mlp" in key or key.endswith("_bias"):
            nn.init.normal_(parameter, std=0.5)
    if faster:
        accelerate(model)
    with models.capture(model) as captured:
        model(torch.randn(2, 3, 64, 96))
    assert list(captured) == [f"layers.{stage}.blocks.{block}.attn" for stage in range(2) for block in range(2)]
    for layer in captured.values():
        block, given = layer.call.layer.block, layer.call.arguments[0]
        attn, maps = block.attn, layer.call.maps()
        bias = torch.cat((attn.q_bias, 0 * attn.q_bias, attn.v_bias)) if "v2" in name else attn.qkv.bias
        value = nn.functional.linear(given, attn.qkv.weight, bias).unflatten(3, (3, attn.num_heads, -1))[:, :, :, 2]
        output = attn.proj(torch.einsum("bmhwyx,byxmd->bhwmd", maps, value).flatten(3))
        torch.testing.assert_close(output, block._attn(given), rtol=1e-4, atol=1e-5)
        assert layer.size == tuple(given.shape[1:3])
        looked = [part.look([(0, 1), (5, 7)]).maps for part in (layer, *layer.parts().values())]
        torch.testing.assert_close(looked[0], maps[0, :, [0, 5], [1, 7]])
        assert list(layer.parts()) == ["content", "table"]
        joint = looked[1] * looked[2]
        torch.testing.assert_close(joint / joint.sum((-2, -1), keepdim=True), looked[0])


# --- clips --------------------------------------------------------------------------------------------------------

GRID = (4, 3, 4)  # frames, and rows and columns of patches; 3 makes groups that differ in size


def clip_model(pattern: str, **options) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(CLIP, pattern=pattern, **{**SMALL_CLIP, **options}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def is_key(region: str, query: tuple[int, ...], key: tuple[int, ...]) -> bool:
    """Return True if a patch is among a query's keys, by the definition of the pattern."""
    (t, y, x), (s, v, u), (_, H, W) = query, key, GRID
    return dict(
        joint=True,
        space=s == t,
        time=(v, u) == (y, x),
        width=(s, v) == (t, y),
        height=(s, u) == (t, x),
        local=(v < -(-H // 2)) == (y < -(-H // 2)) and (u < -(-W // 2)) == (x < -(-W // 2)),
        **{"global": all((a - b) % 2 == 0 for a, b in zip(query, key))},
    )[region]


def defined_weights(layer: nn.Module, x: Tensor, P: int) -> np.ndarray:
    """Compute the weights (M, P + N, P + N) of a sequence in plain loops; a frame is a clip of one frame."""
    q, k, _ = layer.qkv(x).double().view(len(x), 3, layer.num_heads, -1).permute(1, 2, 0, 3)
    logits = (q @ k.mT / q.shape[-1] ** 0.5).exp().numpy()
    places = list(product(*map(range, GRID)))[: len(x) - P]
    groups = {frozenset(n for n, key in enumerate(places) if is_key(layer.region, place, key)) for place in places}
    weights = np.zeros_like(logits)
    for group in groups:
        members = [*range(P), *(P + n for n in group)]
        for m, i in product(range(len(weights)), members):
            total = logits[m, i, members].sum()
            weights[m, i, members] += logits[m, i, members] / total / (len(groups) if i < P else 1)
    return weights


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, dict(reg_tokens=2), dict(class_token=False, global_pool="avg")], ids=str)
@pytest.mark.parametrize("pattern", list(STEPS))
def test_steps_are_their_definition(pattern, options):
    model = clip_model(pattern, **options)
    captured, _ = seen_by(model, torch.randn(1, 4, 3, 48, 64))
    assert list(captured) == [f"blocks.{n}.{step}attn" for n in range(2) for step, _ in STEPS[pattern]]
    prefix = [*["cls"][: "class_token" not in options], *["registers"] * options.get("reg_tokens", 0)]
    (_, H, W), places = GRID, [(2, 1, 3), (0, 2, 0)]
    cells = [(t // 2 * H + y, t % 2 * W + x) for t, y, x in places]  # of the mosaic
    for name, layer in captured.items():
        x, P = layer.arguments[0], len(layer.prefix)
        assert layer.prefix == (prefix if name.endswith(".attn") else [])
        assert (layer.clip, layer.size) == (GRID, (2 * H, 2 * W))
        defined = [torch.as_tensor(defined_weights(layer.layer, one, P)).float() for one in x]
        looked = layer.look([*cells, *["cls"] * layer.cls])
        assert looked.names == ["mean of heads", "head 1", "head 2"]
        for q, (t, y, _x) in enumerate(places):
            s, number = (t, y * W + _x) if len(x) > 1 else (0, (t * H + y) * W + _x)
            row = torch.zeros(2, len(x), x.shape[1])
            row[:, s] = defined[s][:, P + number]
            patches_ = clips.mosaic(row[..., P:].reshape(2, *GRID))
            torch.testing.assert_close(looked.maps[1:, q], patches_, rtol=1e-3, atol=1e-6)
            keys = sum(is_key(layer.layer.region, places[q], key) for key in product(*map(range, GRID)))
            np.testing.assert_allclose(1 / looked.uniform[q], keys + P, rtol=1e-5)
        if layer.cls:  # the mean over the frames, where every frame has its own
            rows = torch.stack([own[:, 0] for own in defined], 1) / len(x)
            torch.testing.assert_close(
                looked.maps[1:, 2], clips.mosaic(rows[..., P:].reshape(2, *GRID)), rtol=1e-3, atol=1e-6
            )
            torch.testing.assert_close(looked.elsewhere[1:, 2], rows[..., :P].sum((1, 2)), rtol=1e-3, atol=1e-6)
        else:
            with pytest.raises(ValueError, match="has no cls token"):
                layer.look(["cls"])


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["divided", "axial"])
def test_rollout_of_a_clip(pattern):
    """Multiply every step's mean over heads plus identity; prefix tokens pass through the added steps."""
    model = clip_model(pattern, reg_tokens=1)
    captured, _ = seen_by(model, torch.randn(1, 4, 3, 48, 64))
    (rollout,) = clips.clip_rollouts(model, captured).values()
    total = np.eye(50)
    for layer in captured.values():
        own, mixed = defined_weights(layer.layer, layer.arguments[0][0], len(layer.prefix)).mean(0), np.eye(50)
        first = 50 - len(own)
        mixed[first:, first:] = (mixed[first:, first:] + own) / 2
        total = mixed @ total
    looked = rollout.look(["cls", (4, 3)])  # frame 2, row 1, column 3
    assert looked.names == ["rollout"]
    expected = torch.as_tensor(total[[0, 2 + 2 * 12 + 7]]).float()
    torch.testing.assert_close(looked.maps[0], clips.mosaic(expected[:, 2:].reshape(2, *GRID)), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(looked.elsewhere[0], expected[:, :2].sum(1), rtol=1e-3, atol=1e-6)


def test_a_mosaic():
    assert [clips.layout(n) for n in (1, 2, 7, 12, 96)] == [(1, 1), (1, 2), (1, 7), (3, 4), (8, 12)]
    frames = torch.arange(6).view(6, 1, 1) * torch.ones(2, 3)
    assert clips.mosaic(frames)[::2, ::3].tolist() == [[0, 1, 2], [3, 4, 5]]


# --- our layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer, keys",
    [
        (AAConv2d(8, 8, 3, 4, 4, 2, input_size=(6, 5)), np.full((6, 5), 30)),
        (NonLocal2d(8), np.full((6, 5), 30)),
        (BilateralNonLocal2d(8), np.full((6, 5), 30)),
        (GeneralizedAttention2d(8, 2, "1111", kv_stride=2), np.full((6, 5), 9)),
        (GeneralizedAttention2d(8, 2, "1111", spatial_range=3), np.outer([2, 3, 3, 3, 3, 2], [2, 3, 3, 3, 2])),
        (CrissCrossAttention2d(8), np.full((6, 5), 10)),
        (LocalBilateralConv2d(8, 8, 3, num_heads=2), np.outer([2, 3, 3, 3, 3, 2], [2, 3, 3, 3, 2])),
    ],
    ids=["augmented", "non-local", "bilateral", "strided", "range", "criss-cross", "window"],
)
def test_the_uniform_weight_counts_the_keys_of_a_query(layer, keys):
    model, x = nn.ModuleDict({"layer": layer.eval()}), 100 * torch.randn(1, 8, 6, 5)  # most weights round to 0
    with models.capture(model) as captured, capture_attention(model) as ours, torch.no_grad():
        layer(x)
    queries = torch.cartesian_prod(torch.arange(6), torch.arange(5))
    looked = captured["layer"].look(queries.tolist())
    np.testing.assert_allclose(looked.uniform.view(6, 5), 1 / keys, rtol=1e-6)
    torch.testing.assert_close(looked.maps, ours["layer"].maps(queries)[0])
