"""ALiBi along a sequence and on maps: loops and the published numbers."""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.ops import global_attention, sequence_attention
from attn_plugins.terms.linear_distance import (
    alibi_slopes,
    distance_logits,
    euclidean_logits,
    manhattan_logits,
    manhattan_map_logits,
)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 33])
def test_slopes(heads):
    """Compare with the authors' recursion in loops."""

    def series(n):
        if math.log2(n).is_integer():
            first = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [first * first**i for i in range(n)]
        power = 2 ** math.floor(math.log2(n))
        return series(power) + series(2 * power)[0::2][: n - power]

    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,)
    torch.testing.assert_close(slopes, torch.tensor(series(heads)))


def test_the_papers_own_slopes():
    """Section 3: 1/2, 1/4 ... 1/256 for 8 heads; 16 heads add the geometric means in between."""
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(16), torch.tensor([2 ** (-n / 2) for n in range(1, 17)]))


@pytest.mark.parametrize("T, S, start", [(4, 4, 0), (2, 7, 5), (6, 3, 0)])
def test_distances_along_a_sequence(T, S, start):
    slopes = alibi_slopes(3)
    logits = distance_logits(slopes, T, S, start=start)
    for head in range(3):
        for t in range(T):
            for s in range(S):
                assert float(logits[head, t, s]) == -float(slopes[head]) * abs(s - (start + t))


@pytest.mark.parametrize("size", [(3, 5), (4, 4), (1, 6), (1, 1)])
@pytest.mark.parametrize(
    "logits_of, distance", [(manhattan_logits, lambda y, x: y + x), (euclidean_logits, math.hypot)]
)
def test_distances_on_a_map(size, logits_of, distance):
    H, W = size
    slopes = alibi_slopes(3).double()
    logits = logits_of(slopes, size).view(3, H, W, H, W)
    for i in range(H):
        for j in range(W):
            for y in range(H):
                for x in range(W):
                    expected = -slopes * distance(abs(y - i), abs(x - j))
                    torch.testing.assert_close(logits[:, i, j, y, x], expected)


def test_the_factored_form_is_the_table():
    torch.manual_seed(0)
    H, W = 4, 6
    slopes = alibi_slopes(2).double()
    rows, columns = manhattan_map_logits(slopes, (H, W))
    assert (rows.shape, columns.shape) == ((1, 2, H, 1, H), (1, 2, 1, W, W))
    query, key, value = torch.randn(3, 1, 2, H, W, 4, dtype=torch.float64).unbind(0)
    on_map = global_attention(query, key, value, row_logits=rows, column_logits=columns)
    flat = [t.flatten(2, 3) for t in (query, key, value)]
    table = sequence_attention(*flat, position_logits=manhattan_logits(slopes, (H, W)).unsqueeze(0))
    torch.testing.assert_close(on_map.flatten(2, 3), table)


@pytest.mark.parametrize("logits_of", [manhattan_logits, euclidean_logits, manhattan_map_logits])
def test_gradients_half_precision_and_compile(logits_of):
    slopes = alibi_slopes(3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: logits_of(s, (2, 3)), slopes)
    compiled = torch.compile(lambda s: logits_of(s, (2, 3)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(slopes), logits_of(slopes, (2, 3)))
    half = logits_of(alibi_slopes(3).half(), (1, 400))
    for part in half if isinstance(half, tuple) else [half]:
        assert part.dtype == torch.float16
        assert part.isfinite().all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: alibi_slopes(0), "heads must be at least 1, got 0"),
        (lambda: distance_logits(torch.zeros(2, 1), 3, 3), r"slopes must have shape \(M,\), got \(2, 1\)"),
        (lambda: euclidean_logits(torch.zeros(2, 1), (3, 3)), r"slopes must have shape \(M,\), got \(2, 1\)"),
        (lambda: manhattan_logits(torch.zeros(2), (3,)), "size must be two ints"),
        (lambda: manhattan_map_logits(torch.zeros(2), (3, 0)), "size must be two ints"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
