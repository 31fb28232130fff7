"""The drop-in takes every input that upstream's layer takes, and computes the same from it, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mmdet.models.backbones.swin
import mmseg.models.backbones.swin
import numpy as np
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

from attn_plugins.modules import MultiScaleDeformableAttention as Ours
from tests.mm.drop_in_helpers import STOCK, drop_in, ours, restore, stock_layers  # noqa: F401 - a fixture
from tools.bench import compiled_mmcv

pytestmark = pytest.mark.usefixtures("stock_layers")
B, Q, C, S, L = 2, 5, 32, 60, 2
SHAPES = torch.tensor([[6, 8], [3, 4]])
SWIN = {"mmdet": mmdet.models.backbones.swin, "mmseg": mmseg.models.backbones.swin}


def rand(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape)


def mask(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) > 0.6


def assert_same(build: Callable[[], nn.Module], given: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
    """Compare upstream's layer and ours; functions in ``given`` draw inputs, after the parameters."""
    results = []
    for prepare in (restore, drop_in.replace):
        prepare()
        torch.manual_seed(0)
        layer = build().eval()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
        layer.to(dtype)
        inputs = {key: value() if callable(value) else value for key, value in given.items()}
        output = layer(**{k: x.to(dtype) if getattr(x, "is_floating_point", bool)() else x for k, x in inputs.items()})
        results.append([output])
        if dtype == torch.float64:
            results[-1] += torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    tolerance = 0.05 if dtype.itemsize == 2 else 1e-4
    for found, expected in zip(*reversed(results)):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


DEFORMABLE: dict[str, dict[str, Any]] = {
    **{
        f"points {shape}": dict(reference_points=rand(*shape))
        for shape in [(1, Q, 1, 2), (B, 1, 1, 2), (1, 1, 1, 2), (B, Q, 1, 4), (1, Q, L, 4), (B, Q, L, 4)]
    },
    **{f"mask {shape}": dict(key_padding_mask=mask(*shape)) for shape in [(B, S), (1, S), (B, 1), (S,)]},
    "int32 sizes": dict(spatial_shapes=SHAPES.int()),
    "int16 sizes": dict(spatial_shapes=SHAPES.short()),
    "starts": dict(level_start_index=torch.tensor([0, 48])),
    "no query": dict(query=rand(B, 0, C), reference_points=rand(B, 0, L, 2)),
    "self-attention": dict(query=rand(B, S, C), reference_points=rand(B, S, L, 2), value=None),
    "positions": dict(query_pos=rand(1, Q, C)),
    "residual": dict(residual=rand(1, Q, C)),
    "strided": dict(
        value=lambda: torch.rand(S, B, C).transpose(0, 1),
        reference_points=lambda: torch.rand(L, Q, B, 2).transpose(0, 2),
    ),
    "batch second": dict(query=rand(Q, B, C), value=rand(S, B, C), query_pos=rand(Q, B, C), batch_first=False),
    "narrow values": dict(value_proj_ratio=0.5),
    **{str(dtype): dict(dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)},
}


@pytest.mark.parametrize("case", DEFORMABLE)
def test_inputs_of_deformable_attention(case):
    usual = dict(query=rand(B, Q, C), value=rand(B, S, C), reference_points=rand(B, Q, L, 2), spatial_shapes=SHAPES)
    given = {**usual, **DEFORMABLE[case]}
    dtype = given.pop("dtype", torch.float64)
    options = {key: given.pop(key) for key in ("batch_first", "value_proj_ratio") if key in given}
    assert_same(lambda: MultiScaleDeformableAttention(C, 4, L, 3, **{"batch_first": True, **options}), given, dtype)


def test_values_of_another_width_for_a_projection_of_ones_own():
    def build():
        layer = MultiScaleDeformableAttention(C, 4, L, 3, batch_first=True)
        layer.value_proj = nn.Linear(48, C)
        return layer

    given = dict(query=rand(B, Q, C), value=rand(B, S, 48), reference_points=rand(B, Q, L, 2), spatial_shapes=SHAPES)
    assert_same(build, given)


