"""T5's buckets: exact arithmetic, and logits along one and two axes in loops."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.ops import global_attention
from attn_plugins.terms.position_buckets import bucket_logits, bucket_map_logits, relative_buckets


def bucket_by_integers(offset: int, buckets: int, max_distance: int, causal: bool) -> int:
    """Compute the bucket without logarithms, as the number of bounds that the distance has reached.

    Bound n of the distant buckets is near * (max_distance / near)^(n / distant), compared by its distant-th power.
    """
    directed = buckets if causal else buckets // 2
    base = directed if offset > 0 and not causal else 0
    distance = max(-offset, 0) if causal else abs(offset)
    near = directed // 2
    distant = directed - near
    if distance < near:
        return base + distance
    reached = 0
    for n in range(1, distant):
        reached += distance**distant >= near ** (distant - n) * max_distance**n
    return base + near + reached


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (32, 64), (16, 128), (8, 20), (4, 3), (12, 50)])
def test_buckets(buckets, max_distance, causal):
    offsets = range(-2 * max_distance - 3, 2 * max_distance + 4)
    expected = [bucket_by_integers(offset, buckets, max_distance, causal) for offset in offsets]
    ours = relative_buckets(torch.tensor(list(offsets)), buckets, max_distance, causal=causal)
    assert ours.tolist() == expected
    assert set(expected) <= set(range(buckets))


def test_the_published_defaults():
    """Near keys have their own buckets, then buckets widen up to 128 and beyond; later keys have buckets 16 higher."""
    ours = relative_buckets(torch.tensor([0, -1, -7, -8, -11, -12, -16, -64, -127, -128, -999, 1, 8, 999]))
    assert ours.tolist() == [0, 1, 7, 8, 8, 9, 10, 14, 15, 15, 15, 17, 24, 31]
    causal = relative_buckets(torch.tensor([3, 0, -15, -16, -128, -999]), causal=True)
    assert causal.tolist() == [0, 0, 15, 16, 31, 31]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T, S, start", [(5, 5, 0), (3, 8, 5), (7, 4, 0), (1, 9, 8)])
def test_logits_of_a_sequence(T, S, start, causal):
    torch.manual_seed(0)
    table = torch.randn(8, 3)
    logits = bucket_logits(table, T, S, 20, causal=causal, start=start)
    assert logits.shape == (3, T, S)
    for t in range(T):
        for s in range(S):
            expected = table[bucket_by_integers(s - (start + t), 8, 20, causal)]
            assert torch.equal(logits[:, t, s], expected)


def test_logits_of_a_map():
    torch.manual_seed(0)
    H, W = 3, 6
    row_table, column_table = torch.randn(2, 8, 2, dtype=torch.float64).unbind(0)
    rows, columns = bucket_map_logits(row_table, column_table, (H, W), 20)
    assert (rows.shape, columns.shape) == ((1, 2, H, 1, H), (1, 2, 1, W, W))
    logits = torch.empty(2, H, W, H, W, dtype=torch.float64)
    for i in range(H):
        for j in range(W):
            for y in range(H):
                for x in range(W):
                    of_row = row_table[bucket_by_integers(y - i, 8, 20, False)]
                    logits[:, i, j, y, x] = of_row + column_table[bucket_by_integers(x - j, 8, 20, False)]
    value = torch.randn(1, 2, H, W, 5, dtype=torch.float64)
    query, key = torch.randn(2, 1, 2, H, W, 4, dtype=torch.float64).unbind(0)
    content = torch.einsum("bmijd,bmyxd->bmijyx", query, key)
    weights = (content + logits).flatten(4).softmax(-1)
    expected = torch.einsum("bmijk,bmkd->bmijd", weights, value.flatten(2, 3))
    torch.testing.assert_close(global_attention(query, key, value, row_logits=rows, column_logits=columns), expected)


def test_gradients_half_precision_and_compile():
    torch.manual_seed(0)
    table = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: bucket_logits(t, 4, 6, 20), table)
    assert torch.autograd.gradcheck(lambda t: bucket_map_logits(t, 2 * t, (2, 3), 20), table)
    assert bucket_logits(table.half(), 4, 6).dtype == torch.float16
    compiled = torch.compile(lambda t: bucket_logits(t, 4, 6, 20, causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(table), bucket_logits(table, 4, 6, 20, causal=True))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: relative_buckets(torch.arange(3), 7), "buckets must be an even number of at least 4, got 7"),
        (lambda: relative_buckets(torch.arange(3), 2), "buckets must be an even number of at least 4, got 2"),
        (lambda: relative_buckets(torch.arange(3), 32, 8), "max_distance must be more than the 8 distances.*got 8"),
        (lambda: bucket_logits(torch.zeros(32), 2, 2), r"table must have shape \(buckets, M\), got \(32,\)"),
        (lambda: bucket_map_logits(torch.zeros(32, 1), torch.zeros(32, 1), (2, 0)), "size must be two ints"),
    ],
)
def test_errors(call, message):
    with pytest.raises(TypeError, match=r"offsets must be integers, got torch\.float32"):
        relative_buckets(torch.zeros(3))
    with pytest.raises(ValueError, match=message):
        call()
