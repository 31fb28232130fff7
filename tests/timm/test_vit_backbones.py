"""ViT-Adapter and the simple feature pyramid on timm's vision transformers, narrowed."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attn_plugins.timm  # noqa: F401
from attn_plugins.modules import ViTAdapter, ViTPyramid

MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "vit_small_patch14_dinov2": dict(img_size=56),  # LayerScale; positions of 4 × 4 patches
    "vit_small_patch14_reg4_dinov2": dict(img_size=56),  # registers
    "vit_small_patch16_dinov3": {},  # rotary positions alone
    "eva02_tiny_patch14_224": {},  # learnt and rotary positions
    "vit_small_patch16_rope_mixed_224": {},  # rotary positions of each block
    "eva_giant_patch14_224": {},
    "vit_base_patch16_siglip_224": {},  # no class token, pooled by attention
    "vit_base_patch16_clip_224": {},  # a normalization before the blocks
    "deit_tiny_distilled_patch16_224": {},  # two class tokens
    "deit3_small_patch16_224": {},
    "vit_pe_core_tiny_patch16_384": {},
    "vit_small_patch8_224": {},
}


def transformer(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    options = {**dict(embed_dim=24, depth=4, num_heads=2, num_classes=0, dynamic_img_size=True), **options}
    if name.startswith("eva"):
        options["num_heads"] = 3  # of a width that rotary positions divide by 4
    vit = timm.create_model(name, **options)
    for parameter in vit.parameters():  # class tokens, registers and LayerScales are almost 0
        nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else nn.init.normal_(parameter, 0.5, 0.1)
    return vit


def adapter(vit: nn.Module, **options: Any) -> ViTAdapter:
    return ViTAdapter(vit, **{**dict(deform_num_heads=3, conv_inplane=4), **options})


def padded(x: Tensor, patch: int) -> Tensor:
    return F.pad(x, (0, -x.shape[3] % patch, 0, -x.shape[2] % patch))


def patches_of(model: ViTAdapter, x: Tensor) -> list[Tensor]:
    """Return the maps of patches after every interaction."""
    seen, (H, W) = [], [-(-n // p) for n, p in zip(x.shape[2:], model.patch_size)]
    hooks = [
        model.vit.blocks[last].register_forward_hook(lambda module, inputs, output: seen.append(output))
        for _, last in model.interaction_indexes
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return [model.patches(tokens, (H, W)) for tokens in seen]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_features_are_timms_at_first(name):
    model, x = adapter(transformer(name, **MODELS[name])).eval(), torch.randn(2, 3, 60, 100)
    expected = model.vit.forward_intermediates(padded(x, model.patch_size[0]), intermediates_only=True)
    for features, wanted in zip(patches_of(model, x), expected, strict=True):
        assert torch.equal(features, wanted)
    for layer in model.interactions:
        nn.init.constant_(layer["injector"].gamma, 1.0)
    assert not torch.allclose(patches_of(model, x)[0], expected[0])


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "vit_small_patch16_dinov3"])
def test_class_tokens_and_registers_are_not_touched(name):
    """The adapter passes them on to the blocks and reads none of them."""
    model = adapter(transformer(name, **MODELS[name]), interaction_indexes=[[0, 3]], init_values=0.5).eval()
    x, seen = torch.randn(1, 3, 64, 80), {}
    prefix = model.vit.num_prefix_tokens
    assert prefix == 5
    model.vit.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.update(first=inputs[0]))
    model.interactions[0]["extractor"].register_forward_pre_hook(lambda module, inputs: seen.update(read=inputs[1]))
    tokens, (H, W), _ = model.embed(x)
    model(x)
    assert torch.equal(seen["first"][:, :prefix], tokens[:, :prefix])
    assert not torch.allclose(seen["first"][:, prefix:], tokens[:, prefix:])
    assert seen["read"].shape[1] == H * W


@pytest.mark.parametrize("size", [(224, 352), (518, 392)])
@torch.no_grad()
def test_sizes_of_pictures(size):
    for name, patch in (("vit_small_patch14_dinov2", 14), ("vit_small_patch16_dinov3", 16)):
        model, x = adapter(transformer(name, **MODELS[name])).eval(), torch.randn(1, 3, *size)
        features = patches_of(model, x)[-1]
        assert features.shape[2:] == tuple(-(-n // patch) for n in size)
        outputs = model(x)
        assert [f.shape[2:] for f in outputs] == [tuple(-(-n // s) for n in size) for s in (4, 8, 16, 32)]
        assert all(f.isfinite().all() for f in outputs)


@pytest.mark.parametrize("with_cp", [False, True])
def test_terms_of_our_attention_know_the_places_of_their_tokens(with_cp):
    """ε2 of a model with ``attn_layer`` on its own grid, after the injector has made new tokens."""
    vit = transformer("vit_tiny_patch16_224", attn_layer="attn1111", depth=2)
    model = adapter(vit, interaction_indexes=[[0, 0], [1, 1]], with_cp=with_cp).train()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()
    x = torch.randn(2, 3, 40, 90)
    features = patches_of(model, x)
    expected = vit.forward_intermediates(padded(x, 16), intermediates_only=True)
    for one, wanted in zip(features, expected, strict=True):
        torch.testing.assert_close(one, wanted)
    sum(f.square().mean() for f in model(x)).backward()
    gates = [p for name, p in vit.named_parameters() if "gate" in name]
    assert gates
    assert all(p.grad.abs().sum() > 0 for p in gates)


@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "vit_small_patch16_dinov3"])
@pytest.mark.parametrize("kind", [adapter, lambda vit: ViTPyramid(vit, 6)])
@pytest.mark.slow
def test_compiled_and_exported(kind, name):
    """Compilation takes half a minute on two cores."""
    model, x = kind(transformer(name, **{**MODELS[name], "depth": 2})).eval(), torch.randn(1, 3, 60, 100)
    with torch.no_grad():
        expected = model(x)
        for function in (torch.compile(model, fullgraph=True), torch.export.export(model, (x,)).module()):
            for output, wanted in zip(function(x), expected, strict=True):
                torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "img_size", "size"),
    [
        ("vit_small_patch14_dinov2", (56, 84), (56, 84)),
        ("vit_small_patch16_dinov3", (64, 96), (64, 96)),
        ("vit_tiny_patch16_224", 224, (64, 96)),  # positions are resampled
    ],
)
@pytest.mark.slow
def test_onnx_runtime_gives_the_same(name, img_size, size, tmp_path):
    """By the exporter that is based on torch.export."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = adapter(transformer(name, img_size=img_size, depth=2)).eval(), torch.randn(2, 3, *size)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = model(x)
    for output, wanted in zip(session.run(None, {session.get_inputs()[0].name: x.numpy()}), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(output), wanted, rtol=1e-4, atol=1e-4)


def test_the_pyramid_starts_from_timms_last_map():
    model, x = ViTPyramid(transformer("vit_small_patch16_dinov3"), 6).eval(), torch.randn(1, 3, 64, 96)
    model.scales[2] = nn.Identity()
    expected = model.vit.forward_intermediates(x, indices=1, intermediates_only=True)[0]
    torch.testing.assert_close(model(x)[2], expected)
