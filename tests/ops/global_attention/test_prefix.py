"""Keys without a position before those of a map, in ``ops.global_attention``: all weights written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, global_attention
from attn_plugins.ops.global_attention.prefix import corner
from tests.ops.global_attention.operands import COMBINATIONS

B, M, D, DV, GRID, KEYS = 2, 2, 3, 4, (2, 3), (3, 4)


def draw(terms=(True,) * 4, P=3, dtype=torch.float64, grad=False) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    content, row, column, key = terms
    return dict(
        query=random(B, M, *GRID, D) if content else None,
        key=random(B, M, *KEYS, D) if content else None,
        value=random(B, M, *KEYS, DV),
        row_logits=random(B, M, *GRID, KEYS[0]) if row else None,
        column_logits=random(B, 1, 1, GRID[1], KEYS[1]) if column else None,
        key_logits=random(1, M, *KEYS) if key else None,
        prefix_key=random(B, M, P, D) if content else None,
        prefix_value=random(B, M, P, DV),
    )


def by_concatenation(a: dict[str, Tensor | None], scale: float) -> Tensor:
    """Write all weights out: the prefix's logits before those of the map, whose terms alone depend on places."""
    zeros = torch.zeros((), dtype=torch.float64)
    logits = torch.zeros(B, M, *GRID, *KEYS, dtype=torch.float64)
    logits = logits + (zeros if a["row_logits"] is None else a["row_logits"].unsqueeze(5))
    logits = logits + (zeros if a["column_logits"] is None else a["column_logits"].unsqueeze(4))
    logits = (logits + (zeros if a["key_logits"] is None else a["key_logits"][:, :, None, None])).flatten(4)
    prefix = torch.zeros(B, M, *GRID, a["prefix_value"].shape[2], dtype=torch.float64)
    if a["query"] is not None:
        logits = logits + scale * torch.einsum("bmyxd,bmkd->bmyxk", a["query"], a["key"].flatten(2, 3))
        prefix = scale * torch.einsum("bmyxd,bmpd->bmyxp", a["query"], a["prefix_key"])
    weights = torch.cat((prefix, logits), -1).softmax(-1)
    values = torch.cat((a["prefix_value"], a["value"].flatten(2, 3)), 2)
    return torch.einsum("bmyxk,bmkd->bmyxd", weights, values)


@pytest.fixture(params=["auto", "reference", "eager"])
def path(request):
    if request.param == "auto":
        yield
    else:
        with backend(request.param):
            yield


@pytest.mark.parametrize("terms, P", zip(COMBINATIONS, [1, 3, 5, 0] * 4))
def test_formula(terms, P, path):
    arguments = draw(terms, P)
    output, expected = global_attention(**arguments, scale=0.7), by_concatenation(arguments, 0.7)
    torch.testing.assert_close(output.expand_as(expected), expected)


def test_a_query_that_no_place_has_a_key_for_sees_the_prefix():
    arguments = draw(P=2)
    arguments["row_logits"] = torch.full((1, 1, 1, 1, KEYS[0]), -math.inf, dtype=torch.float64)
    output = global_attention(**arguments)
    weights = (arguments["query"].flatten(2, 3) @ arguments["prefix_key"].mT).softmax(-1)
    torch.testing.assert_close(output.flatten(2, 3), weights @ arguments["prefix_value"])


@pytest.mark.parametrize("size, P, expected", [((14, 14), 1, (1, 1)), ((37, 37), 5, (2, 3)), ((2, 50), 3, (1, 3))])
def test_the_corner_has_few_cells(size, P, expected):
    a, b = corner(*size, P)
    assert a * b >= P
    assert sorted((a, b)) == sorted(expected)
