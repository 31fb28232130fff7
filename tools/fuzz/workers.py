"""Run calls in worker processes, any of which may crash at any call.

A worker writes a line before and after each call. If it ends in between, the call that it had started is the failure,
and another worker continues its share.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

HANG = 600  # seconds per call
_START, _END = "fuzz begins ", "fuzz ended "


class Result(NamedTuple):
    """Descriptions of one call's faults, and its largest error in roundings."""

    number: int
    faults: list[str]
    roundings: float = 0.0


def work(share: str, judge: Callable[[int], tuple[list[str], float]]) -> None:
    """Run and report a share of the calls, ``FIRST:STOP:STEP``, in a worker."""
    for number in range(*map(int, share.split(":"))):
        print(f"{_START}{number}", flush=True)
        print(f"{_END}{json.dumps(judge(number))}", flush=True)


async def run(command: Sequence[str], calls: int, workers: int, report: Callable[[Result], None]) -> None:
    """Report the result of every call as it ends; ``command`` starts a worker with ``--share FIRST:STOP:STEP``."""
    workers = max(1, min(workers, calls))
    await asyncio.gather(*(_share(command, first, calls, workers, report) for first in range(workers)))


async def _share(command: Sequence[str], first: int, stop: int, step: int, report: Callable[[Result], None]) -> None:
    """Report the results of calls first, first + step, ..., with as many processes as necessary."""
    # Passive: the threads of several processes share the cores.
    environment = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    pipes = dict(stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, limit=2**24)
    while first < stop:
        process = await asyncio.create_subprocess_exec(
            *command, "--share", f"{first}:{stop}:{step}", env=environment, **pipes
        )
        assert process.stdout is not None
        begun, done, how, said = None, 0, "", list[str]()  # said: output besides its reports, shown if it crashes
        try:
            while line := (await asyncio.wait_for(process.stdout.readline(), HANG)).decode(errors="replace"):
                if line.startswith(_START):
                    begun, said = int(line.removeprefix(_START)), []
                elif line.startswith(_END) and begun is not None:
                    report(Result(begun, *json.loads(line.removeprefix(_END))))
                    begun, done = None, done + 1
                else:
                    said = [*said[-200:], line.strip()]
            code = await process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        except asyncio.TimeoutError:
            how = f"killed after {HANG} s without an answer"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        # For a sanitizer's report, the line that names the error, else the last one.
        marked = [line for line in said if "ERROR: AddressSanitizer" in line or "runtime error:" in line]
        how += "".join(f": {line[:300]}" for line in marked[:1] or said[-1:])
        if begun is None:
            if process.returncode or not done:
                raise RuntimeError(f"a worker ended before its first call, {how}")
            return
        report(Result(begun, [f"the process ended, {how}"]))
        first = begun + step
