"""A resumable run of one process or several over a list of pictures.

Each process writes to a folder of its own, ``part-0``, ``part-1``, ..., inside the run's folder. A part holds the
tool's files, a line in ``images.jsonl`` for each finished picture, and one in ``skipped.jsonl`` for each that was
left out. Process 0 reads all parts, plans the remaining work, waits for the other processes and merges all parts into
one result. The result depends neither on the number of processes nor on interruptions.

Processes detect each other by locks on bytes of the file ``lock``. The kernel drops a lock when its process ends, so a
killed run leaves no stale state. No process group, port or run id is needed.

======== ==================================================
byte     held by
======== ==================================================
0        process 0, from start to end
1        process 0, from its plan to its result
2 + 2r   process r, while it may write to its part
3 + 2r   process r, once its part is complete
======== ==================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from attn_plugins.captioning.files import complete_lines
from tools import files
from tools.captioning.byte_locks import PAUSE, ByteLocks
from tools.captioning.json_files import BadFile
from tools.captioning.processes import Process

RECORDS, SKIPPED = "images.jsonl", "skipped.jsonl"
RUN, READY, PARTS = 0, 1, 2
PATIENCE = 10.0  # seconds until a killed process is gone
BEGIN = 3600.0  # seconds within which all processes must start


class SharedRun:
    """One process' view of a run.

    Args:
        folder: Folder of the run.
        process: This process.
        settings: All that the result depends on, as JSON values; a run with other settings is not resumed.
        restart: Whether to discard the results of an interrupted run.
    """

    def __init__(self, folder: Path, process: Process, settings: Mapping[str, Any], restart: bool = False) -> None:
        self.folder, self.process, self.restart = folder, process, restart
        self.settings = json.loads(json.dumps(settings))
        self.part = folder / f"part-{process.rank}"
        self.left: list[int] = []
        self._counts: dict[Path, tuple[int, int]] = {}
        self._locks: ByteLocks | None = None
        self._token = ""
        self._records: IO[str] | None = None

    def begin(self, left: Callable[[list[Path]], Sequence[int]], check: Callable[[], None] = lambda: None) -> None:
        """Take this process's share of the remaining work.

        Args:
            left: Maps the folders of the parts to the numbers of unfinished items. Called only by process 0.
            check: Raises if the result must not be written. Called only by process 0, before anything is changed.

        Raises:
            BadFile: another run is active in the folder, an interrupted one had other settings, or process 0 does not
                start.
        """
        if self.process.rank == 0:
            self._locks = self._lead()
            check()
            self._prepare()
            numbers = list(left(self.parts))
            plan = dict(processes=self.process.number, settings=self.settings, left=numbers)
            plan["token"] = secrets.token_hex(8)
            files.write_text(self.folder / "plan.json", json.dumps(plan))
            free = self._locks.hold(READY, PATIENCE)
        else:
            self._locks = self._follow()
            plan = json.loads((self.folder / "plan.json").read_text())
            free = (plan["processes"], plan["settings"]) == (self.process.number, self.settings)
        if not free or not self._locks.hold(self._byte(self.process.rank), PATIENCE):
            raise BadFile(f"another run is active in {self.folder}")
        self.part.mkdir(exist_ok=True)
        self._token = plan["token"]
        files.write_text(self.part / "begun", self._token)
        self.left = plan["left"][self.process.rank :: self.process.number]

    def _byte(self, rank: int) -> int:
        return PARTS + 2 * rank

    def _lead(self) -> ByteLocks:
        """Return the folder's locks as process 0, when no other run holds any."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                locks = ByteLocks(self.folder / "lock", create=True, needed=self.process.number > 1)
            except FileNotFoundError:  # a finishing run removes its folder
                continue
            try:
                until = time.monotonic() + PATIENCE
                free = locks.hold(RUN, PATIENCE)
                while free and locks.held(PARTS, 0) and (free := time.monotonic() < until):
                    time.sleep(PAUSE)
            except OSError as error:
                locks.close()
                raise BadFile(f"{locks.path} cannot be locked: {error.strerror}") from error
            if not free:
                locks.close()
                raise BadFile(f"another run, or a process of an interrupted one, is active in {self.folder}")
            if not locks.removed:
                return locks
            locks.close()

    def _follow(self) -> ByteLocks:
        """Return the locks as another process, when process 0 has planned the work."""
        until = time.monotonic() + BEGIN
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                locks = ByteLocks(self.folder / "lock")
                if locks.held(READY) and not locks.removed:
                    return locks
                locks.close()
            time.sleep(PAUSE)
        raise BadFile(f"process 0 of {self.process.number} has not started within {BEGIN:.0f} seconds")

    def _prepare(self) -> None:
        """Remove what must not be reused, as process 0 alone in the folder."""
        file, before = self.folder / "settings.json", {}
        if file.is_file():
            before = json.loads(file.read_text())
        if before != self.settings or self.restart:
            if not self.restart and any(complete_lines(part / RECORDS) for part in self.parts):
                raise BadFile(
                    f"{self.folder} belongs to an interrupted run with {self._other(before)}: --restart discards it"
                )
            self._forget()
            files.write_text(file, json.dumps(self.settings))
        for part in self.parts:
            (part / SKIPPED).unlink(missing_ok=True)
        for partial in self.folder.glob("**/.*.partial-*"):
            partial.unlink()

    def _other(self, before: Mapping[str, Any]) -> str:
        """Describe the first setting that differs."""
        for name, value in self.settings.items():
            if before.get(name) == value:
                continue
            if name == "images":
                return "other images"
            if name.startswith("content"):
                return f"another {name}"
            return f"{name} = {before.get(name)!r}, not {value!r}"
        return f"{', '.join(sorted(set(before) - set(self.settings)))}, which this one lacks"

    def _forget(self) -> None:
        for part in self.parts:
            (part / RECORDS).unlink(missing_ok=True)  # first, so that nothing else counts after an interruption
            shutil.rmtree(part)

    @property
    def parts(self) -> list[Path]:
        """Return the folders of all parts, including those of processes that this run does not have."""
        return sorted(self.folder.glob("part-*"), key=lambda part: int(part.name[5:]))

    def record(self, row: Any) -> None:
        """Add a line to ``images.jsonl``, for tools that do not record pictures in their own files."""
        if self._records is None:
            file = self.part / RECORDS
            file.touch()
            os.truncate(file, sum(map(len, complete_lines(file))))
            self._records = file.open("a")
        self._records.write(json.dumps(row) + "\n")
        self._records.flush()

    def skip(self, number: int, reason: str) -> None:
        """Record that an item is left out; a later run tries it again."""
        with (self.part / SKIPPED).open("a") as file:
            file.write(json.dumps([number, reason]) + "\n")

    def skipped(self) -> list[tuple[int, str]]:
        """Return numbers and reasons of all items left out by all processes, in order."""
        lines = [line for part in self.parts for line in complete_lines(part / SKIPPED)]
        return sorted((number, reason) for number, reason in map(json.loads, lines))

    def count(self) -> tuple[int, int]:
        """Return how many items all processes have finished, and how many they have left out."""
        return self._lines(RECORDS), self._lines(SKIPPED)

    def _lines(self, name: str) -> int:
        total = 0
        for part in self.parts:
            size, lines = self._counts.get(part / name, (0, 0))
            with contextlib.suppress(FileNotFoundError), (part / name).open("rb") as file:
                file.seek(size)
                added = file.read()
                added = added[: added.rfind(b"\n") + 1]
                self._counts[part / name] = size + len(added), (lines := lines + added.count(b"\n"))
            total += lines
        return total

    def check(self) -> None:
        """Check that process 0 is alive; to be called between pictures.

        Raises:
            BadFile: process 0 has ended, so that the result would never be written.
        """
        if self.process.rank != 0 and not self._locked.held(READY):
            raise BadFile(f"process 0 of {self.process.number} has ended: run the same command to resume")

    def _begun(self, rank: int) -> bool:
        """Return whether a process has started its part of this run."""
        try:
            return (self.folder / f"part-{rank}" / "begun").read_text() == self._token
        except FileNotFoundError:
            return False

    @property
    def _locked(self) -> ByteLocks:
        assert self._locks is not None
        return self._locks

    def finish(self, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Wait until the parts of all processes are complete.

        Args:
            on_wait: Called by process 0 while it waits.

        Returns:
            True in process 0, which then writes the result; False in the others, once it is written.

        Raises:
            BadFile: a process has ended before its part was complete, or has not started.
        """
        locks, number = self._locked, self.process.number
        if self.process.rank != 0:
            locks.hold(self._byte(self.process.rank) + 1, PATIENCE)
            while locks.held(READY):
                time.sleep(PAUSE)
            return False
        until, waited = time.monotonic() + BEGIN, set(range(1, number))
        while waited:
            for rank in sorted(waited):
                begun = self._begun(rank)  # before its lock is tested: a process that has started held it
                at_work = locks.held(self._byte(rank))
                if locks.held(self._byte(rank) + 1):
                    waited.discard(rank)
                elif not at_work and (begun or time.monotonic() > until):
                    what = "ended before its part was complete" if begun else "not started"
                    raise BadFile(f"process {rank} of {number} has {what}: run the same command to resume")
            on_wait()
            time.sleep(PAUSE if waited else 0)
        return True

    def make(self, out: Path, save: Callable[[Path], object]) -> None:
        """Write the result with ``save`` to the run's folder, then rename it to ``out``; for process 0."""

        def marked(partial: Path) -> None:
            save(partial)
            files.write_text(self.folder / "made.json", json.dumps(_identity(partial)))

        files.write(out, marked, self.folder)

    def remove(self) -> None:
        """Wait for the other processes to end, then remove the folder; for process 0, after the result."""
        locks = self._locked
        locks.release(READY)
        until = time.monotonic() + 3 * PATIENCE
        while locks.held(self._byte(1), 0) and time.monotonic() < until:
            time.sleep(PAUSE)
        self._forget()
        shutil.rmtree(self.folder, ignore_errors=True)  # a process waiting for the lock may have created another

    def __enter__(self) -> SharedRun:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Release all locks; remove the folder of a run that failed before any result."""
        if self._records is not None:
            self._records.close()
        if self._locks is None:
            return
        alone = self.process.number == 1 and not self._locks.removed
        if kind is not None and alone and not any(complete_lines(part / RECORDS) for part in self.parts):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._locks.close()


def produced(folder: Path, out: Path) -> bool:
    """Return whether ``out`` is the result of the run in ``folder``, which ended before removing the folder."""
    try:
        return json.loads((folder / "made.json").read_text()) == _identity(out)
    except FileNotFoundError:
        return False


def _identity(path: Path) -> list[int]:
    """Return the properties that a file keeps when it is renamed."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns]
