"""What we replace or accelerate behaves as what it replaces: the table of docs/reliability.md, cell by cell.

A test does the same thing to a stock layer and to ours, compares what comes out, and compares the verdict with the
table: "as stock"; "stock's code", if our operators are called in no part of it; "works", where stock fails; "fails as
stock"; "clear error"; "no dropout"; the name of a class that the user chose; or "by reference", if it converts by the
definitions. ``python -m tests.mm.test_replaced_layers`` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torchvision
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import ModulatedDeformConv2dPack, MultiScaleDeformableAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from timm import create_model
from timm.models.mvitv2 import MultiScaleAttention
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.vision_transformer_sam import Attention as SAMAttention
from torch import Tensor, nn

from attn_plugins.mmcv.replace_attention import exchange
from attn_plugins.timm import accelerate
from tests.helpers.replacement import COLUMNS, C, Called, Layer, all_parts_called, cells, drawn, rand
from tests.helpers.verdicts import printed, verdict
from tests.mm.drop_in_helpers import STOCK, drop_in, ours, restore, stock_layers  # noqa: F401 - a fixture
from tools.bench import compiled_mmcv

pytestmark = pytest.mark.usefixtures("stock_layers")
M = 2
SHAPES = torch.tensor([[6, 8], [3, 4]])


def registered(name: str, *args: Any, **options: Any) -> Layer:
    """Return a layer of mmengine's registry."""
    marks = {"DCN": "deform_conv2d", "DCNv2": "deform_conv2d", "CrissCrossAttention": "criss_cross_attention"}
    build = STOCK[name]
    return Layer(lambda: drawn(build(*args, **options)), ours, lambda: (rand(2, C, 6, 8),), marks.get(name, "global"))


def accelerated(build: Callable[[], nn.Module], marks: str, *shape: int, **options: Any) -> Layer:
    def stock() -> nn.Module:
        return drawn(all_parts_called(Called(build(), **options)))

    def ours(stock: nn.Module) -> nn.Module:
        assert accelerate(stock)
        return stock

    return Layer(stock, ours, lambda: (rand(*shape),), marks)


def vit(attn_layer: str | None = None) -> nn.Module:
    options = dict(patch_size=4, embed_dim=C, depth=1, num_heads=M, num_classes=5, dynamic_img_size=True, img_size=16)
    return create_model("vit_tiny_patch16_224", **options, **({"attn_layer": attn_layer} if attn_layer else {}))


def ours_in_vit(stock: nn.Module) -> nn.Module:
    ours = vit("attn1111")
    ours.load_state_dict(stock.state_dict(), strict=True)  # gates are 0: the same function
    return ours.eval()


def attended(**layer: Any) -> Callable[[nn.Module], nn.Module]:
    def ours(stock: nn.Module) -> nn.Module:
        exchange(stock, {"layer": layer})
        return stock.eval()

    return ours


class TorchvisionDCNv2(ModulatedDeformConv2dPack):
    """mmcv's layer by torchvision's operator, in place of a compiled mmcv."""

    def forward(self, x: Tensor) -> Tensor:
        offset, mask = self.conv_offset(x).split((18, 9), 1)
        return torchvision.ops.deform_conv2d(x, offset, self.weight, self.bias, padding=1, mask=mask.sigmoid())


TorchvisionDCNv2.__name__ = ModulatedDeformConv2dPack.__name__  # it stands for that class


def on_stand_in(stock: nn.Module) -> nn.Module:
    layer = ModulatedDeformConv2dPack(C, C, 3, padding=1)
    layer.load_state_dict(stock.state_dict())
    return layer.eval()


def tokens() -> tuple[Tensor, ...]:
    return (rand(60, 2, C),)


def deformable() -> nn.Module:
    points = rand(2, 60, 2, 2)
    return drawn(
        Called(
            MultiScaleDeformableAttention(C, M, num_levels=2, num_points=2, dropout=0.0),
            reference_points=points,
            spatial_shapes=SHAPES,
            level_start_index=torch.tensor([0, 48]),
        )
    )


def multihead() -> nn.Module:
    return drawn(Called(MultiheadAttention(C, M, attn_drop=0.0)))


@contextmanager
def dropped_in() -> Iterator[None]:
    drop_in.replace()
    try:
        yield
    finally:
        restore()


def unchanged(stock: nn.Module) -> nn.Module:
    return stock


def within(stock: nn.Module) -> nn.Module:
    assert accelerate(stock, onednn=False) == ["layer"]
    return stock


