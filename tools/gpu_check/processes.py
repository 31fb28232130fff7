"""Processes with time limits and a shared time budget."""

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

LEAST = 3.0  # seconds; nothing more is started if less is left


class Done(NamedTuple):
    """A process that has ended.

    Attributes:
        status: Its exit status; None if it ran into the time limit.
        seconds: How long it ran.
        output: The end of its output.
    """

    status: int | None
    seconds: float
    output: str

    def last_line(self) -> str:
        """Return the last non-empty line of the output, or a description of the status if there is none."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"ended with status {self.status} and no message"


@dataclass
class Budget:
    """Time shared by several steps.

    Args:
        seconds: Total time from now on.
    """

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self.start + self.seconds - time.monotonic())

    def spent(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start

    def part(self, seconds: float) -> Budget:
        """Return a budget of ``seconds``, or of the remaining time if that is less."""
        return Budget(min(seconds, self.left()))

    def over(self) -> bool:
        """Return whether too little time is left to start anything."""
        return self.left() < LEAST


def run(
    command: Sequence[str | Path],
    limit: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    tail: int = 6000,
) -> Done:
    """Run a command and append its output to ``log``; after ``limit``, kill it and the processes it started."""
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
            with contextlib.suppress(ProcessLookupError):  # also processes that it left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - tail))
        output = file.read().decode(errors="replace")
    return Done(status, time.monotonic() - begin, output)
