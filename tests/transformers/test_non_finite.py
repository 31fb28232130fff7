"""Sampling offsets, values and weights that are not finite show in accelerated layers as in stock ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_plugins.transformers import sampling
from tests.transformers.test_sampling import SHAPES, defined, operands, refused

LIST = [list(shape) for shape in SHAPES]
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "layer": lambda v, p, w: sampling.layer(
        refused, None, v, torch.tensor(SHAPES), LIST, torch.tensor([0, 12]), p, w, 64
    ),
    "levels": lambda v, p, w: sampling.levels(refused, v, LIST, p, w),
    "counted_points": lambda v, p, w: sampling.counted_points(refused, v, LIST, p.flatten(3, 4), w.flatten(3), [4, 4]),
    "transposed_value": lambda v, p, w: sampling.transposed_value(
        refused, v.permute(0, 2, 3, 1), torch.tensor(SHAPES), p, w.flatten(3), LIST
    ),
}  # fmt: skip


def results(function: Function, spoilt: int, bad: float, dtype: torch.dtype) -> list[Tensor]:
    leaves = [tensor.to(dtype) for tensor in operands()]
    leaves[spoilt].view(-1)[[11, -8]] = bad  # of both images
    output = function(*(leaf.requires_grad_() for leaf in leaves))
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spoilt", [0, 1, 2], ids=["value", "locations", "weights"])
def test_finite_where_grid_sample_is(name, spoilt, bad):
    expected = results(defined, spoilt, bad, torch.float32)
    assert not expected[0].isfinite().all()
    for found, wanted in zip(results(FUNCTIONS[name], spoilt, bad, torch.float32), expected):
        assert torch.equal(found.isfinite(), wanted.isfinite())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_offsets_that_overflow_in_half_precision(name, dtype):
    """They are infinite, as a diverged predictor's."""
    output, _, *grads = results(FUNCTIONS[name], 1, math.inf, dtype)
    assert 0 < output.isnan().sum() < output.numel()
    assert all(grad.isnan().any() for grad in grads)  # GradScaler skips the step


@pytest.mark.parametrize("name", FUNCTIONS)
def test_under_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        output = FUNCTIONS[name](*(tensor.index_fill(1, torch.tensor(1), math.nan) for tensor in operands()))
    assert output[:, 1].isnan().all()
