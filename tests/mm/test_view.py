"""``python -m tools.view`` on detectors and segmentors: maps, sampling points of encoders and of convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import init_default_scope
from PIL import Image
from skimage import data

from attn_plugins.mmcv.replace_attention import exchange
from attn_plugins.modules import DeformableConv2d
from attn_plugins.modules.common.capture import Captured
from attn_plugins.ops import deform_conv2d
from tests.mm.mm_helpers import ROOT
from tests.mm.test_drop_in_transformers import build
from tests.tools.view_helpers import names_in, page_data, run
from tools.view import follow, layers, models

SMALL = """
_base_ = 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'
model = dict(backbone=dict(init_cfg=None), data_preprocessor=dict(pad_size_divisor=128),
    encoder=dict(num_layers=2), decoder=dict(num_layers=1))
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(192, 128), keep_ratio=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))]
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
"""
SEGMENTOR = """
custom_imports = dict(imports=['attn_plugins.mmcv', 'attn_plugins.timm'])
default_scope = 'mmseg'
model = dict(type='EncoderDecoder', data_preprocessor=dict(type='SegDataPreProcessor', size=(64, 96)),
    backbone=dict(type='TIMMBackbone', model_name='vit_tiny_patch16_224', features_only=True, pretrained=False,
        out_indices=(0, 1), attn_layer='attn1111', img_size=(64, 96), embed_dim=32, depth=3, num_heads=2),
    decode_head=dict(type='FCNHead', in_channels=32, in_index=1, channels=8, num_convs=1, num_classes=19),
    test_cfg=dict(mode='whole'))
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(96, 64), keep_ratio=False),
                 dict(type='PackSegInputs')]
test_dataloader = dict(dataset=dict(type='CityscapesDataset', pipeline=test_pipeline))
"""


@torch.no_grad()
@pytest.mark.parametrize("saliency", [False, True], ids=["mmcv", "ours"])
def test_outputs_follow_from_the_points_shown(saliency):
    """By mmcv's own definition, for every query of every level."""
    model = build("mmdet", "deformable_detr/deformable-detr_r50_16xb2-50e_coco").eval()
    if saliency:
        exchange(model, {"encoder.layers.*.self_attn": dict(type="MultiScaleDeformableAttention", key_saliency=True)})
        torch.nn.init.normal_(model.encoder.layers[0].self_attn.gate, std=3.0)
    (name, layer), outputs = *layers.known_layers(model).items(), []
    layer.output_proj.register_forward_hook(lambda _, given, output: outputs.append(output))
    with layers.capture(model) as captured:
        size = dict(img_shape=(96, 160), batch_input_shape=(96, 160))
        model.forward(torch.randn(1, 3, 96, 160), [DetDataSample(metainfo=size)], mode="tensor")
    call = captured[name]
    given, shapes = layers.arguments_of(call), layers.levels_of(call)
    grids = [torch.cartesian_prod(torch.arange(H), torch.arange(W)) for H, W in shapes]
    read = [layers.points(call, level, cells) for level, cells in enumerate(grids)]
    locations, weights = (torch.cat(part)[None] for part in zip(*read))
    value = layer.value_proj(given["value"]).unflatten(2, (layer.num_heads, -1))
    result = layer.output_proj(multi_scale_deformable_attn_pytorch(value, torch.tensor(shapes), locations, weights))
    torch.testing.assert_close(result, outputs[0], rtol=1e-4, atol=1e-4)


def saved(text: str, tmp_path) -> list:
    """Write a photograph, a config and a checkpoint with random weights; return the arguments of the command line."""
    Image.fromarray(data.chelsea()).save(tmp_path / "cat.png")
    (tmp_path / "model.py").write_text(text)
    model = models.load_mm(str(tmp_path / "model.py"), None)
    model.init_weights()
    facts = dict(dataset_meta=dict(classes=tuple("0123456789"), palette=[(0, 0, 0)] * 10))
    torch.save(dict(state_dict=model.state_dict(), meta=facts), tmp_path / "model.pth")
    return [tmp_path / "model.py", tmp_path / "cat.png", "--checkpoint", tmp_path / "model.pth"]


