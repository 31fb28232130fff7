"""Terms of maps whose size stays dynamic in an exported model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.terms.decomposed import decomposed_logits
from attn_plugins.terms.log_positions import log_coordinates
from attn_plugins.terms.position_table import table_index


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The export decides whether a table is interpolated; a table longer than any axis always is.
        self.tables = nn.Parameter(torch.randn(2, 2 * 64 - 1, 8))

    def forward(self, x):
        size = x.shape[2:4]
        return (*decomposed_logits(x, *self.tables), table_index(size), log_coordinates(size))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_exported_at_one_size_runs_at_another(strict):
    model = Terms()
    H, W = torch.export.Dim("H", min=4, max=60), torch.export.Dim("W", min=4, max=60)
    exported = torch.export.export(model, (torch.randn(1, 3, 5, 6, 8),), dynamic_shapes=({2: H, 3: W},), strict=strict)
    x = torch.randn(1, 3, 9, 7, 8)
    for ours, expected in zip(exported.module()(x), model(x), strict=True):
        torch.testing.assert_close(ours, expected)
