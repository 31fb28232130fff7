"""Selection of a detector's regions, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.captioning.regions import BadExtractor, Selection


def overlap(a, b):
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    both = np.prod(np.clip(high - low, 0, None))
    return both / (np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - both)


@pytest.mark.parametrize(
    ("minimum", "maximum", "threshold"), [(1, 100, 0.6), (10, 100, 0.99), (2, 4, 0.1), (50, 60, 0)]
)
def test_selection_is_that_of_plain_loops(minimum, maximum, threshold):
    rng = np.random.default_rng(0)
    corners = rng.uniform(-10, 60, (40, 3, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(5, 50, (40, 3, 2))], 2)
    scores = rng.uniform(0, 1, (40, 3)) ** 2
    best = scores.argmax(1)
    own = np.clip(boxes[np.arange(40), best], 0, [80, 50, 80, 50])
    sides = (own[:, 2:] - own[:, :2]).min(1)
    order = [i for i in np.argsort(-scores.max(1)) if sides[i] >= 1]
    kept = []
    for i in order:
        if all(best[i] != best[k] or overlap(own[i], own[k]) <= 0.3 for k in kept):
            kept.append(i)
    number = np.clip(sum(scores[i].max() >= threshold for i in kept), minimum, maximum)
    expected = sorted((kept + [i for i in order if i not in kept])[:number], key=lambda i: -scores[i].max())
    found, confidence = Selection(minimum, maximum, threshold)(torch.tensor(boxes), torch.tensor(scores), 50, 80)
    np.testing.assert_allclose(found, own[expected], rtol=1e-6)
    np.testing.assert_allclose(confidence, scores.max(1)[expected], rtol=1e-6)


def test_selection_without_proposals_is_the_whole_picture():
    for scores in (torch.zeros(0, 5), torch.full((2, 5), float("nan"))):
        boxes, confidence = Selection()(torch.zeros(len(scores), 5, 4), scores, 30, 40)
        assert boxes.tolist() == [[0, 0, 40, 30]]
        assert confidence.tolist() == [0]
    with pytest.raises(BadExtractor, match="--min-regions must be from 1 to --max-regions, got 5 and 4"):
        Selection(5, 4)
