"""Peak memory of a run, in torch's allocator and in the process."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

import torch

from .case import Run, tensors

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(run: Run, device: str) -> int:
    """Return the peak of bytes in torch's allocator during ``run``, above the level before.

    On CUDA a warm-up comes first: the first run of a kernel also allocates permanent workspaces.
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


class ResidentPeak:
    """Peak memory of this process in bytes, including scratch memory of kernels.

    Linux records it per process; if it cannot be reset, the peak is that of the whole lifetime of the process.
    """

    def __init__(self) -> None:
        release()
        self.before = _status("VmRSS")

    def reset(self) -> None:
        """Reset the peak; ``before`` is kept."""
        release()
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")

    def read(self) -> int:
        """Return the peak since :meth:`reset`, above the level at creation."""
        return max(0, _status("VmHWM") - self.before)


def resident_peak(run: Run) -> tuple[int, int]:
    """Return the peak of bytes in the process during ``run``, above the level before, and the bytes of its results."""
    peak = ResidentPeak()
    peak.reset()
    result = run()
    return peak.read(), sum(tensor.nbytes for tensor in tensors(result))


def release() -> None:
    """Return freed memory to the system, if the C library can, because it would hide the memory of a run."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
