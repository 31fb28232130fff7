"""Decomposed positions of SAM, ViTDet and MViTv2: loops, timm's functions, sizes that stay dynamic in an export."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attn_plugins.terms.decomposed_positions import decomposed_logits, resize_offsets
from attn_plugins.terms.log_positions import log_coordinates
from attn_plugins.terms.position_table import table_index


def make(size, key_size, lengths=None, dtype=torch.float64, **options):
    torch.manual_seed(0)
    lengths = lengths or [max(a, b) for a, b in zip(size, key_size)]
    query = torch.randn(2, 3, *size, 4, dtype=dtype, **options)
    tables = [torch.randn(2 * length - 1, 4, dtype=dtype, **options) for length in lengths]
    return query, *tables


@pytest.mark.parametrize("size", [(3, 5), (1, 6)])
def test_every_pair_has_its_entry(size):
    H, W = size
    query, row_table, column_table = make(size, size)
    rows, columns = decomposed_logits(query, row_table, column_table)
    assert (rows.shape, columns.shape) == ((2, 3, H, W, H), (2, 3, H, W, W))
    for i in range(H):
        for j in range(W):
            for y in range(H):
                torch.testing.assert_close(rows[:, :, i, j, y], query[:, :, i, j] @ row_table[H - 1 + i - y])
            for x in range(W):
                torch.testing.assert_close(columns[:, :, i, j, x], query[:, :, i, j] @ column_table[W - 1 + j - x])


@pytest.mark.parametrize("old, new", [(3, 5), (7, 4), (1, 3), (4, 1)])
def test_resizing_is_linear_between_centres(old, new):
    torch.manual_seed(0)
    table = torch.randn(2 * old - 1, 3, dtype=torch.float64)
    resized = resize_offsets(table, new)
    assert resized.shape == (2 * new - 1, 3)
    for n in range(2 * new - 1):
        place = (n + 0.5) * (2 * old - 1) / (2 * new - 1) - 0.5
        place = min(max(place, 0), 2 * old - 2)
        low = math.floor(place)
        high = min(low + 1, 2 * old - 2)
        expected = table[low] * (low + 1 - place) + table[high] * (place - low)
        torch.testing.assert_close(resized[n], expected)
    assert resize_offsets(table, old) is table


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    query, row_table, column_table = make((3, 5), (3, 5), (4, 4), dtype)
    ours = decomposed_logits(query, row_table, column_table)
    wide = decomposed_logits(query.float(), row_table.float(), column_table.float())
    for half, expected in zip(ours, wide):
        assert half.dtype == dtype
        torch.testing.assert_close(half.float(), expected, rtol=3e-2, atol=5e-2)


@pytest.mark.parametrize(("key_size", "lengths"), [(None, None), ((1, 3), (4, 2))])
def test_gradients(key_size, lengths):
    operands = make((2, 3), key_size or (2, 3), lengths, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *operands: decomposed_logits(*operands, key_size), operands)


def test_errors():
    for query, row_table, message in (
        ((2, 3, 4, 5), (7, 5), r"query must have shape \(B, M, H, W, d\), got"),
        ((1, 2, 3, 4, 5), (5, 4), r"row_table must have shape \(2L - 1, 5\), got \(5, 4\)"),
        ((1, 2, 3, 4, 5), (6, 5), r"row_table must have shape \(2L - 1, 5\), got \(6, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            decomposed_logits(torch.zeros(query), torch.zeros(row_table), torch.zeros(7, 5))


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The export decides whether a table is interpolated; a table longer than any axis always is.
        self.tables = nn.Parameter(torch.randn(2, 2 * 64 - 1, 8))

    def forward(self, x):
        size = x.shape[2:4]
        return (*decomposed_logits(x, *self.tables), table_index(size), log_coordinates(size))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_terms_exported_at_one_size_run_at_another(strict):
    model = Terms()
    H, W = torch.export.Dim("H", min=4, max=60), torch.export.Dim("W", min=4, max=60)
    exported = torch.export.export(model, (torch.randn(1, 3, 5, 6, 8),), dynamic_shapes=({2: H, 3: W},), strict=strict)
    x = torch.randn(1, 3, 9, 7, 8)
    for ours, expected in zip(exported.module()(x), model(x), strict=True):
        torch.testing.assert_close(ours, expected)


# --- timm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "key_size", "lengths"),
    [((3, 5), (3, 5), None), ((8, 6), (4, 3), None), ((4, 3), (8, 6), None), ((7, 5), (3, 4), None),
     ((5, 7), (5, 7), (14, 4)), ((6, 9), (4, 3), (10, 5))],
)  # fmt: skip
def test_the_logits_are_sams(size, key_size, lengths):
    sam = pytest.importorskip("timm.models.vision_transformer_sam")
    query, row_table, column_table = make(size, key_size, lengths, torch.float32)
    rows, columns = decomposed_logits(query, row_table, column_table, key_size)
    ours = (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(4).flatten(2, 3)
    flat = query.flatten(0, 1).flatten(1, 2)
    expected = sam.get_decomposed_rel_pos_bias(flat, row_table, column_table, size, key_size)
    torch.testing.assert_close(ours.flatten(0, 1), expected)
