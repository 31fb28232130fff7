"""Timing of short runs: CUDA graphs replayed between events, contestants in turn, caches flushed before each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tools.benchmark.summary import summarize

Run = Callable[[], object]
GRAPHS_UNDER = 5e-2  # seconds with the host's time, which the first runs of a short run consist of
ROUNDS, LEAST_ROUNDS = 25, 5


class Contestant:
    """A function to time, by a CUDA graph if it is short and can be captured.

    Args:
        run: The function, which has run before.
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, run: Run, device: str) -> None:
        self.run, self.device, self.how = run, device, "events"
        self.estimate = self.eager = _once(run, device)
        if device != "cuda":
            self.how = "clock"
        elif self.estimate < GRAPHS_UNDER:
            try:
                self.run, self.how = captured(run), "graph"
                self.estimate = _once(self.run, device)
            except RuntimeError as error:
                torch.cuda.synchronize()
                self.how = f"events, with the host's time: no graph ({str(error).splitlines()[0][:60]})"


def captured(run: Run) -> Run:
    """Capture a run in a CUDA graph and return a function that replays it.

    Raises:
        RuntimeError: the run waits for the device, or does something else that a graph cannot contain.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        # Runs that wait for the device cannot be captured, and an attempt would leave the allocator in a bad state.
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = run()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _once(run: Run, device: str) -> float:
    """Return about how long a run takes, measured in two runs."""
    found = []
    for _ in range(2):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
    return min(found)


class Flush:
    """Flush of the device's L2 cache, by writing more than it holds."""

    def __init__(self, device: str) -> None:
        self.buffer: torch.Tensor | None = None
        if device == "cuda":
            size = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 << 20
            self.buffer = torch.empty(4 * size, dtype=torch.int8, device="cuda")

    def __call__(self) -> None:
        if self.buffer is not None:
            self.buffer.zero_()


def race(contestants: Mapping[str, Contestant], flush: Flush, seconds: float) -> dict[str, dict[str, Any]]:
    """Time all contestants in turn, A B A B …, for about ``seconds``; return statistics and timing method by name."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    begin = time.monotonic()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.monotonic() - begin > seconds:
            break
        events = []
        for name, each in contestants.items():
            if each.device != "cuda":
                start_time = time.perf_counter()
                each.run()
                times[name].append(time.perf_counter() - start_time)
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()  # also keeps the device busy while the host runs ahead
            start.record()
            each.run()
            end.record()
            events.append((name, start, end))
        if events:
            torch.cuda.synchronize()
        for name, start, end in events:
            times[name].append(start.elapsed_time(end) / 1e3)
    return {
        name: summarize(found) | {"how": contestants[name].how, "eager": contestants[name].eager}
        for name, found in times.items()
    }


def fastest(run: Run, device: str, repeats: int = 10) -> float:
    """Return the minimum time of a run, with warm caches."""
    for _ in range(2):
        run()
    return min(_once(run, device) for _ in range(repeats // 2))
