"""``Attended``: our attention in upstream transformers by config."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.analysis import get_model_complexity_info
from mmengine.config import Config
from torch import nn

from attn_plugins.mmcv.replace_attention import MultiScaleDeformableAttention, TokenAttention
from tests.mm.mm_helpers import initialize, quarter, upstream

SIZE = (96, 128)
ENCODER = "encoder.layers.*.self_attn"


def config(attention: dict[str, Any] | None = None, name="detr/detr_r50_8xb2-150e_coco", of="DETR") -> Config:
    cfg = upstream(f"mmdet::{name}")
    for part in ("encoder", "decoder"):
        if part in cfg.model:
            cfg.model[part].num_layers = 2
    quarter(cfg.model)
    if attention is not None:
        cfg.model.update(type="Attended", of=of, attention=attention)
    return cfg


def ours(attention_type="1111", pattern=ENCODER, **options) -> dict[str, Any]:
    return {pattern: dict(type="SpatialSelfAttention", attention_type=attention_type, **options)}


def build(attention: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(config(attention, **options).model)
    initialize(model)
    return model


def outputs(model: nn.Module, count=1, size=SIZE, padded=False) -> list[torch.Tensor]:
    """Compute the last layer's outputs for random pictures; with ``padded``, the second is smaller than the batch."""
    generator = torch.Generator().manual_seed(3)
    pictures = torch.rand(count, 3, *size, generator=generator)
    shapes = [size] * count
    if padded:
        shapes[1] = (size[0] - 32, size[1] - 64)
    samples = [DetDataSample(metainfo=dict(batch_input_shape=size, img_shape=shape)) for shape in shapes]
    return [t[-1] for t in model.eval()(pictures, samples, mode="tensor")]


@torch.no_grad()
def tokens_of(model: nn.Module, count=2, **options: Any) -> torch.Tensor:
    return torch.cat([t.flatten(1) for t in outputs(model, count, **options)], 1)


def exchanged(model: nn.Module) -> dict[str, TokenAttention]:
    return {path: module for path, module in model.named_modules() if isinstance(module, TokenAttention)}


def opened(model: nn.Module) -> nn.Module:
    """Open all gates, so that the added terms have an effect."""
    with torch.no_grad():
        for layer in exchanged(model).values():
            if layer.gate is not None:
                layer.gate.fill_(1.0)
    return model


