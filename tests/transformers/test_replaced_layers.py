"""An accelerated layer behaves as what it replaces: its row of docs/reliability.md, cell by cell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.transformers import accelerate
from tests.helpers.replacement import COLUMNS, C, Called, Layer, drawn, printed, rand, verdict

transformers = pytest.importorskip("transformers")
SHAPES = [(6, 8), (3, 4)]


def stock() -> nn.Module:
    from transformers.models.deformable_detr import modeling_deformable_detr as of

    config = transformers.DeformableDetrConfig(d_model=C, num_feature_levels=2)
    layer = of.DeformableDetrMultiscaleDeformableAttention(config, num_heads=2, n_points=2)
    given = dict(
        encoder_hidden_states=rand(2, 60, C), reference_points=rand(2, 60, 2, 2), spatial_shapes=torch.tensor(SHAPES),
        spatial_shapes_list=SHAPES, level_start_index=torch.tensor([0, 48]),
    )  # fmt: skip
    return drawn(Called(layer, **given))


def ours(model: nn.Module) -> nn.Module:
    assert accelerate(model, onednn=False)
    return model


def inputs() -> tuple[Tensor, ...]:
    return (rand(2, 60, C),)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_cell(column):
    layer = Layer(stock, ours, inputs, "deformable_attention")
    assert verdict(layer, COLUMNS[column]) == printed("`accelerate`, transformers")[column]
