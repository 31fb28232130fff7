"""An accelerated layer behaves as what it replaces: its rows of docs/reliability.md, cell by cell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.transformers import accelerate
from tests.helpers.replacement import COLUMNS, C, Called, Layer, cells, drawn, rand
from tests.helpers.verdicts import printed, verdict

transformers = pytest.importorskip("transformers")
SHAPES = [(6, 8), (3, 4)]


def deformable_detr() -> nn.Module:
    from transformers.models.deformable_detr import modeling_deformable_detr as of

    config = transformers.DeformableDetrConfig(d_model=C, num_feature_levels=2)
    layer = of.DeformableDetrMultiscaleDeformableAttention(config, num_heads=2, n_points=2)
    given = dict(
        encoder_hidden_states=rand(2, 60, C), reference_points=rand(2, 60, 2, 2), spatial_shapes=torch.tensor(SHAPES),
        spatial_shapes_list=SHAPES, level_start_index=torch.tensor([0, 48]),
    )  # fmt: skip
    return drawn(Called(layer, **given))


def sam() -> nn.Module:
    """Return the eager layer, whose weights are dropped and read."""
    from transformers.models.sam import modeling_sam as of

    config = transformers.SamVisionConfig(hidden_size=C, num_attention_heads=2, image_size=96, patch_size=16)
    return drawn(Called(of.SamVisionAttention(config, window_size=0)))


def ours(model: nn.Module) -> nn.Module:
    assert accelerate(model, onednn=False)
    return model


LAYERS = {
    "`accelerate`, transformers": Layer(deformable_detr, ours, lambda: (rand(2, 60, C),), "deformable_attention"),
    "`accelerate`, transformers' SAM": Layer(sam, ours, lambda: (rand(2, 6, 8, C),), "global_attention"),
}


@pytest.mark.parametrize("name, column", cells(LAYERS))
def test_each_cell_of_the_table_is_what_happens(name, column):
    assert verdict(LAYERS[name], COLUMNS[column]) == printed(name)[column]
