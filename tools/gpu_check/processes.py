"""Processes with time limits, and the time that is left for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

LEAST = 3.0  # seconds under which nothing more is started


class Done(NamedTuple):
    """A process that has ended.

    Attributes:
        status: Its exit status; None where the limit ended it.
        seconds: How long it ran.
        output: The end of what it printed.
    """

    status: int | None
    seconds: float
    output: str

    def last_line(self) -> str:
        """Return the last line that is not empty, or what the status says where nothing was printed."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"ended with status {self.status} and no message"


@dataclass
class Budget:
    """Seconds that several steps share.

    Args:
        seconds: From now on.
    """

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the seconds that are left, 0 where none are."""
        return max(0.0, self.start + self.seconds - time.monotonic())

    def spent(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start

    def part(self, seconds: float) -> Budget:
        """Return a budget of as many seconds, or of what is left."""
        return Budget(min(seconds, self.left()))

    def over(self) -> bool:
        """Return True where it is not worth starting anything."""
        return self.left() < LEAST


def run(
    command: Sequence[str | Path],
    limit: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    tail: int = 6000,
) -> Done:
    """Run a command, whose output goes to the end of ``log``; kill it and what it started once ``limit`` is over."""
    begin = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        offset = file.tell()
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(max(0.1, limit))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what it left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - tail))
        output = file.read().decode(errors="replace")
    return Done(status, time.monotonic() - begin, output)
