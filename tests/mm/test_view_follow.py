"""Drawing of sampling points: the layer's gradient reaches exactly the drawn points, and the picture is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from PIL import Image

from attn_plugins.modules import DeformableConv2d
from attn_plugins.modules.common.capture import Captured
from attn_plugins.ops import deform_conv2d
from tests.mm.mm_helpers import ROOT
from tools.view import follow
from tools.view.__main__ import main


def offset_layer(**options) -> DeformableConv2d:
    torch.manual_seed(0)
    layer = DeformableConv2d(4, 3, 3, padding=options.get("dilation", 1), **options).double()
    torch.nn.init.normal_(layer.conv_offset.weight, std=0.2)
    return layer


@pytest.mark.parametrize("options", [dict(), dict(stride=2), dict(dilation=2), dict(modulated=True)], ids=str)
def test_points_are_where_the_layer_reads(options):
    layer = offset_layer(**options)
    x = torch.randn(1, 4, 9, 13, dtype=torch.double)
    query = (3, 2)
    points = follow.sampled(Captured("", layer, (x,), {}), np.array([query], float))
    assert points.shape == (9, 2)

    offset, mask = layer.predict(x)
    leaf = x.clone().requires_grad_()
    out = deform_conv2d(leaf, offset, layer.weight, None, layer.stride, layer.padding, layer.dilation, mask)
    out[0, :, query[0], query[1]].square().sum().backward()
    read = {tuple(p) for p in leaf.grad[0].abs().sum(0).nonzero().tolist()}
    corners = {(y, x) for p in np.floor(points).astype(int) for y in (p[0], p[0] + 1) for x in (p[1], p[1] + 1)}
    inside = {(y, x) for y, x in corners if 0 <= y < 9 and 0 <= x < 13}
    assert read == inside


def test_without_offsets_two_layers_read_a_five_by_five_grid_of_cells():
    layers = []
    for _ in range(2):
        layer = DeformableConv2d(4, 4, 3, padding=1)
        layers.append(Captured("", layer, (torch.randn(1, 4, 10, 12),), {}))
    points = follow.follow(layers, np.array([39.5, 47.5]), image=(80, 96))  # 8 pixels per cell: cell (4.5, 5.5)
    assert points.shape == (81, 2)
    assert sorted(set((points[:, 0] - 3.5) / 8)) == [2, 3, 4, 5, 6]
    assert len(set(map(tuple, points))) == 25


def test_a_detectors_picture_is_drawn(tmp_path, digits, capsys):
    config = Config.fromfile(ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py")
    init_default_scope("mmdet")
    config.dump(tmp_path / "config.py")
    checkpoint = dict(state_dict=MODELS.build(config.model).state_dict(), meta=dict(dataset_meta={"classes": "01"}))
    torch.save(checkpoint, tmp_path / "model.pth")
    arguments = [tmp_path / "config.py", digits / "val/000000.png", "--checkpoint", tmp_path / "model.pth"]

    def run(*more: object) -> int:
        return main([*map(str, arguments), "--follow", *map(str, more), "--output", str(tmp_path / "out")])

    assert run("2", "--pixels", "40,50", "--layers", "*layer3.0.conv2") == 0
    caption, file = capsys.readouterr().out.splitlines()[-2:]
    assert "the dots of its colour are the 9 points that it reads. Right: where " in caption
    assert file == str(tmp_path / "out/sampling.png")
    picture = np.asarray(Image.open(file).convert("RGB"))
    assert picture.shape[1] > picture.shape[0] > 200
    assert picture.std() > 20
    assert run() == 0
    assert "are the 81 points that it reads" in capsys.readouterr().out
    for more, words in (
        (["--layers", "layer9"], "none is called 'layer9': backbone.layer3.0.conv2"),
        (["--pixels", "40"], "--pixels must be Y,X in pixels of the picture, got '40'"),
        (["0"], "--follow needs a config of mmdet, a picture, and at least 1 layer to follow"),
    ):
        assert run(*more) == 2
        assert words in capsys.readouterr().err