def test_our_module_starts_as_mmcvs_layer_and_computes_the_same():
    stock = MultiScaleDeformableAttention(C, 4, L, 3, dropout=0.0).double()
    ours = Ours(C, 4, L, 3, dropout=0.0, batch_first=False, dtype=torch.float64)
    for key, value in stock.state_dict().items():
        if "sampling" in key or "weights" in key:  # the others are drawn
            torch.testing.assert_close(ours.state_dict()[key], value)
    nn.init.normal_(stock.sampling_offsets.weight, std=0.3)
    ours.load_state_dict(stock.state_dict(), strict=True)
    inputs = torch.rand(Q, B, C).double(), torch.rand(S, B, C).double()
    given = dict(query=inputs[0], value=inputs[1], reference_points=torch.rand(B, Q, L, 2).double())
    start = torch.tensor([0, 48])
    expected = stock(**given, spatial_shapes=SHAPES, level_start_index=start)
    torch.testing.assert_close(ours(**given, spatial_shapes=SHAPES, level_start_index=start), expected)


MULTI_HEAD: dict[str, dict[str, Any]] = {
    "batch second": dict(query=rand(Q, B, C), key=rand(7, B, C), query_pos=rand(Q, B, C), key_pos=rand(7, B, C)),
    "positions of queries": dict(query_pos=rand(1, Q, C)),
    "positions of keys": dict(key=rand(B, 7, C), key_pos=rand(1, 7, C)),
    "bool mask": dict(attn_mask=lambda: mask(Q, Q)().tril(-1)),
    "added": dict(key_padding_mask=rand(B, Q)),
    "mask of heads": dict(attn_mask=lambda: mask(B * 4, Q, Q)().tril(-1)),
    "padding and added": dict(key_padding_mask=mask(B, Q), attn_mask=rand(Q, Q)),
    "added padding, mask of heads": dict(key_padding_mask=rand(B, Q), attn_mask=lambda: mask(B * 4, Q, Q)().tril(-1)),
    "no query": dict(query=rand(B, 0, C), key=rand(B, 7, C)),
    "expanded": dict(query=lambda: torch.rand(1, Q, C).expand(B, -1, -1)),
    "residual": dict(residual=rand(1, Q, C), unknown=1),
}


@pytest.mark.parametrize("case", MULTI_HEAD)
def test_inputs_of_multi_head_attention(case):
    batch_first = case != "batch second"
    assert_same(lambda: MultiheadAttention(C, 4, batch_first=batch_first), {"query": rand(B, Q, C), **MULTI_HEAD[case]})


@pytest.mark.parametrize(
    "package, shift, size",
    [
        ("mmdet", 0, [10, 15]),
        ("mmdet", 2, torch.tensor([7, 11])),
        ("mmseg", 2, np.array([3, 12])),
        ("mmseg", 0, torch.Size([7, 11])),
    ],
)
def test_windows_of_maps_of_any_size(package, shift, size):
    layer = SWIN[package].ShiftWindowMSA
    given = dict(query=rand(2, int(size[0]) * int(size[1]), 12), hw_shape=size)
    assert_same(lambda: layer(12, 3, 5, shift, qk_scale=0.3), given)
    drop_in.replace()
    with pytest.raises(AssertionError, match="input feature has wrong size"):
        layer(12, 3, 5)(torch.zeros(2, 9, 12), (3, 4))


DCN = dict(in_channels=C, out_channels=8, kernel_size=3, stride=np.int64(2))
DCN_V2 = dict(in_channels=C, out_channels=8, kernel_size=(np.int64(3), 1), padding=(1, 0))


@pytest.mark.parametrize(
    "name, options, stored, dtype",
    [
        ("GeneralizedAttention", dict(in_channels=C), (C, B), torch.float64),
        ("GeneralizedAttention", dict(in_channels=C), (1, C), torch.bfloat16),
        ("DCN", DCN, (C, B), torch.float16),
        ("DCN", DCN, (1, C), torch.float32),
        ("DCNv2", DCN_V2, (C, B), torch.bfloat16),
        ("DCNv2", DCN_V2, (1, C), torch.float16),
    ],
)
def test_layers_on_maps(name, options, stored, dtype):
    if name.startswith("DCN") and compiled_mmcv.is_compiled():
        pytest.skip("mmcv is compiled here, and takes contiguous maps of float32 alone")
    results = []
    for change in (lambda layer: layer, ours):
        torch.manual_seed(0)
        layer, x = change(STOCK[name](**options)).to(dtype), torch.rand(*stored, 7, 9).to(dtype)
        results.append(layer(x.transpose(0, 1) if stored == (C, B) else x.expand(B, -1, -1, -1)))
    expected, found = results
    bound = (0.05 if dtype.itemsize == 2 else 1e-4) * max(1, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
