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
from attn_plugins.ops import deform_conv2d
from tests.mm.mm_helpers import ROOT
from tools import show_sampling


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
    points = show_sampling.sampled(show_sampling.Seen("", layer, x), np.array([query], float))
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
        layers.append(show_sampling.Seen("", layer, torch.randn(1, 4, 10, 12)))
    points = show_sampling.follow(layers, np.array([39.5, 47.5]), image=(80, 96))  # 8 pixels per cell: cell (4.5, 5.5)
    assert points.shape == (81, 2)
    assert sorted(set((points[:, 0] - 3.5) / 8)) == [2, 3, 4, 5, 6]
    assert len(set(map(tuple, points))) == 25


def test_a_detectors_picture_is_drawn(tmp_path, digits):
    config = Config.fromfile(ROOT / "configs/mmdet/digits/atss_narrow-r50-attn0010-dcn_fpn_digits.py")
    init_default_scope("mmdet")
    config.dump(tmp_path / "config.py")
    model = MODELS.build(config.model)
    checkpoint = dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=config.classes)))
    torch.save(checkpoint, tmp_path / "model.pth")
    out = tmp_path / "picture.png"
    arguments = [tmp_path / "config.py", tmp_path / "model.pth", digits / "val/000000.png", out, "--query", "40,50"]
    assert show_sampling.main([str(a) for a in arguments]) == 0
    picture = np.asarray(Image.open(out).convert("RGB"))
    assert picture.shape[1] > picture.shape[0] > 200
    assert picture.std() > 20
    with pytest.raises(ValueError, match=r"called 'layer9'; there are: backbone.layer3.0.conv2"):
        show_sampling.main([*map(str, arguments[:4]), "--layer", "layer9"])
    with pytest.raises(SystemExit):
        show_sampling.main([*map(str, arguments[:4]), "--query", "40"])


def test_a_model_without_our_layers_is_an_error(tmp_path, digits):
    config = Config.fromfile(ROOT / "configs/mmdet/digits/atss_narrow-r50_fpn_digits.py")
    init_default_scope("mmdet")
    config.dump(tmp_path / "config.py")
    torch.save(dict(state_dict=MODELS.build(config.model).state_dict()), tmp_path / "model.pth")
    with pytest.raises(ValueError, match="no DeformableConv2d of attn_plugins"):
        show_sampling.show(
            tmp_path / "config.py", tmp_path / "model.pth", digits / "val/000000.png", tmp_path / "no.png"
        )
