"""``attn_plugins.segment_anything.accelerate``: its image encoder's attention on our operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins import restore
from attn_plugins.segment_anything import accelerate
from tests.helpers.replacement import COLUMNS, C, Layer, drawn, rand
from tests.helpers.verdicts import Watch, verdict

image_encoder = pytest.importorskip(
    "segment_anything.modeling.image_encoder", reason="segment-anything is not installed"
)


def encoder(window: int, **options: Any) -> nn.Module:
    """Return a small encoder with one global block; ``window=0`` makes all blocks global, as Cellpose does."""
    given: dict[str, Any] = dict(use_rel_pos=True, window_size=window, global_attn_indexes=(1,), use_abs_pos=False)
    sizes = dict(img_size=80, patch_size=16, embed_dim=C, depth=2, num_heads=2, out_chans=8)
    return drawn(image_encoder.ImageEncoderViT(**sizes, **{**given, **options}))


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    output = model(leaf)
    output.sin().sum().backward()
    return [output.detach(), leaf.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("size", [(80, 80), (112, 64)], ids=str)
@pytest.mark.parametrize("window", [0, 3])
def test_outputs_and_gradients(window, size):
    """Tables of the map's size and interpolated ones; windows of 3 need padding."""
    model, x = encoder(window).double(), rand(2, 3, *size).double()
    keys, expected = list(model.state_dict()), results(model, x)
    names = accelerate(model, onednn=False)
    assert names == ["blocks.0.attn", "blocks.1.attn"]
    assert list(model.state_dict()) == keys
    with Watch("global_attention") as watch:
        found = results(model, x)
    assert watch.seen
    for ours, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-9, atol=1e-9)
    assert all(block.attn.rel_pos_h.grad.abs().max() > 0 for block in model.blocks)
    assert restore(model) == names


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast):
    model, x = encoder(3), rand(2, 7, 5, C)
    attn = model.blocks[0].attn
    with torch.no_grad():
        exact = attn(x)
        attn, x = (attn, x) if autocast else (attn.bfloat16(), x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            stock = attn(x)
            accelerate(attn, onednn=False)
            ours = attn(x)
    assert ours.dtype == stock.dtype == torch.bfloat16
    assert (ours - exact).norm() <= 1.2 * (stock - exact).norm()


def test_layers_without_relative_positions_stay():
    with pytest.raises(ValueError, match=r"image_encoder\.Attention, which is not one of them"):
        accelerate(encoder(3, use_rel_pos=False))


def ours(layer: nn.Module) -> nn.Module:
    assert accelerate(layer, onednn=False)
    return layer


@pytest.mark.parametrize("column", COLUMNS)
def test_behaves_as_stock(column):
    def stock() -> nn.Module:
        return drawn(image_encoder.Attention(C, num_heads=2, use_rel_pos=True, input_size=(6, 6)))

    layer = Layer(stock, ours, lambda: (rand(2, 6, 8, C),), "global_attention")
    expected = {"dropout in eval": "no dropout", "`torch.fx`": "fails as stock"}
    assert verdict(layer, COLUMNS[column]) == expected.get(column, "as stock")