def test_the_start_is_upstreams_and_its_checkpoint_loads_strictly():
    """mmdet reinitializes every parameter of two or more dimensions, but the gates stay closed."""
    stock, model = build(), build(ours())
    assert sorted(exchanged(model)) == [f"encoder.layers.{n}.self_attn.attn" for n in range(2)]
    assert all(layer.row_table.weight.std() > 0.01 for layer in exchanged(model).values())
    added = set(model.state_dict()) - set(stock.state_dict())
    assert set(stock.state_dict()) < set(model.state_dict())
    assert {key.split(".attn.")[1].split(".")[0] for key in added} == {
        "gate", "saliency", "position", "row_table", "column_table"
    }  # fmt: skip
    model.load_state_dict(stock.state_dict(), strict=True)
    expected = tokens_of(stock, padded=True)
    torch.testing.assert_close(tokens_of(model, padded=True), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(tokens_of(opened(model), padded=True), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "attention_type, options",
    [
        ("1111", dict()),
        ("1000", dict(kernel_size=3)),
        ("1000", dict(spatial_range=3)),
        ("1000", dict(kernel_size=3, outside="-inf", smoothing="sqrt_d")),
    ],
)
def test_padding_and_other_pictures_are_not_seen(attention_type, options):
    model = opened(build(ours(attention_type, **options)))
    both, one = tokens_of(model, padded=True), tokens_of(model, count=1)
    torch.testing.assert_close(both[:1], one, rtol=1e-4, atol=1e-4)
    assert both.isfinite().all()


def test_a_copy_keeps_its_own_grids():
    """mmengine's moving average of a model is such a copy."""
    model = build(ours())
    twin = copy.deepcopy(model)
    expected = tokens_of(twin, size=(64, 96))
    tokens_of(model, size=(96, 64))
    torch.testing.assert_close(tokens_of(twin, size=(64, 96)), expected)
    (first, *rest) = exchanged(twin).values()
    assert all(layer._grids is first._grids for layer in rest)
    assert first._grids is not next(iter(exchanged(model).values()))._grids


@pytest.mark.slow
@pytest.mark.parametrize(("attention_type", "options"), [("1111", dict()), ("1000", dict(kernel_size=3))])
def test_a_traced_model_finds_its_maps(attention_type, options):
    """As ``get_flops.py`` of mmdet traces it: sizes of maps are tensors then."""
    sample = DetDataSample(metainfo=dict(batch_input_shape=SIZE, img_shape=SIZE))
    counts = []
    for attention in (ours(attention_type, **options), None):
        model = build(attention).eval()
        model.forward = partial(model.forward, data_samples=[sample])
        pictures = (torch.rand(1, 3, *SIZE),)
        counts.append(get_model_complexity_info(model, inputs=pictures, show_table=False, show_arch=False)["flops"])
    assert counts[0] > counts[1] + 2 * 12 * 64  # position logits of 12 cells in two layers


def test_queries_without_places_take_the_content_terms():
    model = build(ours("1010", "decoder.layers.*.self_attn") | ours("1010", "decoder.layers.*.cross_attn"))
    assert len(exchanged(model)) == 4
    stock = build()
    model.load_state_dict(stock.state_dict(), strict=True)
    torch.testing.assert_close(tokens_of(model), tokens_of(stock), rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ValueError, match=r"decoder.layers.0.self_attn: object queries have no positions.* such as '1010'"
    ):
        build(ours("1111", "decoder.layers.*.self_attn"))


def test_a_causal_hint_is_torchs_hint():
    (layer,) = exchanged(build(ours("1010", "encoder.layers.0.self_attn"))).values()
    stock = nn.MultiheadAttention(64, 8).eval()
    layer.load_state_dict(stock.state_dict(), strict=False)
    tokens = [torch.randn(5, 2, 64)] * 3
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected, _ = stock(*tokens, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(layer.eval()(*tokens, attn_mask=mask, is_causal=True)[0], expected)
    with pytest.raises(ValueError, match=r"is_causal describes attn_mask, .* got attn_mask=None"):
        layer(*tokens, is_causal=True)


def test_places_are_those_of_the_present_picture():
    """Tokens that do not form a map of this picture raise an error, even if they fit an earlier picture's map."""
    model = build(ours())
    tokens_of(model, size=(96, 128))  # 3 × 4
    layer = next(iter(exchanged(model).values()))
    layer(*[torch.randn(12, 1, 64)] * 3)
    tokens_of(model, size=(64, 64))  # 2 × 2
    with pytest.raises(ValueError, match=r"encoder.layers.0.self_attn: .* these 12 queries and 12 keys are not a map"):
        layer(*[torch.randn(12, 1, 64)] * 3)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (ours(pattern="encoder.layer.*"), r"matches no module; only mmcv's .* replaced, .* encoder.layers.0.self_attn"),
        (ours(pattern="backbone.*"), r"matches .*BatchNorm2d.*; only mmcv's Multihead"),
        ({ENCODER: dict(type="Conv2d")}, r"attention\['encoder.layers.\*.self_attn'\]: type must be one of Spatial"),
        (ours(embed_dim=128), r"encoder.layers.0.self_attn: unknown option 'embed_dim'; supported: attention_type, "),
        (ours("11"), "attention_type must be a string of four bits"),
    ],
)
def test_bad_configs_are_one_clear_error(attention, words):
    with pytest.raises(ValueError, match=words):
        build(attention)


DEFORMABLE = dict(name="deformable_detr/deformable-detr_r50_16xb2-50e_coco", of="DeformableDETR")


def test_deformable_attention_takes_key_saliency():
    """The layer starts as upstream's, including its initialization, and loads upstream's checkpoint strictly."""
    stock = build(**DEFORMABLE)
    model = build({ENCODER: dict(type="MultiScaleDeformableAttention", key_saliency=True)}, **DEFORMABLE)
    layers = [layer.self_attn for layer in model.encoder.layers]
    assert all(isinstance(layer, MultiScaleDeformableAttention) for layer in layers)
    for layer, before in zip(layers, (layer.self_attn for layer in stock.encoder.layers)):
        assert torch.equal(layer.sampling_offsets.bias, before.sampling_offsets.bias)
        assert not layer.sampling_offsets.weight.any()
        assert not layer.gate.any()
        assert layer.key_saliency.weight.std() > 0.01
    assert set(model.state_dict()) - set(stock.state_dict()) == {
        f"encoder.layers.{n}.self_attn.{name}" for n in range(2) for name in ("gate", "key_saliency.weight")
    }
    model.load_state_dict(stock.state_dict(), strict=True)
    expected = tokens_of(stock, padded=True)
    torch.testing.assert_close(tokens_of(model, padded=True), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for layer in layers:
            layer.gate.fill_(1.0)
            layer.key_saliency.weight.mul_(10)
    assert not torch.allclose(tokens_of(model, padded=True), expected, rtol=1e-3, atol=1e-3)


def test_the_layer_must_fit_what_is_there():
    with pytest.raises(ValueError, match=r"matches MultiScaleDeformableAttention; .* found at: decoder.layers.0"):
        build(ours(), **DEFORMABLE)
    with pytest.raises(ValueError, match=r"matches MultiheadAttention; .* mmcv's MultiScaleDef.* found at: no path"):
        build({ENCODER: dict(type="MultiScaleDeformableAttention", key_saliency=True)})
    with pytest.raises(ValueError, match=r"encoder.layers.0.self_attn: unknown option 'num_points'; supported: key_"):
        build({ENCODER: dict(type="MultiScaleDeformableAttention", num_points=8)}, **DEFORMABLE)
