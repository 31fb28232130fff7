"""Runs of ``tools.caption extract`` in shards: kills, other numbers of shards, other settings, merges."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attn_plugins.captioning.region_features import RegionFeatures
from tools.caption.__main__ import main
from tools.caption.shards import Shard
from tools.datasets.captioned_scenes import Recipe, build

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
OPTIONS = "--grid test_resnet --no-weights --size 64 --grid-size 3 --batch-size 3 --device cpu".split()
KILLED = """
import os, signal, sys
from tools.caption import grid_regions
from tools.caption.__main__ import main

class Killed(grid_regions.GridRegions):
    calls = 0
    def __call__(self, batch):
        Killed.calls += 1
        if Killed.calls == 3:
            assert not {"mmdet", "fairseq", "mmcv"} & set(sys.modules)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)

grid_regions.GridRegions = Killed
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Create 20 scenes, of which one is corrupt and one is missing."""
    folder = tmp_path_factory.mktemp("scenes") / "set"
    assert build(folder, Recipe(train=16, val=2, test=2, size=64, seed=1))
    (folder / "images/000005.jpg").write_text("no picture")
    (folder / "images/000014.jpg").unlink()
    return folder


@pytest.fixture(scope="module")
def expected(scenes, tmp_path_factory, one_thread) -> bytes:
    """Return the file that one process writes."""
    out = tmp_path_factory.mktemp("whole") / "regions.npz"
    assert extract(scenes, out) == 1
    assert RegionFeatures(out).image_ids == [n for n in range(1, 21) if n not in (5, 14)]
    assert [path.name for path in out.parent.iterdir()] == ["regions.npz"]
    return out.read_bytes()


def command(scenes: Path, out: Path, *options: str) -> list[str]:
    splits = str(scenes / "splits.json")
    return ["extract", str(scenes / "images"), str(out), "--splits", splits, *OPTIONS, *options]


def extract(scenes: Path, out: Path, *options: str) -> int:
    return main(command(scenes, out, *options))


def kill(scenes: Path, out: Path, *options: str) -> None:
    """Run the command in a process that is killed in its third batch."""
    words = [sys.executable, "-c", KILLED, *command(scenes, out, *options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert not out.exists()


def test_shards_write_what_one_process_writes(scenes, expected, tmp_path, capsys):
    out = tmp_path / "regions.npz"
    assert [extract(scenes, out, "--shard", f"{i}/3") for i in (2, 3)] == [1, 0]  # both bad ones are in shard 2
    assert "shard 3/3 is complete" in capsys.readouterr().out
    assert main(["merge", str(out)]) == 2
    assert "8 images (1, 2, 3, ...) left to do: run the shards" in capsys.readouterr().err
    assert not out.exists()
    assert extract(scenes, out, "--shard", "1/3") == 0
    assert main(["merge", str(out)]) == 1
    printed = capsys.readouterr()
    assert f"{out}: 18 images, 162 regions of " in printed.out
    assert "2 pictures were skipped:\n  image 5: cannot be read as a picture" in printed.err
    assert "  image 14: no such file\n" in printed.err
    assert out.read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["regions.npz"]
    assert main(["merge", str(out)]) == 2
    assert "already exists: --overwrite" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "other.npz")]) == 2
    assert "has no results to merge" in capsys.readouterr().err


def test_killed_shards_resume_with_any_number_of_them(scenes, expected, tmp_path, capsys):
    out = tmp_path / "regions.npz"
    kill(scenes, out, "--shard", "1/2")
    with (tmp_path / ".regions.npz.partial/1-of-2/features").open("ab") as file:
        file.write(b"half a picture")
    shutil.copytree(tmp_path / ".regions.npz.partial", tmp_path / ".again.npz.partial")
    for i in (1, 2, 3):
        extract(scenes, out, "--shard", f"{i}/3")
    assert "resuming after 6 of 20 pictures" in capsys.readouterr().out
    assert main(["merge", str(out)]) == 1
    assert out.read_bytes() == expected
    assert extract(scenes, tmp_path / "again.npz") == 1
    assert "resuming after 6 of 20 pictures" in capsys.readouterr().out
    assert (tmp_path / "again.npz").read_bytes() == expected


def test_other_settings_are_refused_until_restart(scenes, expected, tmp_path, capsys):
    out = tmp_path / "regions.npz"
    assert extract(scenes, out, "--shard", "1/2", "--seed", "1") == 1
    for options in ([], ["--shard", "2/2"]):
        assert extract(scenes, out, *options) == 2
        assert "1-of-2 is of an interrupted run with seed = 1, not 0: --restart discards it" in capsys.readouterr().err
    for i in (1, 2):
        assert extract(scenes, out, "--shard", f"{i}/2", "--restart") in (0, 1)
    assert main(["merge", str(out)]) == 1
    assert out.read_bytes() == expected
    assert extract(scenes, out) == 2
    assert "already exists: --overwrite replaces it" in capsys.readouterr().err
    assert extract(scenes, out, "--seed", "1", "--overwrite") == 1
    assert out.read_bytes() != expected


def test_a_shard_belongs_to_one_process(scenes, tmp_path, capsys):
    folder = tmp_path / ".regions.npz.partial"
    folder.mkdir()
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    words = [sys.executable, "-c", holder, str(folder / "1-of-1.lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert extract(scenes, tmp_path / "regions.npz") == 2
        other.communicate(b"\n")
    assert "another process runs shard 1/1 in" in capsys.readouterr().err
    assert extract(scenes, tmp_path / "regions.npz") == 1


@pytest.mark.parametrize("given", ["0/2", "3/2", "2", "a/b"])
def test_bad_shards_are_reported(given, scenes, tmp_path, capsys):
    with pytest.raises(SystemExit):
        extract(scenes, tmp_path / "regions.npz", "--shard", given)
    assert f"must be i/n with i from 1 to n, such as 2/8, got '{given}'" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [0, 2])
def test_shards_take_the_gpus_in_turn(gpus, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    devices = [Shard(i, 3).device(None) for i in (1, 2, 3)]
    assert devices == (["cuda:0", "cuda:1", "cuda:0"] if gpus else ["cpu"] * 3)
    assert Shard(2, 3).device("cuda:5") == "cuda:5"
