"""mmengine's and fvcore's FLOPs of our layers: mmcv's figures where the products are the same."""

from __future__ import annotations

import pytest
import torch
from fvcore.nn import FlopCountAnalysis
from mmcv.cnn import NonLocal2d
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmengine.analysis import FlopAnalyzer, get_model_complexity_info
from torch import nn

from attn_plugins.mmcv import NonLocalAttention2d
from tests.mm.drop_in_helpers import STOCK, drop_in, stock_layers  # noqa: F401

pytestmark = pytest.mark.usefixtures("stock_layers")
COUNTERS = pytest.mark.parametrize("counter", [FlopAnalyzer, FlopCountAnalysis])
MAP = torch.rand(1, 64, 32, 24)
PIXELS = 32 * 24


def counted(counter, layer, *inputs):
    return counter(layer.eval(), inputs).unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()


@COUNTERS
@pytest.mark.parametrize("name, options", [
    ("CrissCrossAttention", {}),
    ("GeneralizedAttention", dict(attention_type="1000")),
    ("GeneralizedAttention", dict(attention_type="0010")),
])  # fmt: skip
def test_attention_on_maps_has_the_stock_layers_count(counter, name, options):
    stock = counted(counter, STOCK[name](64, **options), MAP)
    assert counted(counter, drop_in.REPLACEMENTS[name](64, **options), MAP) == pytest.approx(stock, rel=1e-3)


@COUNTERS
def test_non_local_attention_has_the_stock_layers_count(counter):
    assert counted(counter, NonLocalAttention2d(64), MAP) == counted(counter, NonLocal2d(64), MAP)


@COUNTERS
@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_deformable_convolutions_count_as_their_convolutions(counter, name):
    layer = drop_in.REPLACEMENTS[name](64, 32, 3, padding=1)  # mmcv's own count as their predictors alone
    convolution = counted(counter, nn.Conv2d(64, 32, 3, padding=1), MAP)
    assert counted(counter, layer, MAP) == convolution + counted(counter, layer.conv_offset, MAP)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = MultiScaleDeformableAttention(64, num_levels=2)

    def forward(self, query, points):
        shapes = torch.tensor([[16, 16], [8, 8]])
        start = torch.tensor([0, 256])
        return self.layer(query, reference_points=points, spatial_shapes=shapes, level_start_index=start)


@COUNTERS
def test_deformable_attention_counts_the_weighting_of_samples_too(counter):
    inputs = torch.rand(320, 1, 64), torch.rand(1, 320, 2, 2)
    stock = counted(counter, Encoder(), *inputs)
    drop_in.replace()
    samples = 320 * 64 * 2 * 4  # each interpolated by 4 multiply-adds, which mmcv's grid_sample counts as well
    assert counted(counter, Encoder(), *inputs) == stock + samples


@COUNTERS
@pytest.mark.parametrize("shift", [0, 2])
def test_swins_windows_have_the_stock_layers_count(counter, shift):
    class Swin(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ShiftWindowMSA(64, 4, window_size=5, shift_size=shift)

        def forward(self, tokens):
            return self.layer(tokens, (32, 24))

    inputs = torch.rand(1, PIXELS, 64)
    stock = counted(counter, Swin(), inputs)
    drop_in.replace()
    assert counted(counter, Swin(), inputs) == stock


@COUNTERS
def test_multi_head_attention_has_the_stock_layers_count(counter):
    inputs = torch.rand(90, 2, 64)
    stock = counted(counter, MultiheadAttention(64, 4), inputs)
    drop_in.replace()
    assert counted(counter, MultiheadAttention(64, 4), inputs) == stock


def test_complexity_of_a_model_includes_our_operators():
    products = 2 * PIXELS * PIXELS * 32  # of queries and keys, of weights and values
    info = get_model_complexity_info(NonLocalAttention2d(64).eval(), inputs=(MAP,), show_table=False, show_arch=False)
    assert info["flops"] == 4 * PIXELS * 64 * 32 + products
    assert info["activations"] == PIXELS * (4 * 32 + 64)
