"""mmengine's FLOPs of our layers: mmcv's figures where the products are the same."""

from __future__ import annotations

import pytest
import torch
from mmcv.cnn import NonLocal2d
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmengine.analysis import FlopAnalyzer, get_model_complexity_info
from torch import nn

from attn_plugins.mmcv import NonLocalAttention2d
from tests.helpers.replacement import Called
from tests.mm.drop_in_helpers import STOCK, drop_in, ours, stock_layers  # noqa: F401

pytestmark = pytest.mark.usefixtures("stock_layers")
MAP = torch.rand(1, 64, 32, 24)
PIXELS = 32 * 24


def counted(layer, x):
    return FlopAnalyzer(layer.eval(), (x,)).unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()


def test_attention_has_the_stock_layers_count():
    for name, options in (
        ("CrissCrossAttention", {}),
        ("GeneralizedAttention", dict(attention_type="1000")),
        ("GeneralizedAttention", dict(attention_type="0010")),
    ):
        stock = counted(STOCK[name](64, **options), MAP)
        assert counted(ours(STOCK[name](64, **options)), MAP) == pytest.approx(stock, rel=1e-3)
    assert counted(NonLocalAttention2d(64), MAP) == counted(NonLocal2d(64), MAP)


@pytest.mark.parametrize("name", ["DCN", "DCNv2"])
def test_deformable_convolutions_count_as_their_convolutions(name):
    layer = ours(STOCK[name](64, 32, 3, padding=1))  # mmcv's own count as their predictors alone
    convolution = counted(nn.Conv2d(64, 32, 3, padding=1), MAP)
    assert counted(layer, MAP) == convolution + counted(layer.conv_offset, MAP)


def test_replaced_forwards_count_as_the_stock_ones():
    given = dict(reference_points=torch.rand(1, 320, 2, 2), spatial_shapes=torch.tensor([[16, 16], [8, 8]]))
    deformable = MultiScaleDeformableAttention(64, num_levels=2)
    samples = 320 * 64 * 2 * 4  # each interpolated by 4 multiply-adds, which mmcv's grid_sample counts as well
    cases = [
        (Called(deformable, **given, level_start_index=torch.tensor([0, 256])), torch.rand(320, 1, 64), samples),
        (MultiheadAttention(64, 4), torch.rand(90, 2, 64), 0),
    ]
    for shift in (0, 2):
        layer = ShiftWindowMSA(64, 4, window_size=5, shift_size=shift)
        cases.append((Called(layer, hw_shape=(32, 24)), torch.rand(1, PIXELS, 64), 0))
    stock = [counted(layer, x) + more for layer, x, more in cases]
    drop_in.replace()
    assert [counted(layer, x) for layer, x, _ in cases] == stock


def test_complexity_of_a_model_includes_our_operators():
    products = 2 * PIXELS * PIXELS * 32  # of queries and keys, of weights and values
    info = get_model_complexity_info(NonLocalAttention2d(64).eval(), inputs=(MAP,), show_table=False, show_arch=False)
    assert info["flops"] == 4 * PIXELS * 64 * 32 + products
    assert info["activations"] == PIXELS * (4 * 32 + 64)
