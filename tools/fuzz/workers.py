"""Runs calls in worker processes, any of which may crash at any call.

A worker writes a line before and after each call. If it ends in between, the call that it had started is the failure,
and another worker continues its share.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

HANG = 600  # seconds per call
_START, _END = "fuzz begins ", "fuzz ended "


class Result(NamedTuple):
    """Descriptions of one call's faults, and its largest error in roundings."""

    number: int
    faults: list[str]
    roundings: float = 0.0


def report_start(number: int) -> None:
    print(f"{_START}{number}", flush=True)


def report_end(faults: Sequence[str], roundings: float) -> None:
    print(f"{_END}{json.dumps([list(faults), roundings])}", flush=True)


def run(command: Sequence[str], calls: int, workers: int) -> Iterator[Result]:
    """Yield the result of every call, in the order in which they end.

    Args:
        command: Starts a worker; ``--share FIRST:STOP:STEP`` is added.
        calls: Number of calls.
        workers: Number of concurrent processes.
    """
    workers = max(1, min(workers, calls))
    results: queue.Queue[Result | BaseException | None] = queue.Queue()
    stopped = threading.Event()

    def work(first: int) -> None:
        try:
            for result in _share(command, first, calls, workers, stopped):
                results.put(result)
        except BaseException as error:
            results.put(error)
        results.put(None)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(workers)]
    for thread in threads:
        thread.start()
    try:
        running = workers
        while running:
            found = results.get()
            if found is None:
                running -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def _share(command: Sequence[str], first: int, stop: int, step: int, stopped: threading.Event) -> Iterator[Result]:
    """Yield the results of calls first, first + step, ..., with as many processes as necessary."""
    while first < stop and not stopped.is_set():
        process = _Process([*command, "--share", f"{first}:{stop}:{step}"])
        try:
            yield from process.results(stopped)
        finally:
            process.end()
        if stopped.is_set():
            return
        if process.begun is None:
            if process.code != 0 or process.done == 0:
                raise RuntimeError(f"a worker ended before its first call, {process.end_in_words()}{process.tail()}")
            return
        yield Result(process.begun, [f"the process ended, {process.end_in_words()}{process.tail()}"])
        first = process.begun + step


class _Process:
    """A worker, read by a thread to detect calls that hang."""

    def __init__(self, command: Sequence[str]) -> None:
        # Passive: the threads of several processes share the cores.
        environment = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        )
        self.begun: int | None = None
        self.done, self.code, self.hung, self.closed = 0, None, False, False
        self.said: list[str] = []  # output besides its reports, shown if it crashes
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def results(self, stopped: threading.Event) -> Iterator[Result]:
        while not stopped.is_set():
            try:
                line = self.lines.get(timeout=HANG)
            except queue.Empty:
                self.hung = True
                return
            if line is None:
                self.closed = True
                return
            if line.startswith(_START):
                self.begun, self.said = int(line.removeprefix(_START)), []
            elif line.startswith(_END) and self.begun is not None:
                number, self.begun, self.done = self.begun, None, self.done + 1
                yield Result(number, *json.loads(line.removeprefix(_END)))
            else:
                self.said = [*self.said[-200:], line.strip()]

    def end(self) -> None:
        """End the process if it is still running, and collect its status."""
        if not self.closed:  # otherwise it ends by itself, with its own status
            self.process.kill()
        self.code = self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def end_in_words(self) -> str:
        assert self.code is not None
        if self.hung:
            return f"killed after {HANG} s without an answer"
        return f"by {signal.Signals(-self.code).name}" if self.code < 0 else f"with status {self.code}"

    def tail(self) -> str:
        """Return its last output; for a sanitizer's report, the line that names the error."""
        marked = [line for line in self.said if "ERROR: AddressSanitizer" in line or "runtime error:" in line]
        return "".join(f": {line[:300]}" for line in marked[:1] or self.said[-1:])
