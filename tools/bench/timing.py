"""Timing in turns: by the clock on CPUs; on CUDA by events, graphs for short runs, and caches flushed before each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from .case import Run

HOST_SECONDS = 0.05  # for the host's time of a call
EAGER_SECONDS, EAGER_CALLS = 5e-3, 100  # of calls back to back in a timed sample, and their number at most
GRAPHS_UNDER = 5e-2  # seconds with the host's time, which the first runs of a short run consist of


@dataclass(frozen=True)
class Settings:
    """Duration of the measurement of a row."""

    seconds: float = 5.0  # for the rounds of one attempt
    rounds: int = 40  # at most; they end earlier when the seconds have passed
    min_rounds: int = 5  # however long they take; at most three for heavy cases
    attempts: int = 3  # measurements of a noisy row, at most

    def __post_init__(self) -> None:
        for name in ("rounds", "min_rounds", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seconds < 0:
            raise ValueError(f"seconds must not be negative, got {self.seconds}")


class Contestant:
    """A function to time, which has run before.

    On CUDA it is timed by a graph if it is short and can be captured. ``timing="eager"`` times eager calls back to
    back on an idle device instead, which take as long as the slower of host and device, and also a graph where
    possible; ``timing="whole"`` times these calls alone.
    """

    def __init__(self, run: Run, device: str, calls: int = 1, timing: str = "graph") -> None:
        self.run, self.calls, self.device = run, calls, device
        self.eager = timing != "graph"
        self.how: dict[str, Any] = {}
        if device != "cuda":
            return
        if self.eager:
            self._count_calls(by_graph=timing == "eager")
            return
        self.how = {"how": "events", "eager": self.once()}
        self.how["host"] = self.host_seconds()
        if self.how["eager"] < GRAPHS_UNDER:
            try:
                self.run, self.how["how"] = captured(run), "graph"
            except RuntimeError as error:
                torch.cuda.synchronize()
                self.how["how"] = f"events, with the host's time: no graph ({str(error).splitlines()[0][:60]})"

    def _count_calls(self, by_graph: bool) -> None:
        """Choose the calls of a sample; ``how`` gets the host's time of a call and, ``by_graph``, the graph's."""
        once = self.once()
        self.calls = max(1, min(EAGER_CALLS, round(EAGER_SECONDS / max(once, 1e-7))))
        self.how = {"how": "eager", "calls": self.calls, "host": self.host_seconds()}
        if by_graph and once < GRAPHS_UNDER:
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    replay = Contestant(captured(self.run), "cuda", timing="whole")
            except RuntimeError:  # it waits for the device
                torch.cuda.synchronize()
                return
            self.how["graph"] = replay.once()

    def start(self) -> Any:
        """Run; return the seconds of one call, or on CUDA the events around it."""
        if self.device != "cuda":
            begin = time.perf_counter()
            for _ in range(self.calls):
                self.run()
            return (time.perf_counter() - begin) / self.calls
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(self.calls):
            self.run()
        events[1].record()
        return events

    def seconds(self, started: Any) -> float:
        """Return the seconds of one call that :meth:`start` started."""
        return started if self.device != "cuda" else started[0].elapsed_time(started[1]) / 1e3 / self.calls

    def host_seconds(self, calls: int = 100) -> float:
        """Return the host's time of a warm call, of calls back to back that do not wait for the device."""
        if not self.eager:  # an eager one has run at least twice
            for _ in range(3):
                self.run()
        torch.cuda.synchronize()
        begin, done = time.perf_counter(), 0
        while done < calls and time.perf_counter() - begin < HOST_SECONDS:
            self.run()
            done += 1
        passed = time.perf_counter() - begin
        torch.cuda.synchronize()
        return passed / done

    def once(self) -> float:
        """Return about how long a call takes, measured in two runs."""
        seconds = []
        for _ in range(2):
            started = self.start()
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(self.seconds(started))
        return min(seconds)


def captured(run: Run) -> Run:
    """Capture a run in a CUDA graph and return a function that replays it.

    Raises:
        RuntimeError: The run waits for the device, or does something else that a graph cannot contain.
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
        kept = run(), run  # the graph writes and reads their tensors: the next capture returns freed memory

    def replay() -> object:
        graph.replay()
        return kept[0]

    return replay


def flush(device: str, kept: dict[str, torch.Tensor] = {}) -> None:  # noqa: B006 - the buffer is kept
    """Flush the device's L2 cache, by reading more than it holds; also keeps it busy while the host runs ahead.

    Written lines would be written back while the next run is timed.
    """
    if device == "cuda":
        if not kept:
            size = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 << 20
            kept["buffer"] = torch.zeros(size, dtype=torch.float32, device="cuda")  # four times its bytes
            kept["sum"] = torch.zeros((), dtype=torch.float32, device="cuda")
        torch.sum(kept["buffer"], 0, out=kept["sum"])


def race(contestants: dict[str, Contestant], device: str, settings: Settings) -> dict[str, list[float]]:
    """Return times of all, in turns A B A B …, so that a slowdown of the machine affects all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    begin = time.perf_counter()
    for number in range(max(settings.rounds, settings.min_rounds)):
        if number >= settings.min_rounds and time.perf_counter() - begin > settings.seconds:
            break
        started = {}
        for name, contestant in contestants.items():
            if contestant.eager and device == "cuda":
                torch.cuda.synchronize()
            else:
                flush(device)
            started[name] = contestant.start()
        if device == "cuda":
            torch.cuda.synchronize()
        for name, contestant in contestants.items():
            times[name].append(contestant.seconds(started[name]))
    return times
