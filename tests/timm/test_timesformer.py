"""TimeSformer in timm's registry: the official model's definition and timm's ViT."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models._features_fx import create_feature_extractor
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins.modules.tokens.space_time_attention import STEPS, RegionAttention
from attn_plugins.timm import TimeSformer

PATTERNS = list(STEPS)
OFFICIAL = ["divided", "space", "joint"]
SMALL = dict(img_size=(32, 48), patch_size=16, embed_dim=32, depth=2, num_heads=2, num_classes=5)
GRID = (2, 3)


def build(pattern="divided", trained=True, **options) -> TimeSformer:
    """Build a small model; with ``trained``, no parameter is 0."""
    torch.manual_seed(0)
    model = timm.create_model("timesformer_small_patch16_224", pattern=pattern, **{**SMALL, "num_frames": 4, **options})
    if trained:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def vit(**options) -> nn.Module:
    torch.manual_seed(1)
    model = timm.create_model("vit_small_patch16_224", **{**SMALL, **options}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def clip(B=2, T=4, H=32, W=48) -> Tensor:
    return torch.randn(B, T, 3, H, W, generator=torch.Generator().manual_seed(2))


def official(weights: dict[str, Tensor], clip: Tensor, pattern: str) -> Tensor:
    """Compute the official ``VisionTransformer.forward``, one clip at a time: (B, num_classes)."""

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    def attention(name, x):  # (sequences, tokens, C)
        q, k, v = linear(f"{name}.qkv", x).unflatten(2, (3, SMALL["num_heads"], -1)).permute(2, 0, 3, 1, 4)
        attended = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return linear(f"{name}.proj", attended.transpose(1, 2).flatten(2))

    logits = []
    for frames in clip:
        T = len(frames)
        patches = F.conv2d(frames, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=16)
        x = torch.cat((weights["cls_token"].expand(T, -1, -1), patches.flatten(2).mT), 1) + weights["pos_embed"]
        if pattern != "space":  # b (h w t) m, the official code's order of tokens
            times = F.interpolate(weights["time_embed"].mT, size=T).mT
            x = torch.cat((x[:1, 0], (x[:, 1:].transpose(0, 1) + times).flatten(0, 1)), 0)[None]
        for i in range(SMALL["depth"]):
            block = f"blocks.{i}"
            if pattern == "divided":
                cls, patches = x[:, :1], x[0, 1:].unflatten(0, (-1, T))
                added = attention(f"{block}.temporal_attn", norm(f"{block}.temporal_norm1", patches))
                patches = patches + linear(f"{block}.temporal_fc", added)
                per_frame = torch.cat((cls.expand(T, -1, -1), patches.transpose(0, 1)), 1)
                result = attention(f"{block}.attn", norm(f"{block}.norm1", per_frame))
                result = torch.cat((result[:, :1].mean(0), result[:, 1:].transpose(0, 1).flatten(0, 1)))
                x = torch.cat((cls[0], patches.flatten(0, 1)))[None] + result
            else:
                x = x + attention(f"{block}.attn", norm(f"{block}.norm1", x))
            hidden = F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x)))
            x = x + linear(f"{block}.mlp.fc2", hidden)
        logits.append(linear("head", norm("norm", x.mean(0))[0]))
    return torch.stack(logits)


def official_keys(pattern: str, depth: int) -> set[str]:
    """Return the names of the official checkpoints."""
    layers = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    if pattern == "divided":
        layers += ["temporal_norm1", "temporal_attn.qkv", "temporal_attn.proj", "temporal_fc"]
    named = [f"blocks.{i}.{layer}" for i in range(depth) for layer in layers] + ["patch_embed.proj", "norm", "head"]
    single = ["cls_token", "pos_embed"] + ["time_embed"] * (pattern != "space")
    return {f"model.{key}" for key in [*single, *(f"{n}.{kind}" for n in named for kind in ("weight", "bias"))]}


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", OFFICIAL)
def test_official_checkpoints_load_strictly_and_give_their_results(pattern, tmp_path):
    source = build(pattern)
    checkpoint = {f"model.{key}": torch.randn_like(value) * 0.2 for key, value in source.state_dict().items()}
    assert set(checkpoint) == official_keys(pattern, SMALL["depth"])
    expected = official({key[6:]: value for key, value in checkpoint.items()}, clip(), pattern)
    model = build(pattern)
    model.load_state_dict(checkpoint, strict=True)
    torch.testing.assert_close(model(clip()), expected, rtol=1e-4, atol=1e-4)
    torch.save({"epoch": 15, "model_state": checkpoint, "optimizer_state": {}, "cfg": ""}, tmp_path / "official.pyth")
    again = build(pattern, checkpoint_path=str(tmp_path / "official.pyth"), trained=False)
    torch.testing.assert_close(again(clip()), expected, rtol=1e-4, atol=1e-4)


def test_official_checkpoints_of_the_base_model():
    """Compare every name, and shapes, on the meta device."""
    with torch.device("meta"):
        model = timm.create_model("timesformer_base_patch16_224")
    assert {f"model.{key}" for key in model.state_dict()} == official_keys("divided", 12)
    for key, shape in {
        "time_embed": (1, 8, 768),
        "pos_embed": (1, 197, 768),
        "blocks.11.temporal_attn.qkv.weight": (2304, 768),
        "head.weight": (400, 768),
    }.items():
        assert tuple(model.state_dict()[key].shape) == shape
    assert timm.get_pretrained_cfg("timesformer_base_patch16_224").mean == (0.45, 0.45, 0.45)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_vit_loads_and_is_the_start(pattern):
    stock, model = vit(), build(pattern)
    model.load_state_dict(stock.state_dict(), strict=True)
    picture = clip()[:, 0]
    expected = stock(picture)
    same = pattern in OFFICIAL
    assert torch.allclose(model(picture), expected, rtol=1e-4, atol=1e-5) == same
    assert torch.allclose(model(picture[:, None]), expected, rtol=1e-4, atol=1e-5) == same
    frames = model(picture[:, None].expand(-1, 4, -1, -1, -1))
    assert torch.allclose(frames, expected, rtol=1e-4, atol=1e-5) == (pattern in ("divided", "space"))
    for name in model.blocks[0].added:
        assert torch.equal(model.blocks[1].get_submodule(f"{name}attn").qkv.weight, stock.blocks[1].attn.qkv.weight)


def test_weights_within_another_model_and_weights_that_lack_something():
    model = build()
    wrapped, weights = nn.Sequential(model), model.state_dict()
    wrapped.load_state_dict({f"0.model.{key}": value + 1 for key, value in weights.items()})
    assert torch.equal(wrapped[0].time_embed, build().time_embed + 1)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*\"time_embed\""):
        build("space").load_state_dict(weights)
    del weights["blocks.1.temporal_fc.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"blocks.1.temporal_fc.bias\""):
        model.load_state_dict(weights)


def test_other_numbers_of_frames():
    """The time embedding, of a clip or a checkpoint, is taken from the nearest frame."""
    model, longer = build(), build(num_frames=8)
    longer.load_state_dict(model.state_dict())
    assert torch.equal(longer.time_embed, model.time_embed.repeat_interleave(2, 1))
    x = clip(T=8)
    torch.testing.assert_close(model(x), longer(x))
    torch.testing.assert_close(model(x), official(model.state_dict(), x, "divided"), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(x), model(x.flip(1)), rtol=0, atol=5e-5)


def test_pictures_of_other_sizes():
    """timm resizes position embeddings of the model and of a checkpoint."""
    model = build(img_size=(32, 32), dynamic_img_size=True)
    weights = dict(pretrained=True, pretrained_cfg_overlay=dict(state_dict=model.state_dict(), num_classes=5))
    wide = build(img_size=(48, 48), trained=False, **weights)
    torch.testing.assert_close(model(clip(H=48)), wide(clip(H=48)))


# --- initialization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
def test_added_parts_start_as_the_identity(pattern):
    model = build(pattern, trained=False)

    def check():
        for block in model.blocks:
            for name in block.added:
                assert not any(p.any() for p in block.get_submodule(f"{name}fc").parameters())
        assert (model.time_embed is None) == (pattern == "space")
        assert model.time_embed is None or not model.time_embed.any()

        for layer in (m for m in model.blocks.modules() if isinstance(m, RegionAttention)):
            assert 0.018 < layer.qkv.weight.std() < 0.022  # timm's rule

    check()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model.init_weights()
    check()


# --- timm's conventions -----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("pattern", PATTERNS)
def test_features(pattern):
    """Also by torch.fx, of which blocks are leaves; inputs are pictures or clips of another length."""
    model = build(pattern)
    backbone = timm.create_model(
        "timesformer_small_patch16_224", pattern=pattern, features_only=True, out_indices=(0, 1), **SMALL
    ).eval()
    assert [tuple(f.shape) for f in backbone(clip())] == [(2, 4, 32, *GRID)] * 2
    assert [tuple(f.shape) for f in backbone(clip()[:, 0])] == [(2, 32, *GRID)] * 2
    final, maps = model.forward_intermediates(clip(), indices=2, norm=True, return_prefix_tokens=True)
    torch.testing.assert_close(final, model.forward_features(clip()))
    torch.testing.assert_close(model.forward_head(final), model(clip()))
    patches, cls = maps[-1]
    if pattern != "space":  # its last norm follows the mean over frames
        torch.testing.assert_close(final[:, 1:].reshape(2, 4, *GRID, 32).permute(0, 1, 4, 2, 3), patches)
        torch.testing.assert_close(final[:, :1], cls)
    (tokens,) = model.forward_intermediates(clip(), [0], output_fmt="NLC", intermediates_only=True, stop_early=True)
    assert tokens.shape == (2, 24, 32)
    (early,) = model.get_intermediate_layers(clip(), [0])
    torch.testing.assert_close(early, tokens)
    outputs = model.forward_intermediates(clip(), [0], output_dict=True, return_prefix_tokens=True)
    assert set(outputs) == {"image_intermediates", "image_intermediates_prefix", "image_features"}
    traced = create_feature_extractor(model, ["head"])
    for x in (clip()[:, 0], clip(), clip(T=3)):
        torch.testing.assert_close(traced(x)["head"], model(x))


@pytest.mark.parametrize("pattern", ["divided", "local_global"])
def test_gradient_checkpointing_changes_no_gradient(pattern):
    model, gradients, calls = build(pattern, drop_path_rate=0.0).train(), [], []
    model.blocks[0].register_forward_pre_hook(lambda *call: calls.append(model.grad_checkpointing))
    for enable in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enable)
        model(clip()).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert calls == [False, True, True]
    assert all(gradient.any() for gradient in gradients[0])
    torch.testing.assert_close(*gradients)


def test_parameter_groups():
    model = build()
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(key for keys in groups.values() for key in keys) == sorted(k for k, _ in model.named_parameters())
    assert "time_embed" in model.no_weight_decay()
    assert "time_embed" in groups[min(groups)]


def test_prefix_tokens_pooling_and_drops():
    averaged = build(class_token=False, global_pool="avg")
    assert averaged(clip()).shape == (2, 5)
    with_registers = build(reg_tokens=2, pattern="axial")
    assert with_registers.num_prefix_tokens == 3
    assert with_registers(clip()).shape == (2, 5)
    model = build(drop_path_rate=0.5, proj_drop_rate=0.2, attn_drop_rate=0.2, pos_drop_rate=0.1).train()
    assert not torch.allclose(model(clip()), model(clip()))
    model.reset_classifier(7)
    assert model.eval()(clip()).shape == (2, 7)


def test_paths_of_tracks_frames_and_clips_are_dropped():
    model = build(drop_path_rate=None)
    block, shapes = model.blocks[-1], []
    assert block.drop2.drop_prob == pytest.approx(0.1)
    for drop in (block.drop1, block.drop2):
        drop.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    T, H, W, C = 2, 3, 4, model.embed_dim
    block.train()(torch.randn(5, 1 + T * H * W, C), (T, H, W), 1)
    assert shapes == [(5 * H * W, T, C), (5 * T, 1 + H * W, C), (5, 1 + T * H * W, C)]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["divided", "axial"])
def test_compiled_exported_and_half(pattern):
    torch._dynamo.reset()
    model = build(pattern, depth=1)
    with torch.no_grad():
        expected = model(clip())
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(clip()), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.export.export(model, (clip(),)).module()(clip()), expected)
        tolerance = dict(rtol=0.1, atol=0.1 * expected.abs().max().item())
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(clip()).float(), expected, **tolerance)


def test_clips_of_another_shape_raise():
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 3, .* got \(2, 3, 4, 32, 48\); x.transpose"):
        build()(clip().transpose(1, 2))
    with pytest.raises(ValueError, match=r"frames before channels, got \(2, 4, 1, 32, 48\)$"):
        build()(clip()[:, :, :1])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(pattern="time"), r"pattern must be one of space, joint, .*, axial, got 'time'"),
        (dict(num_frames=0), "num_frames must be a positive int, got 0"),
        (dict(patch_drop_rate=0.5), "patch_drop_rate must be 0"),
        (dict(block_fn=nn.Identity), "block_fn must be left out"),
        (dict(qk_norm=True), "qk_norm must be left out: .*, got True"),
        (dict(init_values=1e-5), "init_values must be left out: .*, got 1e-05"),
        (dict(attn_layer="attn1111"), "attn_layer must be timm's Attention, which pattern replaces, got "),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
