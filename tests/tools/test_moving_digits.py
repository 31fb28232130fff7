"""Clips of digits that move over photographs."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("sklearn")
pytest.importorskip("skimage")

from tools.datasets import moving_digits as tool
from tools.datasets.pasting import digit_samples

SMALL = dict(train=8, val=4, frames=6, height=32, width=48, speed=(0.1, 0.15))


def read_png(folder) -> np.ndarray:
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.iterdir())]).astype(float)


def read_mp4(file) -> np.ndarray:
    cv2 = pytest.importorskip("cv2")
    video, frames = cv2.VideoCapture(str(file)), []
    while (read := video.read())[0]:
        frames.append(read[1][..., ::-1])
    return np.stack(frames).astype(float)


def corners(clip: np.ndarray) -> list[tuple[int, int]]:
    """Return the first row and column of the one white digit on black in every frame."""
    lit = clip[..., 0] > 127
    return [(int(frame.any(1).argmax()), int(frame.any(0).argmax())) for frame in lit]


@pytest.fixture
def white_on_black(monkeypatch):
    monkeypatch.setattr(tool, "crop_background", lambda rng, regions, size: np.zeros((*size, 3)))
    monkeypatch.setattr(tool, "COLOUR", (255.0, 255.0))


@pytest.mark.parametrize("name", ["left", "right"])
def test_the_digit_moves_in_its_direction_and_stays_in_the_picture(name, white_on_black):
    rng = np.random.default_rng(5)
    recipe = tool.Recipe(**{**SMALL, "frames": 5, "directions": 2})
    for _ in range(10):
        clip = tool.compose(rng, [], digit_samples()[0], tool.DIRECTIONS[name], recipe)
        assert clip.shape == (5, 32, 48, 3)
        rows, columns = np.transpose(corners(clip))
        assert len(set(rows)) == 1
        steps = tool.DIRECTIONS[name][1] * np.diff(columns)
        assert all(3 <= step <= 5 for step in steps)
        assert max(steps) - min(steps) <= 1
        assert len({int((frame > 127).sum()) for frame in clip}) == 1


@pytest.mark.parametrize("directions", [2, 4])
def test_the_set_of_frames_does_not_tell_the_class(directions, white_on_black):
    """Unordered statistics of frames, of first and second degree, do not differ between classes; ordered ones do."""
    recipe = tool.Recipe(**{**SMALL, "frames": 4, "width": 32, "directions": directions})
    samples, count = np.ones((1, 8, 8)), 1200
    blind, ordered = {}, {}
    for number, name in enumerate(tool.CHOICES[directions]):
        rng = np.random.default_rng(number)
        clips = [tool.compose(rng, [], samples, tool.DIRECTIONS[name], recipe)[..., 0] / 255 for _ in range(count)]
        lit = np.stack(clips).reshape(count, 4, 4, 8, 4, 8).mean((3, 5)).reshape(count, 4, 16)
        mean = lit.mean(1)  # the average of the frames
        pairs = np.einsum("nti,ntj->nij", lit, lit).reshape(count, -1) / 4  # of single frames
        products = np.einsum("ni,nj->nij", mean, mean).reshape(count, -1)  # of the average
        blind[name] = np.concatenate([mean, pairs, products], 1)
        ordered[name] = lit.reshape(count, -1)
    names = list(blind)

    def apart(values, one, other) -> float:
        """Return the greatest difference of two classes' means, in its own standard deviations."""
        a, b = values[one], values[other]
        error = np.sqrt((a.var(0) + b.var(0)) / count) + 1e-9
        return float((np.abs(a.mean(0) - b.mean(0)) / error).max())

    for other in names[1:]:
        assert apart(blind, names[0], other) < 5  # over some 530 statistics
        assert apart(ordered, names[0], other) > 15


def test_videos_hold_the_frames(tmp_path):
    pytest.importorskip("cv2")
    tool.build(tmp_path / "png", tool.Recipe(**SMALL))
    tool.build(tmp_path / "mp4", tool.Recipe(**SMALL, format="mp4"))
    clips = sorted((tmp_path / "png").glob("*/*/*"))
    assert [clip.parent.name for clip in clips] == [*"down down left left right right up up".split(), *tool.DIRECTIONS]
    for clip in clips:
        expected = read_png(clip)
        decoded = read_mp4(tmp_path / "mp4" / clip.relative_to(tmp_path / "png").with_suffix(".mp4"))
        assert decoded.shape == expected.shape == (6, 32, 48, 3)
        assert np.abs(decoded - expected).mean() < 12  # of 255, because the codec is lossy
