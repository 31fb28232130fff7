"""ViT-Adapter and the simple feature pyramid against formulas in plain PyTorch, on a small transformer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins import ops
from attn_plugins.modules import ViTAdapter, ViTPyramid
from attn_plugins.modules.maps.parts.vit_backbone import resample
from attn_plugins.modules.maps.vit_adapter import Extractor, Injector
from tests.helpers.cuda_checks import randomized
from tests.helpers.tiny_vit import TinyViT


def adapter(patch_size: int = 16, depth: int = 2, rope: bool = False, **options: Any) -> ViTAdapter:
    torch.manual_seed(0)
    vit = TinyViT(depth=depth, patch_size=patch_size, rope=rope)
    return ViTAdapter(
        vit, **{**dict(deform_num_heads=2, conv_inplane=4, interaction_indexes=[[0, 0], [1, 1]]), **options}
    )


# --- the paper's formulas: one map, one head, one point after another -------------------------------------------------


def sampled(attn: Any, query: Tensor, value: Tensor, centres: Tensor, levels: list[tuple[int, int, int]]) -> Tensor:
    """Compute deformable attention with grid_sample.

    ``centres`` are pixels (x, y) of the picture, (Q, 2); ``levels`` are (H, W, stride) of each map of ``value``.
    """
    B, Q, _ = query.shape
    M, L, K = attn.num_heads, attn.num_levels, attn.num_points
    values = attn.value_proj(value).split([h * w for h, w, _ in levels], 1)
    offsets = attn.sampling_offsets(query).view(B, Q, M, L, K, 2)
    weights = attn.attention_weights(query).view(B, Q, M, L * K).softmax(-1).view(B, Q, M, L, K)
    heads = []
    for m in range(M):
        head: Any = 0
        for n, (H, W, stride) in enumerate(levels):
            maps = values[n].chunk(M, -1)[m].transpose(1, 2).view(B, -1, H, W)
            for k in range(K):
                pixels = centres / stride + offsets[:, :, m, n, k]  # in cells of the map, 0 at its border
                points = 2 * pixels / torch.tensor([W, H]) - 1
                at = F.grid_sample(maps, points[:, :, None], align_corners=False)  # (B, d, Q, 1)
                head = head + weights[:, :, m, n, k, None] * at.squeeze(3).transpose(1, 2)
        heads.append(head)
    return attn.output_proj(torch.cat(heads, -1))


def centres_of(H: int, W: int, stride: int) -> Tensor:
    return torch.tensor([[(j + 0.5) * stride, (i + 0.5) * stride] for i in range(H) for j in range(W)])


def tokens_of(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def map_of(tokens: Tensor, H: int, W: int) -> Tensor:
    return tokens.transpose(1, 2).reshape(len(tokens), -1, H, W)


def extracted(layer: Extractor, c: Tensor, x: Tensor, centres: Tensor, grid: Any, levels: list) -> Tensor:
    c = c + sampled(layer.attn, layer.query_norm(c), layer.feat_norm(x), centres, [grid])
    hidden, start, after = layer.ffn.fc1(layer.ffn_norm(c)), 0, []
    for H, W, _ in levels:
        after.append(tokens_of(layer.ffn.dwconv(map_of(hidden[:, start : start + H * W], H, W))))
        start += H * W
    return c + layer.ffn.fc2(F.gelu(torch.cat(after, 1)))


def injected(layer: Injector, x: Tensor, c: Tensor, centres: Tensor, levels: list) -> Tensor:
    return x + layer.gamma * sampled(layer.attn, layer.query_norm(x), layer.feat_norm(c), centres, levels)


def prior(spm: Any, x: Tensor) -> list[Tensor]:
    def conv(x: Tensor, parts: Any, stride: int) -> Tensor:
        weight, norm = parts[0].weight, parts[1]
        x = F.conv2d(x, weight, stride=stride, padding=1)
        scale = norm.weight / (norm.running_var + norm.eps) ** 0.5
        return ((x - norm.running_mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]).clamp(min=0)

    for n, stride in enumerate((2, 1, 1)):
        x = conv(x, spm.stem[3 * n : 3 * n + 2], stride)
    maps = [F.max_pool2d(x, 3, 2, 1)]
    for parts in (spm.conv2, spm.conv3, spm.conv4):
        maps.append(conv(maps[-1], parts, 2))
    return [fc(x) for fc, x in zip((spm.fc1, spm.fc2, spm.fc3, spm.fc4), maps)]


def expected_maps(model: ViTAdapter, pictures: Tensor) -> list[Tensor]:
    """Compute ViT-Adapter of the paper on pictures whose sides 32 and the patch size divide."""
    vit, p = model.vit, model.patch_size[0]
    c1, *coarse = prior(model.spm, pictures)
    levels = [(*level.shape[2:], stride) for level, stride in zip(coarse, (8, 16, 32))]
    c = torch.cat([tokens_of(level) + model.level_embed[n] for n, level in enumerate(coarse)], 1)
    grid = (pictures.shape[2] // p, pictures.shape[3] // p, p)
    tokens, rope = vit._pos_embed(vit.patch_embed(pictures)), None
    if isinstance(tokens, tuple):
        tokens, rope = tokens
    on_grid, on_levels = centres_of(*grid), torch.cat([centres_of(*level) for level in levels])
    seen = []
    for block, layer in zip(vit.blocks, model.interactions):
        x = injected(layer["injector"], tokens[:, 1:], c, on_grid, levels)
        tokens = block(torch.cat((tokens[:, :1], x), 1), rope=rope)
        seen.append(map_of(tokens[:, 1:], *grid[:2]))
        for extractor in (layer["extractor"], *layer["extra_extractors"]):
            c = extracted(extractor, c, tokens[:, 1:], on_levels, grid, levels)
    split = c.split([h * w for h, w, _ in levels], 1)
    maps = [map_of(part, h, w) for part, (h, w, _) in zip(split, levels)]
    maps = [c1 + model.up(maps[0]), *maps]
    added = seen if model.vit_features == "each" else seen[-1:] * 4
    maps = [m + F.interpolate(x, m.shape[2:], mode="bilinear", align_corners=False) for m, x in zip(maps, added)]
    return [norm(m) for norm, m in zip((model.norm1, model.norm2, model.norm3, model.norm4), maps)]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((64, 96), dict()),
        ((32, 64), dict(patch_size=8, rope=True)),
        ((224, 224), dict(patch_size=14)),
        ((64, 96), dict(depth=4, interaction_indexes=None, vit_features="each")),
    ],
    ids=str,
)
@torch.no_grad()
def test_it_is_the_papers_formula(size, options):
    model = randomized(adapter(**options)).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(std=0.1)
            norm.running_var.uniform_(0.8, 1.2)
    x = torch.randn(2, 3, *size)
    assert [len(layer["extra_extractors"]) for layer in model.interactions] == [0] * (len(model.interactions) - 1) + [2]
    for output, expected in zip(model(x), expected_maps(model, x), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


# --- other sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("patch_size", "size"), [(16, (224, 352)), (14, (518, 392)), (14, (70, 50)), (16, (17, 5))])
def test_pictures_of_any_size(patch_size, size):
    model, plain = adapter(patch_size).eval(), ViTPyramid(TinyViT(patch_size=patch_size), 6, num_outs=5)
    x = torch.randn(1, 3, *size)
    sizes = [(-(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32, 64)]
    assert [f.shape for f in model(x)] == [(1, 8, *s) for s in sizes[:4]]
    assert [f.shape for f in plain(x)] == [(1, 6, *s) for s in sizes]


@pytest.mark.parametrize("patch", [(14, 14), (14, 10)])
@pytest.mark.parametrize("size", [(96, 64), (90, 50)])
def test_resampled_maps_stay_where_they_are_in_the_picture(size, patch):
    """A map of the places of its cells becomes another one of its cells' places, up to the outermost centres."""
    H, W = -(-size[0] // patch[0]), -(-size[1] // patch[1])
    step = torch.tensor(patch[::-1]).view(1, 2, 1, 1)  # in x and y
    places = centres_of(H, W, 1).T.reshape(1, 2, H, W) * step
    for stride in (4, 8, 16, 32):
        h, w = -(-size[0] // stride), -(-size[1] // stride)
        wanted = centres_of(h, w, stride).T.reshape(1, 2, h, w)
        wanted = wanted.maximum(step / 2).minimum(torch.tensor([W, H]).view(1, 2, 1, 1) * step - step / 2)
        torch.testing.assert_close(resample(places, patch, stride, (h, w)), wanted)


@torch.no_grad()
def test_deformable_attention_finds_the_cell_itself():
    """With offsets of 0, a token reads the patches around the centre of its cell, bilinearly."""
    model = adapter(14).eval()
    extractor = model.interactions[0]["extractor"]
    attn = extractor.attn
    for parameter in attn.parameters():
        nn.init.zeros_(parameter)
    for layer in (attn.value_proj, attn.output_proj):
        nn.init.eye_(layer.weight)
    extractor.ffn = extractor.ffn_norm = None
    x = torch.randn(1, 3, 90, 50)
    seen = {}
    extractor.register_forward_hook(lambda m, inputs, output: seen.update(inputs=inputs, output=output))
    model(x)
    c, patches, _, grid, sizes = seen["inputs"]
    read = (seen["output"] - c).split([h * w for h, w in sizes], 1)
    normalized = map_of(extractor.feat_norm(patches), *grid)
    for level, (H, W), stride in zip(read, sizes, (8, 16, 32)):
        inside = (slice(None), slice(None), slice(0, 90 // stride), slice(0, 50 // stride))
        expected = F.grid_sample(
            normalized,
            2 * centres_of(H, W, stride).view(1, H, W, 2) / (14 * torch.tensor([grid[1], grid[0]])) - 1,
            align_corners=False,
        )
        torch.testing.assert_close(map_of(level, H, W)[inside], expected[inside], rtol=1e-4, atol=1e-5)


# --- the transformer --------------------------------------------------------------------------------------------------


def test_at_first_the_transformer_computes_what_it_does_alone():
    model, x = adapter(), torch.randn(2, 3, 50, 70)
    tokens, grid, rotary = model.embed(x)
    alone = model.run(tokens, grid, 0, 1, rotary)
    seen = {}
    model.vit.blocks[1].register_forward_hook(lambda module, inputs, output: seen.update(tokens=output))
    model(x)
    assert torch.equal(seen["tokens"], alone)
    with torch.no_grad():
        model.interactions[0]["injector"].gamma.fill_(1.0)
    model(x)
    assert not torch.allclose(seen["tokens"], alone)


def test_without_injectors_a_frozen_transformer_has_no_graph():
    model = adapter(use_injector=False)
    model.vit.requires_grad_(False)
    seen = {}
    model.vit.blocks[1].register_forward_hook(lambda module, inputs, output: seen.update(tokens=output))
    sum(f.square().mean() for f in model(torch.randn(2, 3, 64, 64))).backward()
    assert not seen["tokens"].requires_grad
    assert all((p.grad is None) == name.startswith("vit.") for name, p in model.named_parameters())


@pytest.mark.parametrize("indices", [(0, 1, 2, 3), (1, 3), (0,)])
def test_every_parameter_learns(indices):
    """Otherwise DistributedDataParallel raises an error."""
    torch.manual_seed(0)
    for model in (adapter(out_indices=indices, init_values=0.1), ViTPyramid(TinyViT(), 6, num_outs=2)):
        outputs = model(torch.randn(2, 3, 64, 96))
        sum((f * torch.randn_like(f)).sum() for f in outputs).backward()
        without = [name for name, p in model.named_parameters() if p.grad is None]
        assert not without
        assert len(outputs) == (len(indices) if isinstance(model, ViTAdapter) else 2)


@pytest.mark.parametrize("build", [adapter, lambda **o: ViTPyramid(TinyViT(), 6, **o)])
def test_checkpointed_activations_give_the_same_gradients(build):
    x, gradients = torch.randn(2, 3, 40, 50), []
    torch.manual_seed(0)
    first = build()
    for with_cp in (False, True):
        model = build(with_cp=with_cp).train()
        model.load_state_dict(first.state_dict())
        sum(f.square().mean() for f in model(x)).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


def test_stochastic_depth_scales_what_is_kept():
    torch.manual_seed(0)
    extractor = adapter(drop_path_rate=0.5).interactions[0]["extractor"]
    grid, sizes = (2, 2), [(4, 4), (2, 2), (1, 1)]
    arguments = (torch.randn(64, 21, 8), torch.randn(64, 4, 8), torch.rand(1, 21, 1, 2), grid, sizes)
    dropped, kept = extractor.train()(*arguments), extractor.eval()(*arguments)
    ffn, extractor.ffn = extractor.ffn, None
    without = extractor(*arguments)
    doubled = torch.isclose(dropped, without + 2 * (kept - without), atol=1e-5).flatten(1).all(1)
    skipped = torch.isclose(dropped, without, atol=1e-6).flatten(1).all(1)
    assert (doubled ^ skipped).all()
    assert 10 < doubled.sum() < 54
    assert ffn.fc1.in_features == 8


def test_bfloat16_is_close():
    model, x = adapter().eval(), torch.randn(2, 3, 64, 96)
    half = copy.deepcopy(model).bfloat16()
    for output, expected in zip(half(x.bfloat16()), model(x)):
        assert output.dtype == torch.bfloat16
        assert (output.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.slow
def test_exported_it_gives_what_the_operators_definition_does():
    model, x = adapter().eval(), torch.randn(1, 3, 64, 80)
    exported = torch.export.export(model, (x,)).module()(x)
    with ops.backend("reference"):
        expected = model(x)
    for output, wanted in zip(exported, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


# --- the simple feature pyramid ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_pyramid_is_vitdets():
    torch.manual_seed(0)
    model = randomized(ViTPyramid(TinyViT(), 6, num_outs=5)).eval()
    x = torch.randn(2, 3, 64, 96)
    tokens, grid, rotary = model.embed(x)
    last = map_of(model.run(tokens, grid, 0, 1, rotary)[:, 1:], *grid)

    def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
        mean, var = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        x = (x - mean) / (var + 1e-6).sqrt()
        return x * layer.weight[:, None, None] + layer.bias[:, None, None]

    def double(x: Tensor, layer: nn.ConvTranspose2d) -> Tensor:
        y = torch.einsum("bchw,coij->bohiwj", x, layer.weight) + layer.bias[:, None, None, None, None]
        return y.flatten(4, 5).flatten(2, 3)

    quarter, half, same, less = model.scales
    maps = [
        double(F.gelu(norm(double(last, quarter[0]), quarter[1])), quarter[3]), double(last, half[0]), last,
        last.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).amax((3, 5)),
    ]  # fmt: skip
    outputs = model(x)
    for output, level, scale in zip(outputs, maps, (quarter, half, same, less)):
        reduce, first, mix, second = scale[-4:]
        expected = norm(F.conv2d(norm(F.conv2d(level, reduce.weight), first), mix.weight, padding=1), second)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(outputs[4], outputs[3][..., ::2, ::2])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_unsuitable_vits_raise():
    with pytest.raises(TypeError, match="vit must be like timm's VisionTransformer, got Linear without patch_embed, "):
        ViTAdapter(nn.Linear(3, 3))
    fixed, dropping, other = TinyViT(), TinyViT(), TinyViT()
    fixed.dynamic_img_size = False
    with pytest.raises(ValueError, match="create it with dynamic_img_size=True"):
        ViTPyramid(fixed)
    dropping.patch_drop = nn.Dropout(0.5)
    with pytest.raises(ValueError, match="create it with patch_drop_rate=0"):
        ViTPyramid(dropping)
    other.patch_embed = nn.Sequential(nn.Conv2d(3, 8, 16, stride=16))
    other.patch_embed.patch_size = 16
    with pytest.raises(ValueError, match=r"vit.patch_embed must return \(B, 2, 3, C\), got \(1, 8, 2, 3\)"):
        ViTPyramid(other)(torch.randn(1, 3, 32, 48))
