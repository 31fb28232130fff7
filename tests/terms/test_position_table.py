"""Swin's table: plain loops, timm and mmdet."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attn_plugins.terms.position_table import resize_position_table, table_logits, tap_logits

SIZES = [(3, 5), (1, 4), (3, 1), (1, 1)]


def random_table(size, heads=2, cls_token=False, **options):
    torch.manual_seed(0)
    H, W = size
    return torch.randn((2 * H - 1) * (2 * W - 1) + 3 * cls_token, heads, **options)


@pytest.mark.parametrize("size", SIZES)
def test_every_pair_has_its_entry(size):
    H, W = size
    table = random_table(size)
    logits = table_logits(table, size).view(2, H, W, H, W)
    grid = table.view(2 * H - 1, 2 * W - 1, 2)
    for qh, qw, kh, kw in itertools.product(range(H), range(W), range(H), range(W)):
        assert torch.equal(logits[:, qh, qw, kh, kw], grid[H - 1 + qh - kh, W - 1 + qw - kw])


def test_gradients_half_precision_and_equal_windows():
    table = random_table((2, 3), cls_token=True, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: table_logits(t, (2, 3), cls_token=True), table)
    assert torch.autograd.gradcheck(lambda t: resize_position_table(t, (2, 3), (4, 2), cls_token=True), table)
    assert resize_position_table(table, (2, 3), (2, 3), cls_token=True) is table
    half = random_table((2, 3)).half()
    assert torch.equal(table_logits(half, (2, 3)), table_logits(half.float(), (2, 3)).half())
    resized = resize_position_table(half, (2, 3), (4, 5))
    assert torch.equal(resized, resize_position_table(half.float(), (2, 3), (4, 5)).half())


def by_loops(column, old, new):
    """Compute one axis of a table by the definition: geometric distances, then linear interpolation."""
    if old == 1:
        return [column[0]] * (2 * new - 1)
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        r = (low + high) / 2
        low, high = (low, r) if (1 - r ** (old - 1)) / (1 - r) > new - 1 else (r, high)
    at = [math.copysign((1 - r ** abs(n)) / (1 - r), n) for n in range(1 - old, old)]
    out = []
    for offset in range(1 - new, new):
        if offset <= at[0] or offset >= at[-1]:
            out.append(column[0] if offset < 0 else column[-1])
            continue
        i = next(n for n in range(len(at) - 1) if at[n] <= offset <= at[n + 1])
        share = (offset - at[i]) / (at[i + 1] - at[i])
        out.append(column[i] * (1 - share) + column[i + 1] * share)
    return out


@pytest.mark.parametrize("old, new", [((3, 5), (5, 8)), ((5, 7), (3, 4)), ((1, 4), (3, 4)), ((4, 1), (4, 2))])
def test_resized_tables_equal_loops(old, new):
    table = random_table(old, dtype=torch.float64)
    resized = resize_position_table(table, old, new).view(2 * new[0] - 1, 2 * new[1] - 1, 2)
    grid = table.view(2 * old[0] - 1, 2 * old[1] - 1, 2)
    rows = torch.stack(by_loops(list(grid), old[0], new[0]))
    expected = torch.stack(by_loops(list(rows.transpose(0, 1)), old[1], new[1]), 1)
    # Both bisect to 1e-6, but round their sums differently.
    torch.testing.assert_close(resized, expected, atol=1e-4, rtol=0)


def test_bad_arguments_raise():
    zeros = torch.zeros
    for call, message in (
        (lambda: table_logits(zeros(9, 2), (3, 2)), r"table must have shape \(15, M\) for a window of 3 × 2, got"),
        (lambda: table_logits(zeros(15, 2), (3, 2), cls_token=True), r"\(18, M\) for a window .* and a cls token"),
        (lambda: table_logits(zeros(15), (3, 2)), r"table must have shape \(15, M\).*got \(15,\)"),
        (lambda: table_logits(zeros(15, 2), 3), "size must be two ints, rows and columns.*got 3"),
        (lambda: tap_logits(zeros(18, 2), (3, 2), (3, 3)), r"table must have shape \(15, M\)"),
        (lambda: resize_position_table(zeros(15, 2), (3, 2), (0, 2)), "new_size must be two ints"),
        (lambda: resize_position_table(zeros(14, 2), (3, 2), (3, 3)), "table must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# --- upstream -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(3, 5), (1, 4), (4, 4)])
def test_the_cls_token_is_beits(size):
    pos_embed_rel = pytest.importorskip("timm.layers.pos_embed_rel")
    layer = pos_embed_rel.RelPosBias(size, 3, prefix_tokens=1)
    torch.nn.init.normal_(layer.relative_position_bias_table)
    ours = table_logits(layer.relative_position_bias_table, size, cls_token=True)
    assert torch.equal(ours, layer.get_bias()[0])


@pytest.mark.parametrize(
    ("old", "new", "cls_token"),
    [((7, 7), (12, 12), True), ((7, 7), (4, 5), False), ((3, 5), (6, 5), True), ((1, 4), (2, 4), False)],
)
def test_the_interpolation_is_timms(old, new, cls_token):
    pos_embed_rel = pytest.importorskip("timm.layers.pos_embed_rel")
    table = random_table(old, 3, cls_token)
    shape = ((2 * new[0] - 1) * (2 * new[1] - 1) + 3 * cls_token, 3)
    expected = pos_embed_rel.resize_rel_pos_bias_table(table, new, shape, old_window_size=old)
    torch.testing.assert_close(
        resize_position_table(table, old, new, cls_token=cls_token), expected, atol=1e-4, rtol=1e-4
    )
