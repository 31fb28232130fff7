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


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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


@pytest.mark.parametrize("kind", tool.FORMATS)
def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path, kind):
    if kind == "mp4":
        pytest.importorskip("cv2")
    recipe = tool.Recipe(**SMALL, format=kind, seed=3)
    assert tool.build(tmp_path / "one", recipe)
    assert tool.build(tmp_path / "two", recipe)
    assert not tool.build(tmp_path / "two", recipe)  # the file stores the recipe's pairs as lists
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert tool.build(tmp_path / "other", tool.Recipe(**SMALL, format=kind, seed=4))
    assert files(tmp_path / "one").keys() == files(tmp_path / "other").keys()
    assert files(tmp_path / "one") != files(tmp_path / "other")
    for split, count in (("train", 2), ("val", 1)):
        classes = sorted((tmp_path / "one" / split).iterdir())
        assert [path.name for path in classes] == ["down", "left", "right", "up"]
        assert all(len(list(path.iterdir())) == count for path in classes)


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
    assert len(clips) == 12
    for clip in clips:
        expected = read_png(clip)
        decoded = read_mp4(tmp_path / "mp4" / clip.relative_to(tmp_path / "png").with_suffix(".mp4"))
        assert decoded.shape == expected.shape == (6, 32, 48, 3)
        assert np.abs(decoded - expected).mean() < 12  # of 255, because the codec is lossy


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--train", "0"], "train must be at least 1, got 0"),
        (["--frames", "1"], "frames must be at least 2, got 1"),
        (["--height", "33"], "height must be even and at least 32 pixels, got 33"),
        (["--directions", "3"], "directions must be 2 or 4, got 3"),
        (["--speed", "0.2", "0.1"], "speed must be two shares, 0 < least <= greatest <= 0.5, got 0.2 0.1"),
        (["--side", "0.1", "0.4"], "side must be at least 6 pixels, got 0.1 of 32"),
        (["--format", "gif"], "format must be one of png, mp4, got 'gif'"),
    ],
)
def test_errors(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        tool.main([str(tmp_path / "set"), *arguments])
    assert error.value.code == 2
    assert capsys.readouterr().err == f"moving_digits: {message}\n"
    assert not (tmp_path / "set").exists()


def test_the_command(tmp_path, capsys):
    arguments = [str(tmp_path / "set"), "--train", "4", "--val", "4", "--width", "48", "--directions", "2"]
    for state in ("written to", "already in"):
        assert tool.main(arguments) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"4 training and 4 validation clips {state} {tmp_path}/set"
    assert sorted(path.name for path in (tmp_path / "set/train").iterdir()) == ["left", "right"]