LAYERS = {
    "`accelerate`, mmcv's `GeneralizedAttention`": registered("GeneralizedAttention", C, num_heads=M, kv_stride=2),
    "`accelerate`, mmcv's `CrissCrossAttention`": registered("CrissCrossAttention", C),
    "`accelerate`, mmcv's `DCN`": registered("DCN", C, C, 3, padding=1),
    "`accelerate`, mmcv's `DCNv2`": registered("DCNv2", C, C, 3, padding=1),
    "`accelerate`, mmcv's `MultiScaleDeformableAttention`": Layer(deformable, within, tokens, "deformable_attention"),
    "`accelerate`, mmcv's `MultiheadAttention`": Layer(multihead, within, tokens, "scaled_dot_product"),
    "`accelerate`, mmdet's `ShiftWindowMSA`": Layer(
        lambda: drawn(Called(ShiftWindowMSA(C, M, 4, shift_size=2), hw_shape=(6, 8))),
        within,
        lambda: (rand(2, 48, C),),
        "sequence_attention",
    ),
    "`accelerate` Swin": accelerated(
        lambda: SwinTransformerBlock(C, (8, 8), M, window_size=4, shift_size=2), "sequence_attention", 2, 8, 8, C
    ),
    "`accelerate` Swin V2": accelerated(
        lambda: SwinTransformerV2Block(C, (8, 8), M, window_size=4, shift_size=2), "sequence_attention", 2, 8, 8, C
    ),
    "`accelerate` SAM": accelerated(
        lambda: SAMAttention(C, M, use_rel_pos=True, input_size=(6, 8)), "global", 2, 6, 8, C
    ),
    "`accelerate` MViTv2": accelerated(
        lambda: MultiScaleAttention(C, C, (8, 8), M, kernel_kv=(3, 3), stride_kv=(2, 2), has_cls_token=False),
        "global", 2, 48, C, feat_size=[6, 8],
    ),
    "`attn_layer` in a ViT": Layer(lambda: drawn(vit()), ours_in_vit, lambda: (rand(2, 3, 8, 16),), "_attention"),
    "`Attended` `SpatialSelfAttention`": Layer(
        multihead, attended(type="SpatialSelfAttention", attention_type="1000"), tokens, "attention"
    ),
    "`Attended` `MultiScaleDeformableAttention`": Layer(
        deformable, attended(type="MultiScaleDeformableAttention"), tokens, "deformable_attention"
    ),
    "stand-in, mmcv's `DCNv2`": Layer(
        lambda: drawn(TorchvisionDCNv2(C, C, 3, padding=1)), on_stand_in, lambda: (rand(2, C, 6, 8),), "deform_conv2d"
    ),
}  # fmt: skip


UNTRACED = ("`torch.export`", "`torch.compile`", "`torch.fx`", "`torch.jit.script`", "OpenVINO")


LONG = ["`attn_layer` in a ViT", "`accelerate` Swin V2", "`accelerate` MViTv2"]
QUICK = {  # rows of columns that take seconds in the others
    "non-finite inputs": [
        "stand-in, mmcv's `DCNv2`",
        *(f"`accelerate`, mmcv's `{name}`" for name in ("DCN", "DCNv2", "MultiheadAttention")),
    ],
    "threads": ["`accelerate` Swin", "`accelerate`, mmcv's `DCNv2`", "`Attended` `SpatialSelfAttention`"],
    "backward hooks": [row for row in LAYERS if row not in LONG],
}


@pytest.mark.parametrize("name, column", cells(LAYERS, quick=QUICK))
def test_each_cell_of_the_table_is_what_happens(name, column):
    if compiled_mmcv.is_compiled() and ("stand-in" in name or ("DCN" in name and column in UNTRACED)):
        pytest.skip("mmcv is compiled here: nothing stands in, and its DCN cannot be traced as stock")
    assert verdict(LAYERS[name], COLUMNS[column]) == printed(name)[column]


def main() -> None:
    print("| layer | " + " | ".join(COLUMNS) + " |")
    print("| --- " * (len(COLUMNS) + 1) + "|")
    for name, layer in LAYERS.items():
        verdicts = []
        for scenario in COLUMNS.values():
            try:
                verdicts.append(verdict(layer, scenario))
            except Exception as error:
                verdicts.append(f"WRONG {error}"[:600])
        print(f"| {name} | " + " | ".join(verdicts) + " |", flush=True)


if __name__ == "__main__":
    main()
