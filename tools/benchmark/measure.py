"""Time and memory of a run, on the CPU or a CUDA device."""

from __future__ import annotations

import statistics
import time

import torch

from .case import Run


def seconds(run: Run, device: str) -> float:
    """One timed run."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def interleaved(runs: dict[str, Run], device: str, repeats: int, budget: float = 30.0) -> dict[str, list[float]]:
    """Times of all runs in turn, A B A B …, so that a machine that slows down slows all of them alike.

    The runs are warm (their memory was measured). Rounds end after ``repeats`` or, where they take long, after
    ``budget`` seconds, but never before three.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for round in range(repeats):
        if round >= 3 and time.perf_counter() - begin > budget:
            break
        for name, run in runs.items():
            times[name].append(seconds(run, device))
    return times


def paired_ratio(peer: list[float], ours: list[float]) -> float:
    """How many times the peer's time is ours: the median over rounds, each measured side by side."""
    return statistics.median(p / o for p, o in zip(peer, ours))


def peak_memory(run: Run, device: str) -> int:
    """The most bytes that torch's allocator held at once for the run, beyond what it held before.

    On CUDA a warm-up comes first: the first run of a kernel also allocates workspaces that stay.
    """
    if device == "cuda":
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = run()
        del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
