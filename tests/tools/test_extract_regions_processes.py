"""Region features by several processes: a single file, however the processes end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tests.tools.test_extract_regions import GRID, ROOT, run
from tools.captioning.processes import BadEnvironment, Process, device_of, this_process
from tools.captioning.shared_run import SharedRun
from tools.datasets.captioned_scenes import Recipe, build
from tools.pictures import open_picture

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = [*GRID, "--batch-size", "3", "--device", "cpu"]


# --- torchrun ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def scenes(tmp_path) -> Path:
    """Create 20 scenes, of which one is corrupt and one is missing."""
    folder = tmp_path / "set"
    assert build(folder, Recipe(train=16, val=2, test=2, size=64, seed=1))
    (folder / "images/000005.jpg").write_text("no picture")
    (folder / "images/000014.jpg").unlink()
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(number: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number, *arguments]
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )


KILLED = """
import os, signal, sys
from tools.captioning import extract_regions, grid_regions

class Killed(grid_regions.GridRegions):
    calls = 0
    def __call__(self, batch):
        Killed.calls += 1
        if Killed.calls == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)

grid_regions.GridRegions = Killed
sys.exit(extract_regions.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_process_and_another_number_of_them_give_the_file_of_one(scenes, tmp_path, capsys):
    (tmp_path / "killed.py").write_text(KILLED)
    out, splits = tmp_path / "regions.npz", scenes / "splits.json"
    command = [scenes / "images", out, *OPTIONS, "--splits", splits]
    ended = torchrun(2, tmp_path / "killed.py", *command)
    assert ended.returncode != 0
    assert not out.exists()
    assert len(list((tmp_path / ".regions.npz.partial").glob("part-*"))) == 2
    shutil.copytree(tmp_path / ".regions.npz.partial", tmp_path / ".again.npz.partial")

    ended = torchrun(3, "-m", "tools.captioning.extract_regions", *command)
    assert ended.returncode == 1, ended.stderr
    assert "resuming after " in ended.stdout
    assert "20/20 images" in ended.stdout
    assert f"{out}: 18 images, 162 regions of " in ended.stdout
    for image, what in (("000005.jpg (image 5)", "cannot be read as a picture"), ("000014.jpg (image 14)", "no such")):
        assert ended.stderr.count(f"{image}: {what}") == 1
    assert ended.stderr.count("2 pictures were skipped:\n  image 5: cannot be read as a picture") == 1
    assert ended.stderr.count("  image 14: no such file\n") == 1

    one = tmp_path / "one.npz"
    assert run(scenes, one, *OPTIONS) == 1
    assert "resuming" not in capsys.readouterr().out
    assert out.read_bytes() == one.read_bytes()
    assert RegionFeatures(out).image_ids == [n for n in range(1, 21) if n not in (5, 14)]
    assert run(scenes, tmp_path / "again.npz", *OPTIONS) == 1
    assert "resuming after " in capsys.readouterr().out
    assert (tmp_path / "again.npz").read_bytes() == one.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"set", "killed.py", "regions.npz", "one.npz", "again.npz"}


HELD_UP = """
import os, sys, time
from pathlib import Path
from tools.captioning import extract_regions, grid_regions

class HeldUp(grid_regions.GridRegions):
    calls = 0
    def __call__(self, batch):
        HeldUp.calls += 1
        if HeldUp.calls == 3:
            Path(sys.argv[-1], f"{os.getpid()}.pid").touch()
            time.sleep(3600)
        return super().__call__(batch)

grid_regions.GridRegions = HeldUp
sys.exit(extract_regions.main(sys.argv[1:-1]))
"""


@pytest.mark.slow
def test_torchrun_and_all_its_processes_killed(scenes, tmp_path):
    (tmp_path / "held_up.py").write_text(HELD_UP)
    (tmp_path / "pids").mkdir()
    out = tmp_path / "regions.lmdb"
    pytest.importorskip("lmdb")
    command = [scenes / "images", out, *OPTIONS, "--splits", scenes / "splits.json"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += map(str, [tmp_path / "held_up.py", *command, tmp_path / "pids"])
    with subprocess.Popen(launch, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL) as launched:
        while len(pids := [int(path.stem) for path in (tmp_path / "pids").iterdir()]) < 2:
            assert launched.poll() is None
            time.sleep(0.1)
        launched.kill()
    second = torchrun(2, "-m", "tools.captioning.extract_regions", *command)  # the processes are still alive
    assert second.returncode != 0
    assert "another run, or a process of an interrupted one, is active in" in second.stderr
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert torchrun(2, "-m", "tools.captioning.extract_regions", *command).returncode == 1
    assert run(scenes, tmp_path / "one.lmdb", *OPTIONS) == 1
    assert out.read_bytes() == (tmp_path / "one.lmdb").read_bytes()
    assert not (tmp_path / ".regions.lmdb.partial").exists()


# --- interruptions in one process ------------------------------------------------------------------------------------


def test_ended_between_the_file_and_the_folder(scenes, tmp_path, monkeypatch, capsys):
    """The file is complete, and running the same command again is no error."""
    out = tmp_path / "regions.npz"

    def ended(self: SharedRun) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SharedRun, "remove", ended)
        with pytest.raises(KeyboardInterrupt):
            run(scenes, out, *OPTIONS)
    content = out.read_bytes()
    assert run(scenes, out, *OPTIONS) == 1
    assert out.read_bytes() == content
    assert not (tmp_path / ".regions.npz.partial").exists()
    assert run(scenes, out, *OPTIONS) == 2
    assert "already exists: --overwrite" in capsys.readouterr().err


