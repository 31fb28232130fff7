"""Runs shared by several processes, simulated without networks: kills, second runs, waiting."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.captioning import shared_run
from tools.captioning.processes import Process
from tools.captioning.shared_run import SharedRun

ROOT = Path(__file__).parents[2]
WORKER = """
import sys, time
from pathlib import Path
import numpy as np
from attn_plugins.captioning.region_features import RegionFeaturesWriter
from attn_plugins.captioning.region_parts import RegionParts, read_index
from tools.captioning import shared_run
from tools.captioning.processes import this_process

out, pause, patience, setting = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
shared_run.PATIENCE, shared_run.BEGIN = patience, float(sys.argv[5])
NUMBER = 30

def left(parts):
    done = {i for part in parts for i in read_index(part).image_ids}
    print("left", NUMBER - len(done), flush=True)
    return [i for i in range(NUMBER) if i not in done]

def regions(i):
    draw = np.random.default_rng(i)
    n = i % 4
    return dict(features=draw.normal(size=(n, 6)), boxes=np.tile([0, 0, 1, 1], (n, 1)), scores=draw.random(n))

try:
    with shared_run.SharedRun(out.with_suffix(".partial"), this_process(), dict(setting=setting)) as run:
        run.begin(left)
        with RegionFeaturesWriter(run.part, "float32") as writer:
            for i in run.left:
                time.sleep(pause)
                run.check()
                while len(writer.image_ids) == 2 and out.with_suffix(".hold").exists():
                    run.check()
                    time.sleep(0.01)
                run.skip(i, "odd") if i == 5 else writer.append(i, regions(i))
        if run.finish():
            assert run.count() == (NUMBER - 1, 1), run.count()
            assert run.skipped() == [(5, "odd")], run.skipped()
            run.make(out, RegionParts(run.parts, list(range(NUMBER))).save)
            run.remove()
except ValueError as error:
    sys.exit(str(error))
"""


def start(
    out: Path, number: int, pause: float = 0, patience: float = 300, setting: str = "x", begin: float = 900
) -> list[subprocess.Popen[str]]:
    """Start ``number`` processes of a run."""
    made = []
    for rank in range(number):
        own = dict(RANK=str(rank), WORLD_SIZE=str(number), LOCAL_RANK=str(rank))
        command = [sys.executable, "-c", WORKER, str(out), str(pause), str(patience), setting, str(begin)]
        made.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return made


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return exit codes and messages."""
    return [(process.returncode, errors) for process in processes for _, errors in [process.communicate()]]


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> bytes:
    """Return the file that a single process writes."""
    out = tmp_path_factory.mktemp("one") / "regions.npz"
    assert ends(start(out, 1)) == [(0, "")]
    assert [path.name for path in out.parent.iterdir()] == ["regions.npz"]
    return out.read_bytes()


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_with_any_number_of_processes(seed, expected, tmp_path):
    draw, out = random.Random(seed), tmp_path / "regions.npz"
    for _ in range(4):
        processes = start(out, draw.randint(1, 3), pause=draw.choice([0.01, 0.05]), begin=2)
        time.sleep(draw.uniform(0.1, 1))
        for process in draw.choice([processes, processes[:1], processes[-1:]]):
            process.kill()
        ends(processes)
    out.unlink(missing_ok=True)
    assert ends(start(out, 2)) == [(0, "")] * 2
    assert out.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [out]


def held_up(out: Path, number: int) -> list[subprocess.Popen[str]]:
    """Start processes that all keep working until the file ``hold`` is deleted."""
    out.with_suffix(".hold").touch()
    processes = start(out, number)
    parts = out.with_suffix(".partial")
    wait_for(lambda: sum(path.stat().st_size > 0 for path in parts.glob("part-*/images.jsonl")) == number)
    return processes


def test_a_second_run_names_the_first(expected, tmp_path):
    out = tmp_path / "regions.npz"
    first = held_up(out, 2)
    for setting in ("x", "y"):
        second = start(out, 1, patience=0.1, setting=setting)
        message = f"another run, or a process of an interrupted one, is active in {tmp_path / 'regions.partial'}\n"
        assert ends(second) == [(1, message)]
    others = (1, f"another run is active in {tmp_path / 'regions.partial'}\n")
    assert ends(start(out, 3, patience=0.1)) == [(1, message), others, others]
    out.with_suffix(".hold").unlink()
    assert ends(first) == [(0, "")] * 2
    assert out.read_bytes() == expected


def test_the_others_end_when_process_0_is_killed_and_a_new_run_waits_for_that(expected, tmp_path):
    out = tmp_path / "regions.npz"
    first = held_up(out, 3)
    first[0].kill()
    second = start(out, 1)
    told = "process 0 of 3 has ended: run the same command to resume\n"
    assert ends(first) == [(-signal.SIGKILL, ""), (1, told), (1, told)]
    out.with_suffix(".hold").unlink()
    assert ends(second) == [(0, "")]
    assert out.read_bytes() == expected


def test_process_0_ends_when_another_is_killed(expected, tmp_path):
    out = tmp_path / "regions.npz"
    first = held_up(out, 2)
    first[1].kill()
    out.with_suffix(".hold").unlink()
    told = "process 1 of 2 has ended before its part was complete: run the same command to resume\n"
    assert ends(first) == [(1, told), (-signal.SIGKILL, "")]
    assert not out.exists()
    [other] = start(out, 1, setting="y")
    assert "interrupted run with setting = 'x', not 'y': --restart discards it" in ends([other])[0][1]
    assert ends(start(out, 1)) == [(0, "")]
    assert out.read_bytes() == expected


def test_a_process_that_waits_in_vain_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_run, "BEGIN", 0.2)
    with pytest.raises(ValueError, match=r"process 0 of 2 has not started within 0 seconds"):
        SharedRun(tmp_path / "run", Process(1, 2, 1), {}).begin(lambda parts: [])
    with SharedRun(tmp_path, Process(0, 2), {}) as alone:
        alone.begin(lambda parts: [])
        with pytest.raises(ValueError, match=r"process 1 of 2 has not started"):
            alone.finish()
