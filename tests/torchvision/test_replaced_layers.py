"""An accelerated convolution behaves as what it replaces: its row of docs/reliability.md, cell by cell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.torchvision import accelerate
from tests.helpers.replacement import COLUMNS, Layer, drawn, rand
from tests.helpers.slow_cases import slow_but
from tests.helpers.verdicts import printed, verdict
from tests.torchvision.test_accelerate import Model


def ours(model: nn.Module) -> nn.Module:
    assert accelerate(model)
    return model


def inputs() -> tuple[Tensor, ...]:
    return (rand(2, 4, 7, 9),)


@pytest.mark.parametrize("column", slow_but([name for name in COLUMNS if name != "OpenVINO"], COLUMNS))
def test_each_cell_of_the_table_is_what_happens(column):
    if column == "OpenVINO" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("limited to SSE4.1, OpenVINO computes other deformable convolutions, from stock models too")
    layer = Layer(lambda: drawn(Model()), ours, inputs, "attn_plugins.deform_conv2d")
    assert verdict(layer, COLUMNS[column]) == printed("`accelerate`, torchvision's `DeformConv2d`")[column]