def test_a_file_that_was_half_written_goes(scenes, tmp_path, monkeypatch):
    out, seen = tmp_path / "regions.npz", []

    def killed(self: SharedRun, out: Path, save: object) -> None:
        seen.extend(self.folder.glob("**/.*.partial-*"))
        (self.folder / ".regions.partial-1-abc.npz").write_bytes(b"half")
        (self.part / ".000001.partial-1-abc.png").write_bytes(b"half")
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(SharedRun, "make", killed)
            with pytest.raises(KeyboardInterrupt):
                run(scenes, out, *OPTIONS)
    assert seen == []
    assert run(scenes, out, *OPTIONS) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"set", "regions.npz"}


def test_a_file_of_another_run_stays(scenes, tmp_path, monkeypatch, capsys):
    """This also holds if an interrupted run has started beside it."""
    out = tmp_path / "regions.npz"

    def ended(self: SharedRun, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SharedRun, "make", ended)
        with pytest.raises(KeyboardInterrupt):
            run(scenes, out, *OPTIONS)
    image = dict(features=np.ones((1, 2)), boxes=np.array([[0, 0, 1, 1]]), scores=np.ones(1))
    write_region_features(out, [(1, image)])
    content = out.read_bytes()
    assert run(scenes, out, *OPTIONS) == 2
    assert "already exists: --overwrite" in capsys.readouterr().err
    assert out.read_bytes() == content
    assert run(scenes, out, *OPTIONS, "--overwrite") == 1
    assert "resuming after 18 of 20 images" in capsys.readouterr().out


def test_a_failing_picture_is_skipped_and_a_failing_network_is_reported(scenes, tmp_path, capsys, monkeypatch):
    from tools.captioning.grid_regions import GridRegions

    network = GridRegions.__call__
    odd = GridRegions("test_resnet", 3, "none", size=(64, 64)).prepare(open_picture(scenes / "images/000001.jpg"))

    def fails(self, batch):
        if any(torch.equal(one, odd) for one in batch):
            raise RuntimeError("too odd")
        return network(self, batch)

    monkeypatch.setattr(GridRegions, "__call__", fails)
    assert run(scenes, tmp_path / "regions.npz", *OPTIONS) == 1
    assert "image 1: RuntimeError: too odd" in capsys.readouterr().err
    assert RegionFeatures(tmp_path / "regions.npz").image_ids[:3] == [2, 3, 4]

    def broken(self, batch):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(GridRegions, "__call__", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        run(scenes, tmp_path / "other.npz", *OPTIONS)
    assert not (tmp_path / ".other.npz.partial").exists()


# --- which process ----------------------------------------------------------------------------------------------------


def test_the_environment_gives_the_rank():
    assert this_process({}) == Process(0, 1, 0)
    assert this_process({"OTHER": "3"}).note == ""
    process = this_process(dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1"))
    assert process == Process(5, 8, 1)
    assert process.note == " (process 5 of 8)"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (dict(RANK="0"), "the environment has RANK=0 but no WORLD_SIZE and no LOCAL_RANK: torchrun sets all three"),
        (dict(WORLD_SIZE="2", LOCAL_RANK="0"), "has WORLD_SIZE=2, LOCAL_RANK=0 but no RANK"),
        (dict(RANK="one", WORLD_SIZE="2", LOCAL_RANK="0"), "RANK must be a number from 0, got 'one'"),
        (dict(RANK="-1", WORLD_SIZE="2", LOCAL_RANK="0"), "RANK must be a number from 0, got '-1'"),
        (dict(RANK="2", WORLD_SIZE="2", LOCAL_RANK="0"), "RANK must be below WORLD_SIZE, .*got RANK=2, WORLD_SIZE=2"),
        (dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="1"), "LOCAL_RANK not above RANK, got RANK=0, .*LOCAL_RANK=1"),
    ],
)
def test_a_bad_environment_is_reported(environment, message, scenes, tmp_path, monkeypatch, capsys):
    with pytest.raises(BadEnvironment, match=message):
        this_process(environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(scenes, tmp_path / "regions.npz", *OPTIONS) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("extract_regions: ")


def test_every_process_has_its_own_gpu():
    gpus = torch.cuda.device_count()
    with pytest.raises(BadEnvironment, match=f"LOCAL_RANK is {gpus}, but there are {gpus} GPUs: one process a GPU"):
        device_of(Process(gpus, gpus + 2, gpus), "cuda")
    assert device_of(Process(gpus, gpus + 2, gpus), "cpu") == "cpu"
    assert device_of(Process(), "cuda") == "cuda"


@pytest.mark.cuda
def test_the_gpu_is_that_of_the_local_rank():
    assert device_of(Process(2, 4, 0), "cuda") == device_of(Process(2, 4, 0), None) == "cuda:0"
    assert torch.cuda.current_device() == 0
