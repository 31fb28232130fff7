"""Commands of the data sets of pasted objects: reproducibility, messages, and protection of other files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("skimage")
pytest.importorskip("pycocotools")

from tools.datasets import digits_on_photographs, moving_digits

CLIPS = "--train 4 --val 2 --frames 6 --height 32 --width 48 --speed 0.1 0.15"
VIDEO = "train/right/000001.mp4"  # the digit of the second clip moves to the right
SETS = [  # options, what the command says, and one of the files
    (digits_on_photographs, "--train 2 --val 1", "2 training and 1 validation images", "semantic/train/000001.png"),
    (moving_digits, CLIPS, "4 training and 2 validation clips", "train/up/000003/005.png"),
    (moving_digits, f"{CLIPS} --format mp4 --directions 2", "4 training and 2 validation clips", VIDEO),
]
WRONG = [
    (digits_on_photographs, "--train 0", "train must be at least 1, got 0"),
    (digits_on_photographs, "--sides 9 40", "sides must be two rising numbers from 10 to 100 pixels, got (9, 40)"),
    (digits_on_photographs, "--sides 40 20", "sides must be two rising numbers from 10 to 100 pixels, got (40, 20)"),
    (digits_on_photographs, "--sides 20 101", "sides must be two rising numbers from 10 to 100 pixels, got (20, 101)"),
    (digits_on_photographs, "--turn 181", "turn must be between 0 and 180 degrees, got 181.0"),
    (digits_on_photographs, "--shear -0.1", "shear must be between 0 and 1 columns a row, got -0.1"),
    (moving_digits, "--train 0", "train must be at least 1, got 0"),
    (moving_digits, "--frames 1", "frames must be at least 2, got 1"),
    (moving_digits, "--height 33", "height must be even and at least 32 pixels, got 33"),
    (moving_digits, "--directions 3", "directions must be 2 or 4, got 3"),
    (moving_digits, "--speed 0.2 0.1", "speed must be two shares, 0 < least <= greatest <= 0.5, got 0.2 0.1"),
    (moving_digits, "--side 0.1 0.4", "side must be at least 6 pixels, got 0.1 of 32"),
    (moving_digits, "--format gif", "format must be one of png, mp4, got 'gif'"),
]


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(tool: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("tool", "options", "content", "file"), SETS)
def test_a_recipe_determines_the_bytes_and_other_files_are_kept(tool, options, content, file, tmp_path, capsys):
    if "mp4" in options:
        pytest.importorskip("cv2")
    for folder, seed, state in (("one", 3, "written to"), ("two", 3, "written to"), ("one", 3, "already in")):
        assert tool.main([str(tmp_path / folder), *options.split(), "--seed", str(seed)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"{content} {state} {tmp_path / folder}"
    before = files(tmp_path / "one")
    assert Path(file) in before
    assert files(tmp_path / "two") == before
    assert tool.main([str(tmp_path / "other"), *options.split(), "--seed", "4"]) == 0
    other = files(tmp_path / "other")
    assert other.keys() == before.keys()
    assert other[Path(file)] != before[Path(file)]
    capsys.readouterr()
    again = [str(tmp_path / "one"), *options.split(), "--seed", "4"]
    assert "holds a set of another recipe" in refusal(tool, again, capsys)
    assert files(tmp_path / "one") == before
    (tmp_path / "two/recipe.json").unlink()
    assert "exists already; remove it" in refusal(tool, [str(tmp_path / "two"), *options.split()], capsys)
    assert len(files(tmp_path / "two")) == len(before) - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other", "two"]


@pytest.mark.parametrize(("tool", "options", "message"), WRONG)
def test_options_are_checked(tool, options, message, tmp_path, capsys):
    name = tool.__name__.rpartition(".")[2]
    assert refusal(tool, [str(tmp_path / "set"), *options.split()], capsys) == f"{name}: {message}\n"
    assert not list(tmp_path.iterdir())
