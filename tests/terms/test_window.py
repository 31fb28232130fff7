"""Masks of shifted windows: neighboring pixels of a rolled map."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.terms.window import shifted_window_groups, shifted_window_segments

CASES = [
    ((3, 2), (4, 6), (2, 3)),
    ((2, 4), (3, 5), (1, 4)),
    ((2, 3), (4, 4), (2, 0)),
    ((2, 3), (4, 4), (0, 2)),
    ((1, 3), (4, 2), (2, 1)),
    ((1, 1), (3, 4), (1, 2)),
    ((2, 2), (3, 4), (0, 0)),
]


def spread_out(groups, windows, N):
    """Expand the masks of groups to one mask per window. Every window is in exactly one group."""
    masks = torch.full((*windows, N, N), torch.nan)
    for group in groups:
        assert masks[group.rows, group.columns].isnan().all()
        assert masks[group.rows, group.columns].numel()
        masks[group.rows, group.columns] = torch.zeros(N, N) if group.logits is None else group.logits
    assert not masks.isnan().any()
    return masks


@pytest.mark.parametrize("windows, window, shift", CASES)
def test_pixels_see_those_that_were_beside_them(windows, window, shift):
    """In a window of the rolled map, a pair is masked if the roll carried one of the two across a border."""
    (nH, nW), (h, w) = windows, window
    H, W, N = nH * h, nW * w, h * w
    masks = spread_out(shifted_window_groups(windows, window, shift), windows, N)
    for a in range(nH):
        for b in range(nW):
            places = [(a * h + i + shift[0], b * w + j + shift[1]) for i in range(h) for j in range(w)]
            wrapped = [(y >= H, x >= W) for y, x in places]
            for q in range(N):
                for k in range(N):
                    expected = 0.0 if wrapped[q] == wrapped[k] else float("-inf")
                    assert float(masks[a, b, q, k]) == expected
    segments = shifted_window_segments(windows, window, shift, torch.device("cpu")).view(nH, nW, N)
    assert segments.dtype == torch.int32
    assert torch.equal(segments.unsqueeze(3) == segments.unsqueeze(2), masks == 0)


def test_errors():
    for windows, window, shift, message in (
        ((0, 2), (4, 4), (2, 2), "windows must be two ints"),
        ((2, 2), (4,), (2, 2), "window must be two ints"),
        ((2, 2), (4, 4), (4, 2), r"shift must be two ints from 0 to below window \(4, 4\), got \(4, 2\)"),
        ((2, 2), (4, 4), (-1, 2), "shift must be two ints from 0"),
        ((2, 2), (4, 4), (1.5, 0), "shift must be two ints from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            shifted_window_groups(windows, window, shift)
