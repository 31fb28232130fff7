"""Resumable runs over a list of pictures, whole or in shards that several processes or machines take.

A run has a hidden work folder beside its result, and in it a folder for each shard, such as ``2-of-8``: ``plan.json``,
all that the result depends on; ``images.jsonl``, a line ``[id, ...]`` for each finished picture; ``skipped.jsonl``, a
line ``[id, reason]`` for each that was left out; and files of the command. Shards do not communicate. A merge checks
that every picture was finished or left out, writes the result, and removes the work folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from attn_plugins.captioning.caption_files import ImageId
from attn_plugins.captioning.files import complete_lines
from tools import files
from tools.caption.lists import some

PLAN, RECORDS, SKIPPED = "plan.json", "images.jsonl", "skipped.jsonl"


@dataclass(frozen=True)
class Shard:
    """Shard ``index``, from 1, of ``count``."""

    index: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return this shard's items."""
        return items[self.index - 1 :: self.count]

    def device(self, given: str | None) -> str:
        """Return the device given, else a GPU for each shard in turn, else the CPU."""
        if given or not torch.cuda.is_available():
            return given or "cpu"
        return f"cuda:{(self.index - 1) % torch.cuda.device_count()}"


def shard(text: str) -> Shard:
    """Parse ``2/8``."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be i/n with i from 1 to n, such as 2/8, got {text!r}")
    return Shard(int(index), int(count))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every resumable run."""
    parser.add_argument(
        "--shard", type=shard, default=Shard(), metavar="i/n", help="only every n-th picture (batch), from the i-th"
    )
    parser.add_argument("--device", help="default: cuda where there is one (a GPU for each shard in turn), else cpu")
    parser.add_argument("--restart", action="store_true", help="discard the results of an interrupted run")


class Run:
    """One shard of a run; as a context, it resumes the shard and locks it against a second process.

    Args:
        folder: Work folder of the run.
        shard: The shard.
        plan: What shards must share to be merged, as JSON values: ``settings``, and ``images``, all ids in order.
        restart: Whether to discard what an interrupted run left, except by other shards of the same run.

    Attributes:
        part: Folder of the shard.
        done: Ids of pictures finished by any shard, as text.
        skipped: Number of pictures that this shard has left out.
    """

    def __init__(self, folder: Path, shard: Shard, plan: Mapping[str, Any], restart: bool = False) -> None:
        self.folder, self.shard, self.restart = folder, shard, restart
        self.plan: dict[str, Any] = json.loads(json.dumps(plan))
        self.part = folder / f"{shard.index}-of-{shard.count}"
        self.done: set[str] = set()
        self.skipped = 0

    def __enter__(self) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / f"{self.part.name}.lock").open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise ValueError(f"another process runs shard {self.shard} in {self.folder}") from error
        except OSError:  # a file system without locks
            pass
        siblings = {part for part in _parts(self.folder) if part.name.endswith(f"-of-{self.shard.count}")} - {self.part}
        for part in _parts(self.folder):
            other = _difference(part, self.plan)
            if other and not self.restart and complete_lines(part / RECORDS):
                raise ValueError(f"{part} is of an interrupted run with {other}: --restart discards it")
            if other or (self.restart and part not in siblings):
                _remove(part)
        self.part.mkdir(exist_ok=True)
        files.write_text(self.part / PLAN, json.dumps(self.plan))
        (self.part / SKIPPED).unlink(missing_ok=True)  # tried again
        for half in self.part.glob(".*.partial-*"):
            half.unlink()
        parts = _parts(self.folder)
        self.done = _ids(parts)
        if before := _ids([part for part in parts if part not in siblings]):
            print(f"resuming after {len(before)} of {len(self.plan['images'])} pictures", flush=True)
        return self

    def records(self) -> IO[str]:
        """Open ``images.jsonl`` to append to its complete lines, for commands that do not write it otherwise."""
        path = self.part / RECORDS
        path.touch()
        os.truncate(path, sum(map(len, complete_lines(path))))
        return path.open("a", buffering=1)

    def skip(self, image_id: ImageId, reason: str) -> None:
        """Record that a picture is left out; a later run tries it again."""
        self.skipped += 1
        with (self.part / SKIPPED).open("a") as file:
            file.write(json.dumps([image_id, reason]) + "\n")

    def __exit__(self, kind: object, *error: object) -> None:
        """Release the shard; remove what failed before any result."""
        self._lock.close()
        if kind is not None and not complete_lines(self.part / RECORDS):
            _remove(self.part)
            (self.folder / f"{self.part.name}.lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other shards are there
                self.folder.rmdir()


def end(run: Run, out: Path, merge_all: Callable[[], int]) -> int:
    """Merge a run of one shard, or print how to merge several; return the exit code."""
    if run.shard.count == 1:
        return merge_all()
    print(f"shard {run.shard} is complete; when all are: python -m tools.caption merge {out}")
    return int(run.skipped > 0)


def merge(folder: Path, save: Callable[[list[Path], dict[str, Any]], None]) -> int:
    """Write the result of all shards and remove the work folder; list the pictures left out, and return the exit code.

    ``save`` writes the result of the shards' folders, by their common plan.

    Raises:
        ValueError: there are no shards, their plans differ, or a picture is neither finished nor left out.
    """
    parts = [part for part in _parts(folder) if complete_lines(part / RECORDS) or complete_lines(part / SKIPPED)]
    if not parts:
        raise ValueError(f"{folder} has no results to merge")
    plan = json.loads((parts[0] / PLAN).read_text())
    for part in parts:
        if other := _difference(part, plan):
            raise ValueError(f"{part} cannot be merged with {parts[0]}, it has {other}: remove one of the two")
    done = _ids(parts)
    skipped = {str(i): why for part in parts for i, why in map(json.loads, complete_lines(part / SKIPPED))}
    if left := [i for i in plan["images"] if str(i) not in done and str(i) not in skipped]:
        raise ValueError(f"{folder}: {some(left)} left to do: run the shards that are not finished")
    save(parts, plan)
    shutil.rmtree(folder, ignore_errors=True)
    if out := [str(i) for i in plan["images"] if str(i) in skipped.keys() - done]:
        lines = [f"  image {i}: {skipped[i]}" for i in out]
        print("\n".join([f"{len(out)} pictures were skipped:", *lines]), file=sys.stderr)
    return 1 if out else 0


def _parts(folder: Path) -> list[Path]:
    """Return the folders of all shards, also of other runs in the same work folder."""
    parts = [part for part in folder.glob("*-of-*") if (part / PLAN).is_file()]
    return sorted(parts, key=lambda part: [int(number) for number in part.name.split("-of-")])


def _remove(part: Path) -> None:
    (part / RECORDS).unlink(missing_ok=True)  # first, so that nothing else counts after an interruption
    shutil.rmtree(part, ignore_errors=True)


def _ids(parts: list[Path]) -> set[str]:
    """Return the ids of finished pictures, as text."""
    return {str(json.loads(line)[0]) for part in parts for line in complete_lines(part / RECORDS)}


def _difference(part: Path, plan: Mapping[str, Any]) -> str:
    """Describe the first setting of a shard that differs from the plan; an empty text if there is none."""
    try:
        theirs = json.loads((part / PLAN).read_text())
    except FileNotFoundError:  # another shard has just removed it
        return ""
    for name in {**plan["settings"], **theirs["settings"]}:
        before, now = (settings.get(name) for settings in (theirs["settings"], plan["settings"]))
        if before != now:
            return f"another {name}" if name.startswith("content") else f"{name} = {before!r}, not {now!r}"
    return "" if theirs["images"] == plan["images"] else "other pictures"
