"""Functions of rfdetr and Ultralytics, which no test installs, under their signatures, against ``grid_sample``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_plugins.transformers import sampling

SHAPES = ((3, 4), (2, 5))
B, Q, M, L, K, D = 2, 3, 2, 2, 4, 5


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Return values (B, S, M, D), locations (B, Q, M, L, K, 2) and weights (B, Q, M, L, K)."""
    torch.manual_seed(0)
    value = torch.randn(B, sum(h * w for h, w in SHAPES), M, D)
    return value, 1.4 * torch.rand(B, Q, M, L, K, 2) - 0.2, torch.rand(B, Q, M, L, K)


def defined(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """Compute (B, Q, M * D) level by level."""
    total = torch.zeros(B, M, D, Q)
    for level, (part, (H, W)) in enumerate(zip(value.split([h * w for h, w in SHAPES], 1), SHAPES)):
        maps = part.permute(0, 2, 3, 1).reshape(B * M, D, H, W)
        grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
        samples = F.grid_sample(maps, grid, align_corners=False).view(B, M, D, Q, K)
        total += (samples * weights[:, :, :, level].transpose(1, 2)[:, :, None]).sum(-1)
    return total.permute(0, 3, 1, 2).flatten(2)


def refused(*args: Any, **kwargs: Any) -> Tensor:
    raise AssertionError("the stock function was called")


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_ultralytics_joins_levels_and_points_in_some_versions(joined, as_tensor):
    value, locations, weights = operands()
    shapes = torch.tensor(SHAPES) if as_tensor else [list(shape) for shape in SHAPES]
    given = (locations.flatten(3, 4), weights.flatten(3, 4)) if joined else (locations, weights)
    torch.testing.assert_close(sampling.levels(refused, value, shapes, *given), defined(value, locations, weights))


@pytest.mark.parametrize("on_host", [False, True])
def test_values_of_rfdetr_have_their_positions_last(on_host):
    value, locations, weights = operands()
    given = value.permute(0, 2, 3, 1).contiguous(), torch.tensor(SHAPES), locations, weights.flatten(3)
    shapes = ([list(shape) for shape in SHAPES],) if on_host else ()
    ours = sampling.transposed_value(refused, *given, *shapes)
    torch.testing.assert_close(ours, defined(value, locations, weights))


def test_rfdetr_computes_its_export_and_other_dtypes_itself():
    value, locations, weights = operands()
    value, shapes, weights = value.permute(0, 2, 3, 1), torch.tensor(SHAPES), weights.flatten(3)
    for given in ((value, shapes, locations.flatten(3, 4), weights), (value.int(), shapes, locations, weights)):
        assert sampling.transposed_value(lambda *args: args, *given, None) == (*given, None)
