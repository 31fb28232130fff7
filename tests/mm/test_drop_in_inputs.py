"""The drop-in takes every input that upstream's layer takes, and computes the same from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mmdet.models.backbones.swin as swin
import numpy as np
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from torch import nn

from tests.mm.drop_in_helpers import STOCK, drop_in, restore, stock_layers  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("stock_layers")
B, Q, C, S, L = 2, 5, 32, 60, 2
SHAPES = torch.tensor([[6, 8], [3, 4]])


def drawn(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.eval()


def assert_same(compute: Callable[[], Any], tolerance: float = 1e-4) -> None:
    results = []
    for prepare in (restore, drop_in.replace):
        prepare()
        torch.manual_seed(0)
        results.append(compute())
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.6


def deformable(query=(B, Q), dtype=torch.float32, options=None, **given: Any) -> Callable[[], Any]:
    """Return a call in which functions draw the arguments, after the parameters."""

    def compute():
        layer = drawn(MultiScaleDeformableAttention(C, 4, L, 3, batch_first=True, **(options or {}))).to(dtype)
        usual = dict(
            value=lambda: torch.rand(B, S, C), reference_points=lambda: torch.rand(*query, L, 2), spatial_shapes=SHAPES
        )
        drawn_inputs = {key: value() if callable(value) else value for key, value in {**usual, **given}.items()}
        return layer(
            torch.rand(*query, C).to(dtype),
            **{key: x.to(dtype) if getattr(x, "is_floating_point", bool)() else x for key, x in drawn_inputs.items()},
        )

    return compute


@pytest.mark.parametrize(
    "shape", [(1, Q, 1, 2), (B, Q, 1, 2), (1, Q, L, 2), (B, 1, 1, 2), (1, 1, 1, 2), (B, Q, 1, 4), (1, Q, L, 4)]
)
def test_reference_points_are_broadcast(shape):
    assert_same(deformable(reference_points=lambda: torch.rand(shape)))


@pytest.mark.parametrize("shape", [(B, S), (1, S), (B, 1), (S,)])
def test_padding_masks_are_broadcast(shape):
    assert_same(deformable(key_padding_mask=lambda: mask(*shape)))


@pytest.mark.parametrize(
    "options",
    [
        dict(spatial_shapes=SHAPES.int()),
        dict(spatial_shapes=SHAPES.short()),
        dict(level_start_index=torch.tensor([0, 48])),
        dict(query=(B, 0)),
        dict(query=(B, S), value=None),
        dict(query_pos=lambda: torch.rand(1, Q, C)),
        dict(residual=lambda: torch.rand(1, Q, C)),
        dict(value=lambda: torch.rand(S, B, C).transpose(0, 1)),
        dict(reference_points=lambda: torch.rand(L, Q, B, 2).transpose(0, 2)),
        dict(options=dict(value_proj_ratio=0.5)),
        dict(dtype=torch.float64),
        dict(dtype=torch.float16),
        dict(dtype=torch.bfloat16),
    ],
    ids=lambda options: ", ".join(f"{key}" for key in options),
)
def test_other_inputs_of_deformable_attention(options):
    assert_same(deformable(**options), 0.05 if options.get("dtype", torch.double).itemsize == 2 else 1e-4)


def test_values_of_another_width_for_a_projection_of_ones_own():
    def compute():
        layer = MultiScaleDeformableAttention(C, 4, L, 3, batch_first=True)
        layer.value_proj = nn.Linear(48, C)
        inputs = dict(value=torch.rand(B, S, 48), reference_points=torch.rand(B, Q, L, 2), spatial_shapes=SHAPES)
        return drawn(layer)(torch.rand(B, Q, C), **inputs)

    assert_same(compute)


@pytest.mark.parametrize(
    "given",
    [
        dict(query_pos=lambda: torch.rand(1, Q, C)),
        dict(key=lambda: torch.rand(B, 7, C), key_pos=lambda: torch.rand(1, 7, C)),
        dict(key_padding_mask=lambda: torch.rand(B, Q)),
        dict(key_padding_mask=lambda: mask(B, Q), attn_mask=lambda: torch.rand(Q, Q)),
        dict(key_padding_mask=lambda: torch.rand(B, Q), attn_mask=lambda: mask(B * 4, Q, Q).tril(-1)),
        dict(query=lambda: torch.rand(B, 0, C), key=lambda: torch.rand(B, 7, C)),
        dict(query=lambda: torch.rand(1, Q, C).expand(B, -1, -1)),
        dict(residual=lambda: torch.rand(1, Q, C), unknown=1),
    ],
    ids=lambda given: ", ".join(given),
)
def test_inputs_of_multi_head_attention(given):
    def compute():
        layer = drawn(MultiheadAttention(C, 4, batch_first=True))
        inputs = {"query": torch.rand(B, Q, C), **{key: x() if callable(x) else x for key, x in given.items()}}
        return layer(**inputs)

    assert_same(compute)


@pytest.mark.parametrize("size", [[6, 10], torch.Size([6, 10]), torch.tensor([6, 10]), np.array([6, 10])], ids=type)
def test_sizes_of_maps_for_windows(size):
    def compute():
        layer = drawn(swin.ShiftWindowMSA(C, 4, window_size=4, shift_size=2))
        return layer(torch.rand(B, C, 6, 10).flatten(2).transpose(1, 2), size)

    assert_same(compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [(C, B), (1, C)])
@pytest.mark.parametrize("name, options", [
    ("GeneralizedAttention", dict(in_channels=C)),
    ("DCN", dict(in_channels=C, out_channels=8, kernel_size=3, stride=np.int64(2))),
    ("DCNv2", dict(in_channels=C, out_channels=8, kernel_size=(np.int64(3), 1), padding=(1, 0))),
])  # fmt: skip
def test_layers_on_maps(name, options, stored, dtype):
    results = []
    for kind in (STOCK[name], drop_in.REPLACEMENTS[name]):
        torch.manual_seed(0)
        layer, x = drawn(kind(**options)).to(dtype), torch.rand(*stored, 7, 9).to(dtype)
        results.append(layer(x.transpose(0, 1) if stored == (C, B) else x.expand(B, -1, -1, -1)))
    expected, ours = results
    bound = {2: 0.05, 4: 1e-4, 8: 1e-4}[dtype.itemsize] * max(1, float(expected.abs().max()))
    torch.testing.assert_close(ours, expected, rtol=0, atol=bound)
