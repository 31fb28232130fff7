"""Placement of labels: inside the frame, not overlapping, next to their boxes."""

from __future__ import annotations

import random

import pytest

from tools.label_places import overlap, place


@pytest.mark.parametrize("seed", range(20))
def test_labels_overlap_neither_each_other_nor_the_frame(seed):
    draw, frame, boxes, sizes = random.Random(seed), (600, 420), [], []
    for _ in range(draw.randint(1, 14)):
        width, height = draw.uniform(20, 120), draw.uniform(30, 160)
        left, top = draw.uniform(0, frame[0] - width), draw.uniform(0, frame[1] - height)
        boxes.append((left, top, left + width, top + height))
        sizes.append((draw.uniform(60, 200), 30))
    labels = place(boxes, sizes, frame)
    for n, (label, size) in enumerate(zip(labels, sizes)):
        assert (label[2] - label[0], label[3] - label[1]) == pytest.approx(size)
        assert min(label) >= 0
        assert label[2] <= frame[0] and label[3] <= frame[1]  # noqa: PT018
        assert not any(overlap(label, other) for other in labels[:n])


def test_the_usual_places():
    frame, size = (200, 100), [(40, 10)]
    assert place([(50, 40, 80, 70)], size, frame) == [(50, 30, 90, 40)]  # above
    assert place([(50, 4, 80, 70)], size, frame) == [(50, 70, 90, 80)]  # below, as there is no room above
    assert place([(170, 40, 195, 70)], size, frame) == [(160, 30, 200, 40)]  # above, moved into the frame
    assert place([(0, 0, 200, 100)], size, frame) == [(0, 0, 40, 10)]  # inside a box that fills the frame


def test_other_boxes_are_not_hidden():
    above = (50, 20, 90, 39)
    [label] = place([(50, 40, 80, 70)], [(40, 10)], (200, 100), others=[above])
    assert not overlap(label, above)


def test_no_room_is_no_error():
    labels = place([(0, 0, 30, 30)] * 9, [(30, 12)] * 9, (40, 30))
    assert len(labels) == 9
    assert all(0 <= side <= 40 for label in labels for side in label)
    assert place([], [], (40, 30)) == []
