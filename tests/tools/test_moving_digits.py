"""Clips of digits that move over photographs."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("sklearn")
pytest.importorskip("skimage")

from tools.datasets import moving_digits as tool

SMALL = dict(train=8, val=4, frames=6, height=32, width=48)


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


def seen_direction(frames: np.ndarray) -> str:
    """By which shift of one frame's difference from the background the next frame is explained best."""
    digits = np.abs(frames - np.median(frames, 0)).sum(-1)
    errors = {}
    for name, step in tool.DIRECTIONS.items():
        shifts = [np.roll(digits[:-1], [n * part for part in step], (1, 2)) for n in range(1, 8)]
        errors[name] = min(np.abs(shifted - digits[1:]).sum() for shifted in shifts)
    return min(errors, key=errors.get)


@pytest.mark.parametrize("kind", tool.FORMATS)
def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path, kind):
    if kind == "mp4":
        pytest.importorskip("cv2")
    recipe = tool.Recipe(**SMALL, format=kind, seed=3)
    assert tool.build(tmp_path / "one", recipe)
    assert tool.build(tmp_path / "two", recipe)
    assert not tool.build(tmp_path / "two", recipe)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert tool.build(tmp_path / "other", tool.Recipe(**SMALL, format=kind, seed=4))
    assert files(tmp_path / "one").keys() == files(tmp_path / "other").keys()
    assert files(tmp_path / "one") != files(tmp_path / "other")
    for split, count in (("train", 2), ("val", 1)):
        classes = sorted((tmp_path / "one" / split).iterdir())
        assert [path.name for path in classes] == ["down", "left", "right", "up"]
        assert all(len(list(path.iterdir())) == count for path in classes)


@pytest.mark.parametrize("name", tool.DIRECTIONS)
def test_digits_move_in_their_direction(name):
    rng = np.random.default_rng(5)
    samples, _ = tool.digit_samples()
    recipe = tool.Recipe(**{**SMALL, "frames": 12, "height": 64, "width": 96})
    seen = []
    for _ in range(10):
        clip = tool.compose(rng, tool.photographs(), samples, tool.DIRECTIONS[name], recipe)
        assert clip.shape == (12, 64, 96, 3)
        seen.append(seen_direction(clip.astype(float)))
    assert seen.count(name) >= 8


def test_no_frame_tells_the_class(monkeypatch):
    """A digit's place in any frame has the same distribution for every direction."""
    monkeypatch.setattr(tool, "crop_background", lambda rng, regions, size: np.zeros((*size, 3)))
    monkeypatch.setattr(tool, "contrasting_colour", lambda rng, below: np.full(3, 255.0))
    monkeypatch.setattr(tool, "DIGITS", (1, 1))
    recipe, samples = tool.Recipe(**SMALL), np.ones((1, 8, 8))
    for direction in tool.DIRECTIONS.values():
        rng = np.random.default_rng(0)
        clips = np.stack([tool.compose(rng, [], samples, direction, recipe)[..., 0] for _ in range(400)])
        shown = clips.mean(0) / clips.mean()  # of each frame, how often each pixel is covered
        assert abs(shown - 1).max() < 0.45
        assert abs(shown.mean((1, 2)) - 1).max() < 0.02
        halves = shown[:, :, :24].mean((1, 2)), shown[:, :16].mean((1, 2))
        assert all(abs(half - 1).max() < 0.12 for half in halves)


def test_videos_hold_the_frames(tmp_path):
    pytest.importorskip("cv2")
    tool.build(tmp_path / "png", tool.Recipe(**SMALL))
    tool.build(tmp_path / "mp4", tool.Recipe(**SMALL, format="mp4"))
    clips = sorted((tmp_path / "png").glob("*/*/*"))
    assert len(clips) == 12
    for clip in clips:
        expected = read_png(clip)
        found = read_mp4(tmp_path / "mp4" / clip.relative_to(tmp_path / "png").with_suffix(".mp4"))
        assert found.shape == expected.shape == (6, 32, 48, 3)
        assert np.abs(found - expected).mean() < 12  # of 255: the codec is lossy


def test_train_and_val_share_no_digit_and_no_pixel(monkeypatch, tmp_path):
    given = []
    real = tool.compose

    def compose(rng, regions, samples, direction, recipe):
        given.append((regions, samples))
        return real(rng, regions, samples, direction, recipe)

    monkeypatch.setattr(tool, "compose", compose)
    tool.build(tmp_path / "set", tool.Recipe(**SMALL))
    (train, digits), (val, others) = given[0], given[-1]
    assert len(digits) + len(others) == 1797
    whole = tool.photographs()
    for one, other, photograph in zip(train, val, whole):
        assert one.shape[1] + other.shape[1] < photograph.shape[1]
        assert np.shares_memory(one, photograph) or photograph.base is None
        assert np.array_equal(one, photograph[:, : one.shape[1]])
        assert np.array_equal(other, photograph[:, -other.shape[1] :])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--train", "0"], "train must be at least 1, got 0"),
        (["--frames", "1"], "frames must be at least 2, got 1"),
        (["--height", "33"], "height must be even and at least 32 pixels, got 33"),
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
    arguments = [str(tmp_path / "set"), "--train", "4", "--val", "4", "--height", "32", "--width", "48"]
    for state in ("written to", "already in"):
        assert tool.main(arguments) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"4 training and 4 validation clips {state} {tmp_path}/set"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path / "mine"), *arguments[1:]])
    assert "holds other files" in capsys.readouterr().err
