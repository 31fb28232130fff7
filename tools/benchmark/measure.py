"""Measurement of a case: ours and its peers in turns, call by call, in rounds, repeated if a row is noisy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .case import Case, Run
from .load import LOADED, Watch
from .memory import peak_memory, resident_peak, size
from .summary import better_peer, noisy, summarize

__all__ = ["Settings", "interleaved", "measure", "peak_memory", "seconds"]


@dataclass(frozen=True)
class Settings:
    """Duration of the measurement of a row.

    Args:
        seconds: Time for the rounds of one attempt.
        rounds: Maximum rounds; they end earlier when ``seconds`` have passed.
        min_rounds: Minimum rounds, however long they take; at most three for heavy cases.
        attempts: Maximum measurements of a noisy row.
    """

    seconds: float = 5.0
    rounds: int = 40
    min_rounds: int = 5
    attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("rounds", "min_rounds", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seconds < 0:
            raise ValueError(f"seconds must not be negative, got {self.seconds}")


def seconds(run: Run, device: str, calls: int = 1) -> float:
    """Time ``calls`` calls and return the seconds of one."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def interleaved(runs: dict[str, Run], device: str, settings: Settings, calls: int = 1) -> dict[str, list[float]]:
    """Return times of all runs, in turns A B A B …, so that a slowdown of the machine affects all of them alike.

    The runs are warm, because their memory was measured before.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for number in range(max(settings.rounds, settings.min_rounds)):
        if number >= settings.min_rounds and time.perf_counter() - begin > settings.seconds:
            break
        for name, run in runs.items():
            times[name].append(seconds(run, device, calls))
    return times


Timer = Callable[[dict[str, Run], str, Settings, int], dict[str, list[float]]]


def measure(case: Case, device: str, settings: Settings, timer: Timer = interleaved) -> dict[str, Any]:
    """Return one row: statistics and memory of each, and the ratios of the better peer to ours, by minimum.

    Args:
        case: The case to measure.
        device: ``cpu`` or ``cuda``.
        settings: Rounds and attempts.
        timer: Function that takes the times; tests replace it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    try:
        return _measure(case, device, settings, timer)
    finally:
        torch.set_num_threads(threads)


def _measure(case: Case, device: str, settings: Settings, timer: Timer) -> dict[str, Any]:
    runs, memory, errors = {"ours": case.ours()}, {}, {}
    memory["ours"] = _memory(runs["ours"], device, case)
    for name, prepare in case.peers.items():
        try:
            run = prepare()
            memory[name] = _memory(run, device, case)
            runs[name] = run
        except (ImportError, RuntimeError) as error:
            errors[name] = {"error": f"cannot run: {str(error).splitlines()[0][:80]}"}
    if case.heavy:
        settings = replace(settings, min_rounds=min(3, settings.min_rounds))
    attempts, is_noisy = 0, True
    while is_noisy and attempts < settings.attempts:
        attempts += 1
        watch = Watch()
        times = timer(runs, device, settings, case.calls)
        load = watch.read()
        found = {name: summarize(times[name]) | memory[name] for name in runs}
        ours = found.pop("ours")
        best = better_peer(found)
        is_noisy = noisy([ours, *([found[best]] if best else [])])
    row = {
        "case": case.name,
        "ours": ours,
        "peers": {name: found.get(name) or errors[name] for name in case.peers},
        "better_peer": best,
        "ratio": None if best is None else found[best]["min"] / ours["min"],
        "memory_ratio": None if best is None else ours["memory"] / max(1, found[best]["memory"]),
        "noisy": is_noisy,
        "attempts": attempts,
        "load": load,
        "loaded": (load["others"] or 0) > LOADED,
        "goal": case.goal,
        "threads": torch.get_num_threads(),
    }
    return row | ({"buffer": case.buffer._asdict()} if case.buffer else {})


def _memory(run: Run, device: str, case: Case) -> dict[str, int]:
    """Measure peak memory, which also warms up; with a buffer, also that of the results and of the process."""
    found = {"memory": peak_memory(run, device)}
    if case.buffer is not None and device == "cpu":
        found["resident"], found["results"] = resident_peak(run)
    elif case.buffer is not None:
        found["results"] = size(run())
    return found