@pytest.mark.slow
def test_a_deformable_encoder(tmp_path, capsys):
    arguments = saved(SMALL, tmp_path)
    assert run(arguments[0], "--list") == 0
    names = [f"encoder.layers.{n}.self_attn" for n in range(2)]
    assert capsys.readouterr().out.split()[-2:] == names
    output = tmp_path / "out"
    assert run(*arguments, "--pixels", "60,80", "--pixels", "290,440", "--output", output) == 0
    assert names_in(output) == {f"{names[1]}.png", "attention.html"}
    shown = page_data(output / "attention.html")
    assert [layer["shapes"] for layer in shown["points"]] == [[[16, 32], [8, 16], [4, 8], [2, 4]]]
    assert (shown["file"], shown["share"], shown["layers"]) == ([300, 451], [1, 0.75], [])  # 128×192 in 128×256


def test_a_segmentor(tmp_path, capsys):
    arguments, output = saved(SEGMENTOR, tmp_path), tmp_path / "out"
    assert run(*arguments, "--output", output) == 0
    (layer,) = page_data(output / "attention.html")["layers"]
    assert (layer["name"].rpartition("blocks.")[2], layer["heads"], layer["queries"]) == ("1.attn", 2, [4, 6])
    arguments[0].write_text(SEGMENTOR.replace("scale=(96, 64)", "scale=(128, 64)"))
    assert run(*arguments, "--output", tmp_path / "no") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the model does not accept the picture: Input width (128) doesn't match model (96)." in error


@pytest.mark.parametrize("options", [dict(stride=2), dict(dilation=2), dict(modulated=True)], ids=str)
def test_points_are_where_a_convolution_reads(options):
    """Its gradient reaches exactly the cells around the points."""
    torch.manual_seed(0)
    layer = DeformableConv2d(4, 3, 3, padding=options.get("dilation", 1), **options).double()
    torch.nn.init.normal_(layer.conv_offset.weight, std=0.2)
    x, query = torch.randn(1, 4, 9, 13, dtype=torch.double), (3, 2)
    points = follow.sampled(Captured("", layer, (x,), {}), np.array([query], float))
    offset, mask = layer.predict(x)
    leaf = x.clone().requires_grad_()
    out = deform_conv2d(leaf, offset, layer.weight, None, layer.stride, layer.padding, layer.dilation, mask)
    out[0, :, query[0], query[1]].square().sum().backward()
    read = {tuple(p) for p in leaf.grad[0].abs().sum(0).nonzero().tolist()}
    corners = {(y, x) for p in np.floor(points).astype(int) for y in (p[0], p[0] + 1) for x in (p[1], p[1] + 1)}
    assert read == {(y, x) for y, x in corners if 0 <= y < 9 and 0 <= x < 13}


def test_without_offsets_two_convolutions_read_a_five_by_five_grid_of_cells():
    calls = [Captured("", DeformableConv2d(4, 4, 3, padding=1), (torch.randn(1, 4, 10, 12),), {}) for _ in range(2)]
    points = follow.follow(calls, np.array([39.5, 47.5]), image=(80, 96))  # 8 pixels per cell: cell (4.5, 5.5)
    assert points.shape == (81, 2)
    assert sorted(set((points[:, 0] - 3.5) / 8)) == [2, 3, 4, 5, 6]
    assert len(set(map(tuple, points))) == 25


def test_what_a_detectors_convolutions_read_is_drawn(tmp_path, digits, capsys):
    config = Config.fromfile(ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py")
    init_default_scope("mmdet")
    config.dump(tmp_path / "config.py")
    checkpoint = dict(state_dict=MODELS.build(config.model).state_dict(), meta=dict(dataset_meta={"classes": "01"}))
    torch.save(checkpoint, tmp_path / "model.pth")
    arguments = [tmp_path / "config.py", digits / "val/000000.png", "--checkpoint", tmp_path / "model.pth"]
    arguments += ["--output", tmp_path / "out", "--follow"]
    assert run(*arguments, 2, "--pixels", "40,50", "--layers", "*layer3.0.conv2") == 0
    caption, file = capsys.readouterr().out.splitlines()[-2:]
    assert "the dots of its color are the 9 points that it reads. Right: where " in caption
    assert file == str(tmp_path / "out/sampling.png")
    picture = np.asarray(Image.open(file).convert("RGB"))
    assert picture.shape[1] > picture.shape[0] > 200
    assert picture.std() > 20
    assert run(*arguments, "--layers", "layer9") == 2
    assert "none is called 'layer9': backbone.layer3.0.conv2" in capsys.readouterr().err
